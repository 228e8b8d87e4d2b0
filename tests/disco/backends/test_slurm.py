"""The whole experiment as SLURM jobs: the scripts, and all of it on a real cluster of one machine."""

import io
import os
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from disco import pipeline
from disco.artifacts import ArtifactError
from disco.backends import slurm as backend
from disco.backends.plan import LaunchError, plan
from disco.backends.start import launch
from disco.config import ConfigError, Experiment
from launch import slurm
from launch.ledger import read
from tests.disco.tiny_experiment import corpus, tiny_experiment
from tests.launch.slurmd import slurm as cluster  # noqa: F401  (a fixture)

SECRET = "0123456789-a-key-of-nobody"


def experiment(folder: Path, **changed) -> Experiment:
    corpus(folder / "corpus")
    return Experiment.parse(tiny_experiment(folder, **changed))


def test_options_nodes_and_order(tmp_path):
    section = {
        "nodes": 2,
        "slurm": {
            "options": ["--account=me"],
            "train": ["--gres=gpu:1"],
            "finetune": ["--partition=big"],
            "setup": "module load x",
        },
    }
    config = experiment(tmp_path, launch=section, finetune={"processes": 4}, baselines=["joint"])
    files = backend.scripts(config, plan(config), tmp_path / "launch" / "experiment.yaml")
    tuned, array = files["finetune.sbatch"], files["train.sbatch"]
    for line in ("--requeue", "--account=me", "--partition=big", "--nodes=2", "--ntasks-per-node=1"):
        assert f"#SBATCH {line}\n" in tuned
    assert "'launch.node_command=[srun, --nodes=2, --ntasks=2, --ntasks-per-node=1]'" in tuned
    assert "#SBATCH --gres=gpu:1\n" in array
    assert "--partition=big" not in array
    assert "scripts=(train-0.sh train-1.sh)" in array
    assert all("module load x\n" in text for name, text in files.items() if name.endswith(".sbatch"))
    again = Experiment.parse(yaml.safe_load(config.dump()) | {"launch": section | {"node_command": ["mine"]}})
    assert (
        "launch.node_command"
        not in backend.scripts(again, plan(again), tmp_path / "experiment.yaml")["finetune.sbatch"]
    )


def test_no_slurm_and_earlier_jobs_are_refused(tmp_path, monkeypatch):
    config = experiment(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="sbatch is not on this machine"):
        launch(config, "slurm", dry_run=False, console=Console(file=io.StringIO()))
    monkeypatch.setattr(backend.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(slurm, "pending", lambda folder: ["12", "13"])
    with pytest.raises(ArtifactError, match="jobs 12 13 of an earlier launch are there: wait for them, or scancel"):
        launch(config, "slurm", dry_run=True, console=Console(file=io.StringIO()))
    monkeypatch.setattr(slurm, "pending", lambda folder: [])
    with pytest.raises(LaunchError, match="SLURM refused: .*: nothing was submitted"):
        launch(config, "slurm", dry_run=False, console=Console(file=io.StringIO()))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_real_cluster_makes_everything_through_a_preemption(cluster, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    config = experiment(
        tmp_path,
        seed_phase={"tokens": 0},
        train={"tokens": 131072, "log_every": 1},
        finetune={"tokens": 256, "router_tokens": 0, "processes": 2},
    )
    launch(config, "slurm", dry_run=False, console=Console(file=io.StringIO()))
    folder = config.folder / "launch"
    ids = dict(line.split() for line in (folder / slurm.JOBS).read_text().splitlines())
    with pytest.raises(ArtifactError, match="of an earlier launch are there"):
        launch(config, "slurm", dry_run=False, console=Console(file=io.StringIO()))
    metrics, deadline = config.folder / "metrics.jsonl", time.time() + 400
    while not any(row["phase"] == "train/1" and row["step"] > 5 for row in read(metrics)):
        assert time.time() < deadline, subprocess.run(["squeue"], capture_output=True, text=True).stdout
        time.sleep(0.1)
    assert pipeline.status(config)["train/1"] == pipeline.RUNNING
    subprocess.run(["scontrol", "requeue", f"{ids['train']}_1"], check=True)
    while slurm.pending(folder):
        assert time.time() < deadline + 300, subprocess.run(["squeue"], capture_output=True, text=True).stdout
        time.sleep(1)
    logs = "".join(path.read_text() for path in sorted((folder / "logs").iterdir()))
    assert set(pipeline.status(config).values()) == {pipeline.FRESH}, logs
    rows = [row for row in read(config.folder / "ledger.jsonl") if row["phase"] == "train/1"]
    assert any(row["status"] == "startup" and row["step"] > 0 for row in rows)
    for file in config.folder.rglob("*"):
        assert file.is_dir() or SECRET.encode() not in file.read_bytes(), file
    assert os.environ["WANDB_API_KEY"] == SECRET
