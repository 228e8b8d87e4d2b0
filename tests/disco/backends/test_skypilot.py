"""SkyPilot tasks: their fields, their shell code run on a stand-in for the cloud, and SkyPilot's own reading."""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from rich.console import Console

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


def test_without_the_package_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(skypilot.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="the command sky is not there"):
        launch(experiment(tmp_path), "skypilot", dry_run=False, console=Console(file=io.StringIO()))
    monkeypatch.setattr(skypilot.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(skypilot.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(LaunchError, match="submitting ended with exit code 1"):
        launch(experiment(tmp_path), "skypilot", dry_run=False, console=Console(file=io.StringIO()))


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
