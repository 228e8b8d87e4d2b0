"""The cost ledger: a JSON line for every stretch of time in which a device was held, also when it was killed."""

import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REQUIRED = ("stage", "submodel", "attempt", "status", "devices", "seconds", "dollars", "kind")


class LedgerError(ValueError):
    """A ledger that is damaged elsewhere than in its last line, or a row that lacks a field."""


class Ledger:
    """Append-only JSON lines. Safe for several processes at once, and for a crash at any moment: the one line
    that a crash can tear is the last, which readers skip and the next append removes."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row and wait until the disk has it. Raises LedgerError on a missing field or a NaN."""
        missing = [key for key in REQUIRED if key not in row]
        if missing:
            raise LedgerError(f"{self.path}: a row without {', '.join(missing)}: {row}")
        append(self.path, row)


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a line to a file of JSON lines (metrics.jsonl too), mending one that a crash tore, and sync it."""
    try:
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
    except ValueError:
        raise LedgerError(f"{path}: a row with a number that is not finite: {row}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        line = _mend(file) + line
        while line:
            line = line[file.write(line) :]
        os.fsync(file.fileno())


def _mend(file) -> bytes:
    """Cut off a torn last line; a whole one that only lacks its line end gets it. Returns what to write first."""
    end = file.seek(0, os.SEEK_END)
    tail, start = b"", end
    while start and b"\n" not in tail:
        step = min(start, 1 << 16)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    last = tail.rpartition(b"\n")[2]
    if not last:
        return b""
    if _parse(last) is not None:
        return b"\n"
    file.truncate(end - len(last))
    return b""


def _parse(line: bytes) -> dict | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read(path: str | Path) -> list[dict[str, Any]]:
    """All rows, oldest first; none if there is no file. Works for metrics.jsonl too.

    A torn last line is skipped; a damaged line before it raises LedgerError naming file and line.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif line.strip() and number < len(lines):
            raise LedgerError(f"{path}, line {number}: not a JSON object: repair or remove that line")
    return rows


@dataclass
class Totals:
    """Sums over ledger rows. `wasted_*` is the part of the sum that bought nothing that was kept."""

    device_seconds: float = 0.0
    dollars: float = 0.0
    wasted_device_seconds: float = 0.0
    wasted_dollars: float = 0.0
    tokens: int = 0
    flops: int = 0
    peak_memory_bytes: int = 0
    makespan_seconds: float = 0.0  # the longest of the phases that can run side by side, waste left out
    kinds: set[str] = field(default_factory=set)  # measured, simulated
    energy_kwh: float | None = None  # of the rows that know it

    @property
    def device_hours(self) -> float:
        return self.device_seconds / 3600

    @property
    def wasted_device_hours(self) -> float:
        return self.wasted_device_seconds / 3600


def phase_of(row: dict[str, Any]) -> str:
    """What a row worked on: its `phase`, else stage and submodel."""
    submodel = row.get("submodel")
    return row.get("phase") or (row["stage"] if submodel is None else f"{row['stage']}/{submodel}")


def totals(
    rows: Iterable[dict[str, Any]], by: str | Callable[[dict[str, Any]], Any] = "stage"
) -> dict[Any, Totals]:
    """Sums by a field of the rows (or by what a function makes of a row), in order of first appearance.

    The makespan of a key is the longest wall time of one of its phases, without what was wasted: submodels may
    run side by side.
    """
    key_of = by if callable(by) else lambda row: row.get(by)
    rows = list(rows)
    result: dict[Any, Totals] = defaultdict(Totals)
    wall: dict[Any, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row, share in zip(rows, wasted_shares(rows), strict=True):
        into = result[key_of(row)]
        held = row["seconds"] * row["devices"]
        into.device_seconds += held
        into.dollars += row["dollars"]
        into.wasted_device_seconds += share * held
        into.wasted_dollars += share * row["dollars"]
        into.tokens += row.get("tokens") or 0
        into.flops += row.get("flops") or 0
        into.peak_memory_bytes = max(into.peak_memory_bytes, row.get("peak_memory_bytes") or 0)
        into.kinds.add(row["kind"])
        if "energy_kwh" in row:
            into.energy_kwh = (into.energy_kwh or 0.0) + row["energy_kwh"]
        wall[key_of(row)][phase_of(row)] += (1 - share) * row["seconds"]
        into.makespan_seconds = max(wall[key_of(row)].values())
    return dict(result)


def wasted_shares(rows: list[dict[str, Any]]) -> list[float]:
    """For each row the share, 0 to 1, of its time that bought nothing that was kept.

    Wasted are: the steps of an attempt beyond the step at which a later one went on, all of them where a later
    one began anew (a row stands for the steps since the row before it; an attempt begins at the step of its
    `startup` row, without one at 0); the start-up of an attempt that went on from a checkpoint, which an
    undisturbed run would not have had; and rows with status `killed`.
    """
    phases: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        phases[phase_of(row)].append(index)
    shares = [0.0] * len(rows)
    for indices in phases.values():
        attempts: dict[int, list[int]] = defaultdict(list)
        for index in indices:
            attempts[rows[index]["attempt"]].append(index)
        kept = float("inf")  # the earliest step from which a later attempt went on
        for attempt in sorted(attempts, reverse=True):
            own = [rows[index] for index in attempts[attempt]]
            start = before = own[0].get("step", 0) if own[0]["status"] == "startup" else 0
            for index, row in zip(attempts[attempt], own, strict=True):
                step = row.get("step", before)
                if row["status"] == "killed":
                    shares[index] = 1.0
                elif row["status"] == "startup":
                    shares[index] = float(step > 0 or kept <= step)
                elif step > before:
                    shares[index] = min(1.0, max(0.0, (step - kept) / (step - before)))
                else:  # no step was made: kept only if nothing went back to before this, or to the very start
                    shares[index] = float(kept < max(step, 1))
                before = step
            kept = min(kept, start)
    return shares
