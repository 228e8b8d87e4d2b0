"""Independent submodels over a number of slots: a queue, retries, and a table of how they are doing."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from disco.backends.plan import Step

QUEUED, RUNNING, DONE, FAILED = "queued", "running", "done", "failed"
LINE_SECONDS = 30.0  # between progress lines where there is no terminal


class StepError(RuntimeError):
    """A step that ended badly. `again`: another attempt goes on from its checkpoint and may succeed."""

    def __init__(self, reason: str, *, again: bool):
        super().__init__(reason)
        self.again = again


class SlotLost(StepError):
    """A slot that can be used no more; what it was making stays undone."""


@dataclass
class Progress:
    """How a step is doing. `metrics` is its last row of metrics.jsonl."""

    step: Step
    state: str = QUEUED
    where: str = ""
    failures: int = 0
    reason: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)

    def cells(self) -> list[str]:
        row, state = self.metrics, self.state + (f", failed {self.failures}x" if self.failures else "")
        cells = [self.step.stage or self.step.name, state, self.where]
        if not row:
            return [*cells, "", "", "", "", ""]
        left = row["seconds"] / max(row["step"], 1) * (row["steps"] - row["step"])
        return [
            *cells,
            f"{row['step']}/{row['steps']}",
            f"{row['loss']:.4f}",
            f"{row['tokens_per_s']:,.0f}",
            clock(left),
            f"{row['dollars']:.5f}",
        ]


COLUMNS = ("submodel", "state", "where", "step", "loss", "tokens/s", "left", "dollars")


def work_through(
    steps: Sequence[Step],
    slots: Sequence[Any],
    make: Callable[[Step, Any, Progress, threading.Event], None],
    *,
    retries: int,
    console: Console,
    refresh: Callable[[list[Progress]], None] = lambda progress: None,
    seconds: float = 0.5,
) -> list[Progress]:
    """Make all steps, one at a time in each slot; returns how each ended.

    `make(step, slot, progress, stop)` blocks until the step is made, raises StepError when it fails, and returns
    early, leaving nothing behind, once `stop` is set. A failed step is tried `retries` times more. `refresh`
    brings the progress up to date before it is shown. Ctrl-C stops every slot and is raised again.
    """
    progress = [Progress(step) for step in steps]
    queue, stop = deque(progress), threading.Event()

    def serve(slot: Any) -> None:
        while not stop.is_set():
            try:
                current = queue.popleft()
            except IndexError:
                return
            if not _attempt(current, slot, make, retries, stop):
                return

    threads = [threading.Thread(target=serve, args=(slot,), daemon=True) for slot in slots]
    try:
        for thread in threads:
            thread.start()
        _watch(threads, progress, console, refresh, seconds)
    finally:  # on Ctrl-C too
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    for left in queue:
        left.state, left.reason = FAILED, "no slot was left to make it in"
    return progress


def _attempt(current: Progress, slot: Any, make: Callable, retries: int, stop: threading.Event) -> bool:
    """Make one step, with retries. False when the slot is of no more use."""
    current.where = str(slot)
    while not stop.is_set():
        current.state = RUNNING
        try:
            make(current.step, slot, current, stop)
            current.state = current.state if stop.is_set() else DONE
            return True
        except Exception as error:
            current.failures += 1
            current.state, current.reason = FAILED, str(error)
            if isinstance(error, SlotLost):
                return False
            if not (isinstance(error, StepError) and error.again) or current.failures > retries:
                return True
    return True


def _watch(threads, progress: list[Progress], console: Console, refresh: Callable, seconds: float) -> None:
    """Show the table while the slots work; without a terminal a line for each change, and now and then for each."""
    if console.is_terminal:
        with Live(table(progress), console=console, refresh_per_second=4) as live:
            while any(thread.is_alive() for thread in threads):
                time.sleep(seconds)
                refresh(progress)
                live.update(table(progress))
            refresh(progress)
            live.update(table(progress))
        return
    said: dict[str, tuple] = {}
    while True:
        alive = any(thread.is_alive() for thread in threads)
        refresh(progress)
        for entry in progress:
            kept, when = said.get(entry.step.name, (None, 0.0))
            change = (entry.state, entry.failures)
            due = entry.state == RUNNING and entry.metrics and time.monotonic() - when > LINE_SECONDS
            if change != kept and entry.state != QUEUED or due:
                said[entry.step.name] = (change, time.monotonic())
                console.print(line(entry), markup=False)
        if not alive:
            return
        time.sleep(seconds)


def line(entry: Progress) -> str:
    """One entry's row of the table as a line of text."""
    names = dict(zip(COLUMNS, entry.cells(), strict=True))
    told = [names["submodel"], names["state"], f"on {names['where']}" if names["where"] else ""]
    if names["step"]:
        told += [f"step {names['step']}", f"loss {names['loss']}", f"{names['tokens/s']} tokens/s"]
        told += [f"{names['left']} left", f"${names['dollars']}"]
    return "  ".join(filter(None, [*told, entry.reason if entry.failures and entry.state != DONE else ""]))


def table(progress: Sequence[Progress]) -> Table:
    shown = Table(*COLUMNS)
    for entry in progress:
        shown.add_row(*entry.cells())
    return shown


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
