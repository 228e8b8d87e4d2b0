"""The local back end: slots, processes that end with the launcher, and a whole launch through a kill."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from disco import artifacts, pipeline
from disco.backends import local
from disco.backends.crew import Progress
from disco.backends.plan import Step, plan
from disco.config import ConfigError, Experiment
from launch.ledger import append, read
from launch.scripts import script, write
from tests.disco.tiny_experiment import corpus, tiny_experiment
from tests.disco.tiny_experiment import write as write_experiment

SECRET = "0123456789-a-key-of-nobody"


def experiment(folder: Path, **changed) -> Experiment:
    corpus(folder / "corpus")
    return Experiment.parse(tiny_experiment(folder, **changed))


def gpus(monkeypatch, count, visible=None):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("count", "visible", "processes", "slots"),
    [
        (0, None, 1, ["cpu:0", "cpu:1"]),
        (4, None, 1, ["0", "1", "2", "3"]),
        (4, None, 2, ["0,1", "2,3"]),
        (3, None, 2, ["0,1"]),
        (2, "5,7", 1, ["5", "7"]),
        (1, "GPU-8932f937", 1, ["GPU-8932f937"]),
    ],
)
def test_each_slot_has_its_own_devices(tmp_path, monkeypatch, count, visible, processes, slots):
    gpus(monkeypatch, count, visible)
    config = experiment(tmp_path, train={"processes": processes})
    assert local.device_slots(config) == slots
    text = local.scripts(config, plan(config), tmp_path / "experiment.yaml")[local.START]
    assert ("CUDA_VISIBLE_DEVICES" in text) == (count > 0)
    assert f"-P {len(slots)} " in text
    one = local.scripts(config, plan(config), tmp_path / "experiment.yaml")["train-0.sh"]
    assert f" launch.parallel={len(slots)}\n" in one


def test_too_few_devices_are_refused(tmp_path, monkeypatch):
    gpus(monkeypatch, 1)
    config = experiment(tmp_path, train={"processes": 2})
    with pytest.raises(ConfigError, match="train.processes is 2 but this machine has 1"):
        local.device_slots(config)


def test_the_shell_script_pins_devices_and_keeps_to_the_slots(tmp_path, monkeypatch):
    gpus(monkeypatch, 2)
    config = experiment(tmp_path, baselines=["random_split"])
    steps = plan(config)
    files = local.scripts(config, steps, tmp_path / "experiment.yaml")
    for step in steps:
        seen = 'echo "$0 ${CUDA_VISIBLE_DEVICES-all}" >> order'
        files[f"{step.name}.sh"] = script(["sleep 0.1" if step.stage else "true", seen], about="")
    write(tmp_path, files)
    assert subprocess.run(["bash", tmp_path / local.START]).returncode == 0
    lines = (tmp_path / "order").read_text().split("\n")[:-1]
    assert [lines[0], *lines[5:]] == [
        f"{name}.sh all" for name in ("prepare", "merge", "finetune", "baselines", "report")
    ]
    assert sorted(line.split()[0] for line in lines[1:5]) == sorted(
        f"{step.name}.sh" for step in steps if step.stage
    )
    assert {line.split()[1] for line in lines[1:5]} == {"0", "1"}


def test_failures_are_named_with_their_last_words_and_the_rest_is_kept(tmp_path, monkeypatch):
    """train/0 succeeds at its third try, train/1 meets an error of the user's making."""
    from rich.console import Console

    monkeypatch.setattr(local.pipeline, "status", lambda config: {"train/0": "started", "train/1": "missing"})
    config = experiment(tmp_path, launch={"retries": 2, "parallel": 1})
    (tmp_path / "logs").mkdir()
    first = ["echo try >> tries", '[ "$(wc -l < tries)" -eq 3 ] || { echo "out of memory"; exit 3; }']
    second = ["echo try >> others; echo disco: no such key; exit 2"]
    write(tmp_path, {"train-0.sh": script(first, about="", folder=tmp_path)})
    write(tmp_path, {"train-1.sh": script(second, about="", folder=tmp_path)})
    with pytest.raises(local.LaunchError) as caught, open(os.devnull, "w") as nowhere:
        local.train_here(config, plan(config), tmp_path, Console(file=nowhere))
    message = str(caught.value)
    assert message.startswith(
        "1 of 2 submodels are missing, the others are kept:\n  train/1: exit code 2: disco: no such"
    )
    assert "disco launch ... --on local" in message
    assert (tmp_path / "tries").read_text() == "try\n" * 3
    assert (tmp_path / "others").read_text() == "try\n"


def test_a_stopped_script_leaves_no_process(tmp_path):
    [path] = write(
        tmp_path, {"x.sh": script(["trap '' TERM", f"sleep 1234 & echo $! > {tmp_path}/pid; wait"], about="")}
    )
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    local.GRACE_SECONDS, kept = 0.3, local.GRACE_SECONDS
    try:
        local.execute(path, {}, subprocess.DEVNULL, stop)
    finally:
        local.GRACE_SECONDS = kept
    pid = int((tmp_path / "pid").read_text())
    deadline = time.time() + 20
    while Path(f"/proc/{pid}").exists() and b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.time() < deadline
        time.sleep(0.05)


def test_the_tail_reads_only_whole_new_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail, [entry] = local.Tail(path), [Progress(Step(name="train-0", stage="train/0", about=""))]
    tail.bring_up_to_date([entry])
    assert entry.metrics == {}
    append(path, {"phase": "train/0", "step": 1, "steps": 9})
    tail.bring_up_to_date([entry])
    assert entry.metrics["step"] == 1
    with open(path, "a") as file:
        file.write('{"phase": "train/0", "step": 2, "st')
    tail.bring_up_to_date([entry])
    assert entry.metrics["step"] == 1
    append(path, {"phase": "train/0", "step": 3, "steps": 9})
    tail.bring_up_to_date([entry])
    assert entry.metrics["step"] == 3


def processes_of(folder: Path) -> dict[int, str]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in command and "pytest" not in command:
                found[int(entry.parent.name)] = command
    return found


def wait_for(condition, seconds=300):
    deadline = time.time() + seconds
    while not (found := condition()):
        assert time.time() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_launch_survives_kills_and_ctrl_c(tmp_path):
    """Ctrl-C leaves nothing running; the next launch goes on; a killed training process is started again."""
    corpus(tmp_path / "corpus")
    path = write_experiment(
        tmp_path,
        seed_phase={"tokens": 0},
        train={"tokens": 262144, "log_every": 1},
        finetune={"tokens": 256, "router_tokens": 0},
        tracking={"wandb": "offline"},
    )
    config = Experiment.load(path)
    command = [sys.executable, "-m", "disco.cli", "launch", str(path), "--on", "local"]
    environment = os.environ | {"WANDB_API_KEY": SECRET, "WANDB_MODE": "offline"}
    metrics = config.folder / "metrics.jsonl"
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True)
    wait_for((config.folder / "launch" / local.START).exists)
    second = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert second.returncode == 2
    assert "another disco process" in second.stderr
    wait_for(lambda: {row["phase"] for row in read(metrics) if row["step"] > 6} >= {"train/0", "train/1"})
    assert pipeline.status(config)["train/0"] == pipeline.RUNNING
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=120)[0]
    assert first.returncode == 130, said
    assert wait_for(lambda: not processes_of(tmp_path)) is not None
    assert pipeline.status(config)["train/0"] == pipeline.STARTED

    again = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True)
    jobs = wait_for(lambda: [pid for pid, text in processes_of(tmp_path).items() if "/train/0.partial" in text])
    os.kill(jobs[0], signal.SIGKILL)
    said = again.communicate(timeout=600)[0]
    assert again.returncode == 0, said
    assert set(pipeline.status(config).values()) == {pipeline.FRESH}
    rows = read(config.folder / "ledger.jsonl")
    assert any(row["status"] == "startup" and row["step"] > 0 for row in rows if row["phase"] == "train/0")
    assert "train/0  running, failed 1x" in said
    for file in config.folder.rglob("*"):
        assert file.is_dir() or SECRET.encode() not in file.read_bytes(), file

    whole = config.model_copy(update={"name": "whole"})
    pipeline.run(whole, until=["train", "merge"], say=lambda text: None)
    for stage in ("train/0", "train/1", "merge"):
        got, expected = (load_file(run.folder / stage / "model.safetensors") for run in (config, whole))
        assert all(torch.equal(got[name], expected[name]) for name in expected), stage
    assert artifacts.content(config.folder / "merge") == artifacts.content(whole.folder / "merge")
