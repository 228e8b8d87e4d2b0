"""Submodels trained by way of a real sshd on loopback, through a killed launcher and bad hosts."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from torch import equal

from disco import pipeline, running
from disco.backends import ssh as backend
from disco.backends.start import launch
from disco.config import ConfigError, Experiment
from launch.ledger import read
from launch.ssh import Abilities, SshError
from tests.disco.tiny_experiment import corpus, tiny_experiment
from tests.disco.tiny_experiment import write as write_experiment
from tests.launch.sshd import ssh_options  # noqa: F401  (a fixture)

ROOT = Path(__file__).parents[3]
SECRET = "0123456789-a-key-of-nobody"


def experiment(folder: Path, **changed) -> Experiment:
    corpus(folder / "corpus")
    return Experiment.parse(tiny_experiment(folder, **changed))


def on_loopback(away: Path, options: list[str]) -> dict:
    """launch.ssh with this machine as the only host, whose runs go to the folder `away`."""
    return {
        "hosts": [{"name": "localhost", "devices": 2}],
        "folder": str(away),
        "setup": f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH "
        f"PYTHONPATH={shlex.quote(str(ROOT))} OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu",
        "options": options,
        "poll_seconds": 0.3,
    }


def test_slots_come_from_what_hosts_have(tmp_path, monkeypatch):
    answers = {"gpu1": Abilities(4, 10**12, ()), "gpu2": Abilities(0, 10**12, ()), "gpu3": Abilities(3, 10**12, ())}
    monkeypatch.setattr(backend.ssh, "probe", lambda host, *rest: answers[host.name])
    monkeypatch.setattr(backend.shutil, "which", lambda name: name)
    hosts = ["gpu1", {"name": "gpu2", "devices": 2}, {"name": "gpu3", "devices": 1}]
    slots = backend.slots_of(experiment(tmp_path, launch={"ssh": {"hosts": hosts}}), 0)
    assert [(str(slot), slot.devices, slot.beside) for slot in slots] == [
        ("gpu1:0", "0", 4),
        ("gpu2:0", None, 2),
        ("gpu3", "0", 1),
        ("gpu1:1", "1", 4),
        ("gpu2:1", None, 2),
        ("gpu1:2", "2", 4),
        ("gpu1:3", "3", 4),
    ]
    config = experiment(tmp_path, launch={"ssh": {"hosts": ["gpu1"]}}, train={"processes": 2})
    assert [slot.devices for slot in backend.slots_of(config, 0)] == ["0,1", "2,3"]


def test_all_unusable_hosts_are_named_before_any_work(tmp_path, monkeypatch):
    def probe(host, *rest):
        if host.name == "away":
            raise SshError("away: connection refused", lost=True)
        return {
            "bare": Abilities(1, 10**12, ("rsync", "disco")),
            "full": Abilities(1, 10**6, ()),
            "small": Abilities(1, 10**12, ()),
        }[host.name]

    monkeypatch.setattr(backend.ssh, "probe", probe)
    monkeypatch.setattr(backend.shutil, "which", lambda name: name)
    hosts = ["away", "bare", "full", {"name": "small", "devices": 2}]
    config = experiment(tmp_path, launch={"ssh": {"hosts": hosts}})
    with pytest.raises(ConfigError) as caught:
        backend.slots_of(config, 10**9)
    for part in (
        "host away: connection refused",
        "host bare: has no rsync, no disco: install it there",
        "host full: 0.00 GB free, a submodel needs 1.00",
        "host small: has 1 GPUs, 2 are asked for",
    ):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="away: connection refused"):
        launch(config, "ssh", dry_run=False, console=Console(file=io.StringIO()))
    assert not (config.folder / "prepare").exists()
    monkeypatch.setattr(backend.shutil, "which", lambda name: None if name == "rsync" else name)
    with pytest.raises(ConfigError, match="rsync is not on this machine"):
        backend.slots_of(config, 0)
    with pytest.raises(ConfigError, match="launch.ssh.hosts is empty"):
        launch(experiment(tmp_path), "ssh", dry_run=True, console=Console(file=io.StringIO()))


def test_each_run_folder_has_a_place_of_its_own(tmp_path):
    config = experiment(tmp_path, launch={"ssh": {"folder": "~/my runs"}})
    place = backend.place_of(config)
    assert place.startswith("my runs/tiny-")
    assert place != backend.place_of(config.model_copy(update={"runs": str(tmp_path / "others")}))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_launch_over_ssh_survives_its_launcher(tmp_path, ssh_options):  # noqa: F811
    """Kill the launcher in the middle: what runs there goes on, and the next launch takes the results."""
    corpus(tmp_path / "corpus")
    away = tmp_path / "away it's $(touch pwned)"
    away.mkdir()
    path = write_experiment(
        tmp_path,
        seed_phase={"tokens": 0},
        train={"tokens": 131072, "log_every": 1},
        finetune={"tokens": 256, "router_tokens": 0},
        launch={"ssh": on_loopback(away, ssh_options)},
    )
    config = Experiment.load(path)
    command = [sys.executable, "-m", "disco.cli", "launch", str(path), "--on", "ssh"]
    environment = os.environ | {"WANDB_API_KEY": SECRET}
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    deadline = time.time() + 400
    steps = lambda: {row["step"] for file in away.rglob("metrics.jsonl") for row in read(file)}  # noqa: E731
    while max(steps(), default=0) < 4:
        assert time.time() < deadline and first.poll() is None
        time.sleep(0.1)
    while running.running(config.folder, "train/0") is None:
        assert time.time() < deadline
        time.sleep(0.1)
    assert pipeline.status(config)["train/0"] == pipeline.RUNNING
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = max(steps())
    while max(steps(), default=10**9) <= before:
        assert time.time() < deadline
        time.sleep(0.1)
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stdout + again.stderr
    assert set(pipeline.status(config).values()) == {pipeline.FRESH}
    assert not list(away.rglob("*.tar"))
    rows = read(config.folder / "ledger.jsonl")
    assert {row["attempt"] for row in rows if row["phase"].startswith("train/")} == {1}
    for file in [*config.folder.rglob("*"), *away.rglob("*")]:
        assert file.is_dir() or SECRET.encode() not in file.read_bytes(), file
    assert not list(tmp_path.rglob("pwned"))
    whole = config.model_copy(update={"name": "whole"})
    pipeline.run(whole, until="train/0", say=lambda text: None)
    got, expected = (load_file(run.folder / "train/0/model.safetensors") for run in (config, whole))
    assert all(equal(got[name], expected[name]) for name in expected)
    assert json.loads((config.folder / "train/0/manifest.json").read_text())["stage"] == "train/0"


def test_the_host_that_tunes_needs_its_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(backend.ssh, "probe", lambda host, *rest: Abilities(2, 10**9, ()))
    monkeypatch.setattr(backend.shutil, "which", lambda name: name)
    section = {"ssh": {"hosts": ["gpu1"], "finetune": "big"}}
    [slot] = backend.tuner_of(experiment(tmp_path, launch=section, finetune={"processes": 2}), 0)
    assert (str(slot), slot.devices, slot.beside) == ("big", "0,1", 1)
    wanting = experiment(tmp_path, launch=section, finetune={"processes": 4})
    with pytest.raises(ConfigError, match="host big: has 2 GPUs, 4 are asked for"):
        backend.tuner_of(wanting, 0)
    with pytest.raises(ConfigError, match="host big: 1.00 GB free, tuning needs 2.00"):
        backend.tuner_of(experiment(tmp_path, launch=section), 2 * 10**9)
    assert backend.tuner_of(experiment(tmp_path, launch={"ssh": {"hosts": ["gpu1"]}}), 0) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_plan_with_tuning_on_another_host(tmp_path, ssh_options):  # noqa: F811
    """The models are bit for bit those made at home, and nothing is left there."""
    corpus(tmp_path / "corpus")
    away = tmp_path / "away it's"
    away.mkdir()
    config = experiment(
        tmp_path,
        seed_phase={"tokens": 0},
        train={"tokens": 512},
        baselines=["joint"],
        launch={"ssh": on_loopback(away, ssh_options) | {"finetune": "localhost"}},
    )
    console = Console(file=io.StringIO(), width=200)
    launch(config, "ssh", dry_run=False, console=console)
    assert set(pipeline.status(config).values()) == {pipeline.FRESH}
    assert not [path for path in away.rglob("*") if path.is_file()]
    whole = config.model_copy(update={"name": "whole"})
    pipeline.run(whole, until=["finetune", "baselines/joint"], say=lambda text: None)
    for stage in ("finetune_router", "finetune", "baselines/joint"):
        got, expected = (load_file(run.folder / stage / "model.safetensors") for run in (config, whole))
        assert all(equal(got[name], expected[name]) for name in expected), stage
