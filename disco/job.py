"""One training run as a file: everything a process needs to train one model, alone, on any machine."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from disco.artifacts import SCRATCH, ArtifactError, write_json
from disco.config import Optimizer, Section, Tracking

JOB = "job.json"
_running: set[subprocess.Popen] = set()


class JobError(RuntimeError):
    """A training process that ended badly; its own message went before."""


class Price(Section):
    """What a device-hour costs. On a CPU the named device did not run: `kind` is then simulated."""

    priced_as: str
    dollars_per_hour: float
    source: str
    as_of: str


class Job(Section):
    """What `trainer.train` does. Rows are in the order of consumption: step s takes the s-th batch of them."""

    phase: str
    stage: str
    submodel: int | None = None
    model: str
    out: str
    rows: str
    validation: str | None = None
    validate_at: list[int] = []
    section: Optimizer
    trainable: Literal["all", "experts", "router"] = "all"
    aux_loss: float = 0.0
    z_loss: float = 0.0
    collapse_share: float = 1.0
    collapse_logs: int = 10
    dtype: str
    experts: str
    seed: int
    price: Price
    run: str
    group: str
    tracking: Tracking = Tracking()


def run_job(job: Job, threads: int) -> None:
    """Train in processes of its own, which end when this one does. Raises JobError when they fail."""
    path = Path(job.out) / SCRATCH / JOB
    write_json(path, job.model_dump(mode="json"))
    command = [sys.executable, "-m", "disco.job", str(path)]
    if job.section.processes > 1:
        command += ["--processes", str(job.section.processes)]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "DISCO_PARENT": str(os.getpid()),
    }
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    _running.add(process)
    try:
        code = process.wait()
    finally:
        _stop(process)
    if code:
        raise JobError(f"{job.phase}: training ended with exit code {code} (its reason stands above)")


def stop_jobs() -> None:
    """End every training process that this one started and that still runs."""
    for process in list(_running):
        _stop(process)


def _stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    _running.discard(process)


def _die_with_parent() -> None:
    """Ask the kernel to end this process with its parent, so that a killed run leaves nothing behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    started_by = int(os.environ.get("DISCO_PARENT", "0"))
    if started_by and not Path(f"/proc/{started_by}").exists() and Path("/proc/self").exists():
        sys.exit("disco: the run that started this process is gone")


def main(path: str, *options: str) -> None:
    """Train the job in `path`; with `--processes N`, as torchrun does it, in N processes of this one."""
    _die_with_parent()
    if options:
        from torch.distributed import run

        os.environ["DISCO_PARENT"] = str(os.getpid())
        return run.main(["--standalone", f"--nproc-per-node={options[1]}", "-m", "disco.job", path])
    raw: dict[str, Any] = json.loads(Path(path).read_text())
    from transformers.utils import logging

    from disco.trainer import TrainingError, train
    from launch.ledger import LedgerError

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        train(Job.model_validate(raw))
    except (TrainingError, ArtifactError, LedgerError) as error:
        print(f"disco: {error}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
