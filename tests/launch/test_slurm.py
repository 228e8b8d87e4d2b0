"""Batch and submit scripts, with a stand-in for sbatch and on a real cluster of one machine."""

import subprocess
import time
from pathlib import Path

import pytest

from launch import slurm
from launch.scripts import script, write
from launch.slurm import Job
from tests.launch.slurmd import slurm as cluster  # noqa: F401  (a fixture)

AWKWARD = "a b'c\"d $(touch pwned);&%j"
JOBS = [Job(name="prepare"), Job(name="train", after=("prepare",), tasks=3), Job(name="merge", after=("train",))]


def fakes(folder: Path, monkeypatch, sbatch: list[str]) -> None:
    (folder / "bin").mkdir()
    write(
        folder / "bin",
        {"sbatch.sh": script(sbatch, about=""), "scancel.sh": script(['echo "$@" >> cancelled'], about="")},
    )
    for name in ("sbatch", "scancel"):
        (folder / "bin" / f"{name}.sh").rename(folder / "bin" / name)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / AWKWARD
    made.mkdir()
    return made


def test_jobs_wait_for_each_other(folder, tmp_path, monkeypatch):
    fakes(tmp_path, monkeypatch, ['echo "$@" >> calls', 'echo "$((40 + $(wc -l < calls)));cluster"'])
    [path] = write(folder, {"submit.sh": slurm.submit_script(JOBS, "tiny", folder)})
    assert slurm.submit(path) == "prepare 41\ntrain 42\nmerge 43\n"
    calls = [line.replace(str(folder).replace("%", "%%"), "HERE").split() for line in (folder / "calls").open()]
    assert [call[-1] for call in calls] == ["prepare.sbatch", "train.sbatch", "merge.sbatch"]
    assert not any("dependency" in word for word in calls[0])
    assert {"--array=0-2", "--dependency=afterok:41", "--kill-on-invalid-dep=yes"} <= set(calls[1])
    assert "--dependency=afterok:42" in calls[2]
    assert "--output=HERE/logs/train-%A_%a.log" in calls[1]
    assert not list(tmp_path.rglob("pwned"))


def test_a_refused_job_takes_those_before_it_back(folder, tmp_path, monkeypatch):
    fakes(
        tmp_path,
        monkeypatch,
        ['[[ "$*" != *merge* ]] || { echo "sbatch: error: no such partition" >&2; exit 1; }', "echo 7"],
    )
    [path] = write(folder, {"submit.sh": slurm.submit_script(JOBS, "tiny", folder)})
    with pytest.raises(slurm.SlurmError, match="no such partition"):
        slurm.submit(path)
    assert (folder / "cancelled").read_text() == "7 7\n"


def test_without_slurm_it_says_so(folder, monkeypatch):
    assert slurm.pending(folder) == []
    (folder / slurm.JOBS).write_text("prepare 1\n")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(slurm.SlurmError, match="squeue is not on this machine"):
        slurm.pending(folder)


def wait_until_gone(folder: Path, seconds: float = 90) -> None:
    deadline = time.time() + seconds
    while slurm.pending(folder):
        assert time.time() < deadline, subprocess.run(["squeue"], capture_output=True, text=True).stdout
        time.sleep(0.3)


def test_a_real_cluster_runs_them_in_order_and_again_after_preemption(cluster, folder):  # noqa: F811
    """The array's second task is requeued in the middle: it runs anew, its log goes on, and merge waits for it."""
    middle = [
        'echo "train $SLURM_ARRAY_TASK_ID restart ${SLURM_RESTART_COUNT:-0}" >> order',
        'echo "restart ${SLURM_RESTART_COUNT:-0}"',
        'if [ "$SLURM_ARRAY_TASK_ID" = 1 ] && [ -z "${SLURM_RESTART_COUNT:-}" ]; then sleep 60; exit 1; fi',
    ]
    bodies = {"prepare": ["sleep 1", "echo prepare >> order"], "train": middle, "merge": ["echo merge >> order"]}
    files = {
        f"{name}.sbatch": slurm.batch_script(lines, about=name, folder=folder, options=["--nice=1"])
        for name, lines in bodies.items()
    }
    write(folder, files | {"submit.sh": slurm.submit_script(JOBS, "tiny", folder)})
    submitted = slurm.submit(folder / "submit.sh")
    ids = dict(line.split() for line in submitted.splitlines())
    assert slurm.pending(folder) == sorted(ids.values(), key=int)
    deadline = time.time() + 60
    while not (folder / "order").exists() or "train 1" not in (folder / "order").read_text():
        assert time.time() < deadline
        time.sleep(0.2)
    done = subprocess.run(["scontrol", "requeue", f"{ids['train']}_1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # A requeued job is held back for a while; do not wait for that.
    time.sleep(1)
    subprocess.run(["scontrol", "update", f"JobId={ids['train']}_1", "StartTime=now"], capture_output=True)
    wait_until_gone(folder, 200)
    order = (folder / "order").read_text().splitlines()
    assert (order[0], order[-1]) == ("prepare", "merge")
    assert sorted(order[1:-1]) == [
        f"train {task} restart {count}" for task, count in ((0, 0), (1, 0), (1, 1), (2, 0))
    ]
    log = (folder / "logs" / f"train-{ids['train']}_1.log").read_text()
    assert log.count("restart") == 2
