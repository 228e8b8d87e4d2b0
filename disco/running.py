"""Which stages are being made right now, told through the run folder, so that any machine that sees it knows.

The process that makes a stage keeps a note in `launch/running/<stage>` and touches it every ten seconds. On its own
machine the note is true while that process lives; elsewhere while it was touched in the last ninety seconds. A
back end without a shared folder keeps the notes of its hosts.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from disco import artifacts

BEAT_SECONDS = 10.0
SILENT_SECONDS = 90.0


@dataclass(frozen=True)
class Running:
    """`host` makes a stage, last heard of at `seen` (seconds since the epoch); `sure` unless it has gone silent."""

    host: str
    seen: float
    sure: bool


def note_of(run: Path, stage: str) -> Path:
    return run / "launch" / "running" / stage


def write_note(run: Path, stage: str, host: str, pid: int | None = None) -> None:
    """Say that `host` makes `stage`; with `pid`, that this machine does."""
    note = note_of(run, stage)
    note.parent.mkdir(parents=True, exist_ok=True)
    started = process_start(pid) if pid else None
    artifacts.write_json(note, {"host": host, "pid": pid, "started": started, "machine": socket.gethostname()})


def drop_note(run: Path, stage: str) -> None:
    note_of(run, stage).unlink(missing_ok=True)


@contextlib.contextmanager
def making(run: Path, stage: str) -> Iterator[None]:
    """Keep the note of a stage that this process makes."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(note_of(run, stage))

    write_note(run, stage, socket.gethostname(), os.getpid())
    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        drop_note(run, stage)


def running(run: Path, stage: str) -> Running | None:
    """Who makes `stage`, if anybody. A silent host of a back end is told as such: it may still be at work."""
    path = note_of(run, stage)
    try:
        note, seen = artifacts.read_json(path), path.stat().st_mtime
    except (artifacts.ArtifactError, OSError):
        return None
    fresh = time.time() - seen < SILENT_SECONDS
    if note["pid"] is None:
        return Running(note["host"], seen, fresh)
    if note["machine"] == socket.gethostname():
        alive = note["started"] is not None and process_start(note["pid"]) == note["started"]
        return Running(note["host"], seen, True) if alive else None
    return Running(note["host"], seen, True) if fresh else None


def process_start(pid: int) -> int | None:
    """Clock ticks after boot at which a process of this machine started; None if there is none such (or it is a
    zombie). Tells a process from a later one of the same number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
