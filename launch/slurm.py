"""SLURM: batch scripts, a script that submits them with their dependencies, and which jobs are still there."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.scripts import script

JOBS = "slurm.jobs"  # a line a submitted job: its name and id


class SlurmError(RuntimeError):
    """What a command of SLURM complained about, in a line."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A batch script `<name>.sbatch`. It begins after all jobs in `after` ended well; `tasks` > 0 make an array."""

    name: str
    after: tuple[str, ...] = ()
    tasks: int = 0


def batch_script(
    lines: Sequence[str], *, about: str, folder: Path, options: Sequence[str] = (), setup: str = ""
) -> str:
    """Begins again on another node when it is preempted or its node fails; its log is kept and continued."""
    header = [f"#SBATCH {option}" for option in ("--requeue", "--open-mode=append", *options)]
    return script(lines, about=about, folder=folder, setup=setup, header=header)


def submit_script(jobs: Sequence[Job], name: str, folder: Path) -> str:
    """Submits all jobs, or none: those before one that SLURM refuses are cancelled. Logs go to `logs/`."""
    lines = [
        "mkdir -p logs",
        f": > {JOBS}",
        "cancel() { cut -d ' ' -f 2 " + JOBS + " | xargs -r scancel; }",
        "trap cancel ERR",
    ]
    for index, job in enumerate(jobs):
        options = [f"--job-name={name}-{job.name}"]
        log = f"{job.name}-{'%A_%a' if job.tasks else '%j'}.log"
        options.append(f'--output="${{PWD//%/%%}}/logs/{log}"')  # SLURM reads a % of the folder too
        if job.tasks:
            options.append(f"--array=0-{job.tasks - 1}")
        if job.after:
            ids = "".join(f":${{job_{[other.name for other in jobs].index(after)}}}" for after in job.after)
            options += [f'--dependency="afterok{ids}"', "--kill-on-invalid-dep=yes"]
        lines.append(f"job_{index}=$(sbatch --parsable {' '.join(options)} {job.name}.sbatch)")
        lines.append(f'job_{index}="${{job_{index}%%;*}}"; echo "{job.name} $job_{index}" | tee -a {JOBS}')
    return script(lines, about="Submit everything.", folder=folder)


def pending(folder: Path) -> list[str]:
    """Ids of jobs submitted from `folder` that still wait or run."""
    if not (folder / JOBS).exists():
        return []
    ours = {line.split()[-1] for line in (folder / JOBS).read_text().splitlines() if line.strip()}
    return sorted(ours & set(_call(["squeue", "--me", "--noheader", "--format=%F"]).split()), key=int)


def submit(path: Path) -> str:
    """Run a submit script; returns its `name id` lines."""
    return _call(["bash", str(path)])


def _call(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not on this machine") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise SlurmError(lines[-1])
    return done.stdout
