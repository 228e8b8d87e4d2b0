"""What a command takes, as a process of its own."""

import os
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple


class Used(NamedTuple):
    seconds: float
    cpu: float  # processor seconds, of its children too
    peak: int  # bytes, of the largest process


def measured(command: list[str], *, quiet: bool = False, environment: dict[str, str] | None = None) -> Used:
    """Run a command to its end. If it fails this program ends too, with the end of what a `quiet` one said."""
    started = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        output = log if quiet else None
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            log.seek(0)
            said = f":\n{log.read().decode()[-3000:]}" if quiet else ""
            sys.exit(f"{' '.join(command)} failed{said}")
    return Used(time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
