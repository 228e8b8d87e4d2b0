"""The plan covers every stage of the experiment in an order that works, and its scripts are sound."""

import io
import subprocess

import pytest
from rich.console import Console

from disco import artifacts
from disco.artifacts import ArtifactError
from disco.backends.plan import plan
from disco.backends.start import BACKENDS, launch
from disco.config import ConfigError, Experiment
from disco.pipeline import _until
from disco.stages import stages
from tests.disco.tiny_experiment import corpus, tiny_experiment

SECRET = "0123456789-a-key-of-nobody"


def experiment(folder, **changed) -> Experiment:
    corpus(folder / "corpus")
    return Experiment.parse(tiny_experiment(folder, **changed))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"seed_phase": {"tokens": 0}},
        {"baselines": ["joint"]},
        {"baselines": ["joint", "random_split"], "cluster": {"features": "embedding"}},
        {"finetune": {"tokens": 0, "router_tokens": 64}},
        {"finetune": {"tokens": 0, "router_tokens": 0}, "baselines": ["random_split"]},
    ],
)
def test_steps_in_order_make_every_stage_once(tmp_path, changed):
    config = experiment(tmp_path, **changed)
    graph, made, done = stages(config), [], set()
    for step in plan(config):
        assert set(step.needs) <= done
        done.add(step.name)
        if step.stage:
            assert set(graph[step.stage].needs) <= set(made), step
            made.append(step.stage)
            continue
        until = [word for word in step.options if word != "--until"]
        new = [stage.name for stage in _until(graph, until) if stage.name not in made]
        assert new, step
        assert not any(graph[name].submodel for name in new)
        made += new
    assert sorted(made) == sorted(graph)


@pytest.mark.parametrize("on", sorted(BACKENDS))
def test_a_dry_run_writes_sound_scripts_without_secrets(tmp_path, monkeypatch, on):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    folder = tmp_path / "a b'c\"d $(touch pwned)"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    config = experiment(
        folder,
        baselines=["random_split", "joint"],
        launch={
            "ssh": {"hosts": ["gpu1", {"name": "me@gpu2", "devices": 2}], "finetune": "big"},
            "skypilot": {"bucket": "s3://my-bucket", "finetune": "A100-80GB"},
        },
    )
    console = Console(file=io.StringIO(), width=200)
    launch(config, on, dry_run=True, console=console)
    written = config.folder / "launch"
    shell = [path for path in written.iterdir() if path.suffix in (".sh", ".sbatch")]
    assert shell
    for path in shell:
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
        assert done.returncode == 0, f"{path}: {done.stderr}"
    for path in config.folder.rglob("*"):
        assert path.is_dir() or SECRET not in path.read_text()
    assert SECRET not in console.file.getvalue()
    assert Experiment.load(written / "experiment.yaml").folder == config.folder
    assert not list(tmp_path.rglob("pwned"))
    assert not (config.folder / "prepare").exists()
    if on == "ssh":  # tuning on its host, each before the step that would do it here
        after = [line for line in (written / "run.sh").read_text().splitlines() if line.startswith("bash ")]
        assert after == [
            f"bash {name}.sh"
            for name in (
                "prepare", "merge", "finetune_router-away", "finetune-away", "finetune", "baselines-joint-away",
                "baselines", "report",
            )
        ]  # fmt: skip
        away = (written / "finetune-away.sh").read_text()
        assert "--stage finetune" in away and "-- big " in away and "big:disco-runs/" in away


def test_unknown_back_ends_and_second_launches_are_refused(tmp_path):
    config = experiment(tmp_path)
    with pytest.raises(ConfigError, match="--on slrum: no such back end: did you mean 'slurm'"):
        launch(config, "slrum", dry_run=True, console=Console())
    with (
        artifacts.lock(config.folder, name="launch/.lock"),
        pytest.raises(ArtifactError, match=r"tiny/launch: another disco process \(pid \d+ on .*\) works here"),
    ):
        launch(config, "local", dry_run=True, console=Console())


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"retrys": 2}, "did you mean 'retries'"),
        ({"retries": -1}, "launch.retries"),
        ({"ssh": {"hosts": ["-oProxyCommand=x"]}}, "is no host"),
        ({"ssh": {"hosts": ["gpu1; rm -rf ."]}}, "is no host"),
        ({"ssh": {"hosts": ["gpu1", "gpu1"]}}, "gpu1 is there twice"),
        ({"ssh": {"finetune": {"name": "big", "devices": 2}}}, "finetune.processes says how many"),
        ({"ssh": {"finetune": "big"}, "nodes": 2, "node_command": ["x"]}, "it goes with nodes: 1"),
        ({"ssh": {"setup": "a\nb"}}, "one line"),
        ({"slurm": {"train": ["partition=x"]}}, "no sbatch option"),
        ({"slurm": {"train": ["--x=\n#SBATCH --y"]}}, "one line"),
        ({"rendezvous": "gpu1"}, "host:port"),
        ({"node_command": ["srun"]}, "goes with nodes"),
        ({"skypilot": {"bucket": "my bucket"}}, "s3://name"),
    ],
)
def test_bad_launch_sections_are_refused(tmp_path, section, match):
    with pytest.raises(ConfigError, match=match):
        experiment(tmp_path, launch=section)


def test_nodes_must_share_the_processes(tmp_path):
    config = experiment(tmp_path, launch={"nodes": 2}, finetune={"processes": 1})
    with pytest.raises(ConfigError, match="finetune.processes is 1, which launch.nodes=2.*finetune.processes=2"):
        launch(config, "local", dry_run=True, console=Console())
    config = experiment(tmp_path, launch={"nodes": 2}, finetune={"processes": 2})
    with pytest.raises(ConfigError, match="launch.nodes is 2 but nothing starts processes"):
        launch(config, "local", dry_run=True, console=Console())
