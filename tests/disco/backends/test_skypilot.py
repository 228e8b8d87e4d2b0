"""SkyPilot tasks: their fields, their shell code run on a stand-in for the cloud, and SkyPilot's own reading."""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from safetensors.torch import load_file
from torch import equal

from disco import pipeline
from disco.backends import skypilot
from disco.backends.plan import LaunchError, plan
from disco.backends.start import launch
from disco.config import ConfigError, Experiment
from launch.scripts import script, write
from tests.disco.tiny_experiment import corpus, tiny_experiment


def experiment(folder: Path, **section) -> Experiment:
    corpus(folder / "corpus")
    return Experiment.parse(tiny_experiment(folder, launch={"skypilot": {"bucket": "s3://my-bucket"} | section}))


def task_of(config: Experiment, folder: Path) -> dict:
    return yaml.safe_load(skypilot.scripts(config, plan(config), folder / "experiment.yaml")["train-1.yaml"])


def test_a_task_asks_for_the_card_of_the_price_and_recovers(tmp_path):
    task = task_of(experiment(tmp_path), tmp_path)
    assert set(task) == {"name", "resources", "file_mounts", "setup", "run"}
    assert task["resources"] == {
        "accelerators": "RTX4090:1",
        "use_spot": True,
        "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 1},
    }
    assert task["file_mounts"]["/disco/bucket"] == {"source": "s3://my-bucket", "mode": "MOUNT"}
    assert task["file_mounts"]["/disco/pack.tar"] == str(tmp_path / "tiny-submodel-1.tar")
    given = task_of(experiment(tmp_path, accelerator="L4:2", spot=False), tmp_path)["resources"]
    assert (given["accelerators"], given["use_spot"]) == ("L4:2", False)


def test_the_package_reads_the_task(tmp_path):
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed: pip install 'moe-disco[skypilot]'")
    (tmp_path / "tiny-submodel-1.tar").touch()
    task = task_of(experiment(tmp_path), tmp_path)
    del task["file_mounts"]["/disco/bucket"]  # it would ask the cloud for the bucket
    read = sky.Task.from_yaml_config(task)
    [resources] = read.resources
    assert resources.use_spot
    assert resources.accelerators == {"RTX4090": 1}
    assert resources.job_recovery["strategy"] == "EAGER_NEXT_REGION"


def test_what_is_missing_is_asked_for(tmp_path):
    config = experiment(tmp_path, bucket=None)
    with pytest.raises(ConfigError, match="launch.skypilot.bucket.*s3://name"):
        launch(config, "skypilot", dry_run=True, console=Console(file=io.StringIO()))
    priced = config.hardware.model_copy(update={"train": "cpu"})
    with pytest.raises(ConfigError, match="hardware.train is 'cpu'.*launch.skypilot.accelerator"):
        task_of(experiment(tmp_path).model_copy(update={"hardware": priced}), tmp_path)


def test_without_the_commands_it_says_so(tmp_path, monkeypatch):
    for missing, remedy in (("sky", "pip install"), ("aws", "install it")):
        monkeypatch.setattr(
            skypilot.shutil, "which", lambda name, missing=missing: None if name == missing else name
        )
        with pytest.raises(ConfigError, match=f"the command {missing} is not there: {remedy}"):
            launch(experiment(tmp_path), "skypilot", dry_run=False, console=Console(file=io.StringIO()))


def test_tuning_goes_to_the_card_that_is_named_for_it(tmp_path):
    corpus(tmp_path / "corpus")
    raw = tiny_experiment(tmp_path, baselines=["joint"])
    raw["finetune"] |= {"processes": 4}
    raw["launch"]["skypilot"] = {"bucket": "gs://my-bucket", "finetune": "A100-80GB"}
    files = skypilot.scripts(config := Experiment.parse(raw), plan(config), tmp_path / "experiment.yaml")
    for name in ("finetune_router", "finetune", "baselines-joint"):
        described = yaml.safe_load(files[f"{name}.yaml"])
        assert described["resources"]["accelerators"] == "A100-80GB:4"
        assert f"packed-{name}.json" in described["run"]
    assert "--stage baselines/joint" in yaml.safe_load(files["baselines-joint.yaml"])["run"]
    after = [line.split()[1] for line in files["run.sh"].splitlines() if line.endswith(".sh") and "&" not in line]
    assert after == [
        f"{name}.sh"
        for name in (
            "prepare", "merge", "finetune_router-away", "finetune-away", "finetune", "baselines-joint-away",
            "baselines", "report",
        )
    ]  # fmt: skip
    assert "gsutil cp gs://my-bucket/tiny-finetune.result.tar" in files["finetune-away.sh"]


FAKE_SKY = """#!{python}
# sky jobs launch: runs the task on a machine of its own; its bucket is a folder. Told so, the first job is lost.
import os, pathlib, subprocess, sys, yaml
root = pathlib.Path({root!r})
with open(root / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[2] != "launch":
    sys.exit("no such job")
task = yaml.safe_load(open(sys.argv[-1]))
if (root / "lose").exists():
    (root / "lose").unlink()
    sys.exit("out of capacity")
machine = root / "machines" / task["name"]
(machine / "disco").mkdir(parents=True)
(machine / "disco" / "pack.tar").symlink_to(task["file_mounts"]["/disco/pack.tar"])
(machine / "disco" / "bucket").symlink_to(root / "bucket")
run = task["run"].replace(" /disco/", f" {{machine}}/disco/").replace('"/disco/', f'"{{machine}}/disco/')
run = run.replace("~", str(machine / "home"))
(machine / "home").mkdir()
sys.exit(subprocess.run(["bash", "-c", run]).returncode)
"""
FAKE_AWS = """#!{python}
import shutil, sys
shutil.copy(sys.argv[3].replace("s3://my-bucket", {root!r} + "/bucket"), sys.argv[4])
"""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_plan_on_a_stand_in_for_the_cloud(tmp_path, monkeypatch):
    """One job is lost; the same command takes what is there, trains the rest, tunes there, merges and reports."""
    raw = tiny_experiment(tmp_path, seed_phase={"tokens": 0}, train={"tokens": 512})
    raw["launch"]["skypilot"] = {"bucket": "s3://my-bucket", "finetune": "A100-80GB"}
    corpus(tmp_path / "corpus")
    config = Experiment.parse(raw)
    (tmp_path / "bucket").mkdir()
    (tmp_path / "lose").touch()
    for name, text in (("sky", FAKE_SKY), ("aws", FAKE_AWS)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(python=sys.executable, root=str(tmp_path)))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789-a-key-of-nobody")
    with pytest.raises(LaunchError, match="1 of 2 submodels are missing, the others are kept"):
        launch(config, "skypilot", dry_run=False, console=Console(file=io.StringIO()))
    launch(config, "skypilot", dry_run=False, console=Console(file=io.StringIO()))
    assert set(pipeline.status(config).values()) == {pipeline.FRESH}
    calls = (tmp_path / "calls").read_text()
    assert calls.count("jobs launch") == 5 and "--secret WANDB_API_KEY" in calls and "a-key-of" not in calls
    whole = config.model_copy(update={"name": "whole"})
    pipeline.run(whole, until="finetune", say=lambda text: None)
    got, expected = (load_file(run.folder / "finetune" / "model.safetensors") for run in (config, whole))
    assert all(equal(got[name], expected[name]) for name in expected)


def test_a_recovered_job_goes_on_from_the_saved_state(tmp_path):
    """The run commands of a task, /disco and ~ moved: killed once, then begun again on an empty machine."""
    run = task_of(experiment(tmp_path), tmp_path)["run"].replace("/disco/", f"{tmp_path}/disco/")
    run = run.replace("sleep 120", "sleep 0.1").replace("~", "$HOME")
    root, bucket = tmp_path / "tiny-submodel-1", tmp_path / "disco" / "bucket"
    (root / "runs" / "tiny").mkdir(parents=True)
    bucket.mkdir(parents=True)
    made_from = [root / "experiment.yaml", root / "runs" / "tiny" / "packed-1.json"]
    for file in made_from:
        file.write_text(file.name)
    with tarfile.open(tmp_path / "disco" / "pack.tar", "w") as tar:
        tar.add(root, arcname=root.name)
    fake = [
        "if [ -e checkpoint ]; then echo went on; touch tiny-submodel-1.result.tar; exit 0; fi",
        "touch checkpoint; for i in $(seq 200); do",
        f"sleep 0.05; [ ! -e {bucket}/*[0-9a-f].tar ] || break; done; exit 3",
    ]
    [path] = write(tmp_path / "bin", {"disco.sh": script(fake, about="")})
    path.rename(tmp_path / "bin" / "disco")
    for code, said in ((3, ""), (0, "went on\n")):
        home = tmp_path / f"machine{code}"
        home.mkdir()
        environment = os.environ | {"HOME": str(home), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", run], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (code, said), done.stderr
    key = hashlib.sha256(b"".join(file.read_bytes() for file in made_from)).hexdigest()[:16]
    assert sorted(file.name for file in bucket.iterdir() if not file.name.endswith(".new")) == [
        f"tiny-submodel-1-{key}.tar",
        "tiny-submodel-1.result.tar",
    ]
    shutil.rmtree(bucket)
