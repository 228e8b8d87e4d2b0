"""One training run as a file: everything a process needs to train one model, alone, on any machine."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from disco.artifacts import SCRATCH, ArtifactError, write_json
from disco.config import BlockDescent, ExpertSharding, Optimizer, Section, Tracking

JOB = "job.json"
EVERYWHERE = "--everywhere"
PARENT = "DISCO_PARENT"  # environment: the process that a training process must not outlive
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
    bcd: BlockDescent | None = None
    shared_as: Literal["replicated", "autoep", "fsep"] = "replicated"
    fsep: ExpertSharding = ExpertSharding()
    record_loads: bool = False
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
    nodes: int = 1
    node_command: list[str] = []
    rendezvous: str | None = None


def run_job(job: Job, threads: int) -> None:
    """Train in processes of its own, which end when this one does. Raises JobError when they fail.

    On several machines `job.node_command` starts the same command on each: a torchrun agent, which meets the
    others at the rendezvous and starts that machine's share of the processes.
    """
    path = Path(job.out) / SCRATCH / JOB
    write_json(path, job.model_dump(mode="json"))
    command = [sys.executable, "-m", "disco.job", str(path.absolute())]
    if job.section.processes > 1:
        command += ["--processes", str(job.section.processes // job.nodes)]
    if job.nodes > 1:
        command += ["--nodes", str(job.nodes), "--rendezvous", job.rendezvous or _free_endpoint()]
        command = [sys.executable, "-m", "disco.job", EVERYWHERE, *job.node_command, *command]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        PARENT: str(os.getpid()),
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


def _free_endpoint() -> str:
    """This machine and a port of it that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{socket.gethostname()}:{probe.getsockname()[1]}"


def die_with_parent() -> None:
    """Ask the kernel to end this process with its parent, so that a killed run leaves nothing behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    started_by = int(os.environ.get(PARENT, "0"))
    if started_by and not Path(f"/proc/{started_by}").exists() and Path("/proc/self").exists():
        sys.exit("disco: the run that started this process is gone")


def main(path: str, *options: str) -> None:
    """Train the job in `path`.

    `--processes N` does so in N processes of this one, as torchrun does; with `--nodes M --rendezvous HOST:PORT`
    this is the agent of one of M machines. `--everywhere COMMAND` only becomes that command, tied to the run.
    """
    die_with_parent()
    if path == EVERYWHERE:
        del os.environ[PARENT]  # on another machine that number is another process, or none
        os.execvp(options[0], options)
    settings = dict(zip(options[::2], options[1::2], strict=True))
    if settings:
        from torch.distributed import run

        os.environ[PARENT] = str(os.getpid())
        meet = ["--standalone"]
        if "--nodes" in settings:
            meet = [f"--nnodes={settings['--nodes']}", "--rdzv-backend=c10d"]
            meet += [f"--rdzv-endpoint={settings['--rendezvous']}", f"--rdzv-id={Path(path).parent}"]
        return run.main([*meet, f"--nproc-per-node={settings.get('--processes', 1)}", "-m", "disco.job", path])
    raw: dict[str, Any] = json.loads(Path(path).read_text())
    from transformers.utils import logging

    from disco.trainer import TrainingError, train
    from fsep import RankError
    from launch.ledger import LedgerError

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        train(Job.model_validate(raw))
    except (TrainingError, ArtifactError, LedgerError, RankError) as error:
        print(f"disco: {error}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
