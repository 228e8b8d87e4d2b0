"""Back end `local`: one process a device of this machine."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from disco import pipeline
from disco.backends.crew import DONE, Progress, StepError, work_through
from disco.backends.plan import LaunchError, Step, tuning_of
from disco.config import ConfigError, Experiment
from disco.job import PARENT
from launch.scripts import script

START = "run.sh"
TRAINING_FAILED = 3  # exit code of disco: another attempt goes on from the last checkpoint
GRACE_SECONDS = 10.0  # between the request to stop and the end


def scripts(config: Experiment, steps: list[Step], experiment: Path) -> dict[str, str]:
    """A script a step, and one that runs them all."""
    slots = device_slots(config)
    share = [f"launch.parallel={len(slots)}"]  # of the CPU cores, among processes side by side
    files = {f"{step.name}.sh": step_script(step, experiment, share if step.stage else ()) for step in steps}
    submodels = [step.name for step in steps if step.stage]
    devices = " ".join(shlex.quote(slot) for slot in slots)
    pin = (
        ""
        if slots[0].startswith("cpu")
        else f'slots=({devices}); export CUDA_VISIBLE_DEVICES="${{slots[$SLOT]}}"; '
    )
    crowd = (
        f"printf '%s\\n' {' '.join(submodels)} | "
        f"xargs -P {len(slots)} --process-slot-var=SLOT -I NAME bash -c {shlex.quote(pin + 'exec bash NAME.sh')}"
    )
    after = steps[1 + len(submodels) :]
    lines = ["bash prepare.sh", crowd, *(f"bash {step.name}.sh" for step in after)]
    about = (
        "The whole experiment on this machine, submodels side by side, without the launcher's table and retries."
    )
    files[START] = script(lines, about=about, folder=experiment.parent)
    return files


def step_script(step: Step, experiment: Path, overrides: Sequence[str] = ()) -> str:
    command = shlex.join([*step.command(str(experiment)), *overrides])
    return script([f"exec {command}"], about=step.about, folder=Path.cwd())


def device_slots(config: Experiment) -> list[str]:
    """What each submodel gets at a time: comma-separated GPUs, or without a GPU `launch.parallel` CPU slots.

    GPUs are those of CUDA_VISIBLE_DEVICES where that is set.
    """
    count, processes = torch.cuda.device_count(), config.train.processes
    if not count:
        return [f"cpu:{slot}" for slot in range(config.launch.parallel)]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",")[:count] if given else [str(index) for index in range(count)]
    if processes > count:
        raise ConfigError(f"train.processes is {processes} but this machine has {count} GPUs")
    return [",".join(devices[i : i + processes]) for i in range(0, count - processes + 1, processes)]


def launch(config: Experiment, steps: list[Step], experiment: Path, console: Console) -> None:
    """Run the plan here. Raises LaunchError naming what is missing at the end."""
    folder = experiment.parent
    (folder / "logs").mkdir(exist_ok=True)
    here(steps[0], folder, config.launch.retries)
    train_here(config, steps, folder, console)
    after_submodels(config, steps, folder)


def after_submodels(
    config: Experiment, steps: list[Step], folder: Path, tune: Callable[[Step], None] | None = None
) -> None:
    """Run the steps that wait for the submodels; `tune` first has each tuning stage of a step done elsewhere."""
    for step in steps:
        if step.needs and not step.stage:
            for part in tuning_of(config, step) if tune else ():
                tune(part)
            here(step, folder, config.launch.retries)


def train_here(config: Experiment, steps: list[Step], folder: Path, console: Console) -> None:
    """Train the submodels that are not fresh, one process a slot."""
    run, slots = config.folder, device_slots(config)

    def make(step: Step, slot: str, progress: Progress, stop: threading.Event) -> None:
        environment = {} if slot.startswith("cpu") else {"CUDA_VISIBLE_DEVICES": slot}
        log = folder / "logs" / f"{step.name}.log"
        with open(log, "ab") as output:
            code = execute(folder / f"{step.name}.sh", environment, output, stop)
        if code and not stop.is_set():
            reason = f"exit code {code}: {last_line(log)} (all of it: {log})"
            raise StepError(reason, again=code != 2)  # 2: an error that another attempt repeats

    todo = not_fresh(config, [step for step in steps if step.stage])
    tail = Tail(run / "metrics.jsonl")
    ended = work_through(
        todo, slots, make, retries=config.launch.retries, console=console, refresh=tail.bring_up_to_date
    )
    complain(ended, "local")


def not_fresh(config: Experiment, trainings: list[Step]) -> list[Step]:
    """Those that are still to be made."""
    states = pipeline.status(config)
    return [step for step in trainings if states[step.stage] != pipeline.FRESH]


def complain(ended: list[Progress], on: str) -> None:
    """Raise LaunchError if something is missing."""
    missing = [entry for entry in ended if entry.state != DONE]
    if missing:
        reasons = "\n".join(f"  {entry.step.stage}: {entry.reason}" for entry in missing)
        raise LaunchError(
            f"{len(missing)} of {len(ended)} submodels are missing, the others are kept:\n{reasons}\n"
            f"  Once the cause is mended, the same command (disco launch ... --on {on}) goes on from checkpoints."
        )


def here(step: Step, folder: Path, retries: int) -> None:
    """Run a step's script on this machine, its output on ours; again from its checkpoint where training failed."""
    for attempt in range(retries + 1):
        code = execute(folder / f"{step.name}.sh", {}, None, threading.Event())
        if code != TRAINING_FAILED or attempt == retries:
            break
    if code:
        raise LaunchError(
            f"{step.name} ended with exit code {code} (its reason stands above): run the command again"
        )


def execute(path: Path, environment: dict[str, str], output, stop: threading.Event) -> int:
    """Run a script until it ends or `stop` is set; it ends with this process, however this one ends."""
    process = subprocess.Popen(
        ["bash", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        env=os.environ | environment | {PARENT: str(os.getpid())},
        start_new_session=True,
    )
    try:
        while process.poll() is None and not stop.wait(0.1):
            pass
    finally:
        if process.poll() is None:
            _end(process)
    return process.returncode


def _end(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_line(log: Path) -> str:
    """The last line that a process said, for a message."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"


class Tail:
    """The last row of metrics.jsonl of each phase, reading only what is new."""

    def __init__(self, path: Path):
        self.path, self.offset, self.rows = path, 0, {}

    def bring_up_to_date(self, progress: list[Progress]) -> None:
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self.offset)
            whole = file.read().rpartition(b"\n")[0]
            self.offset += len(whole)
            for text in whole.splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn line is mended by its writer
                    row = json.loads(text)
                    self.rows[row["phase"]] = row
        for entry in progress:
            row = self.rows.get(entry.step.stage, {})
            if "steps" in row:
                entry.metrics = row
