"""Machines reached by plain OpenSSH and rsync: commands, files, and jobs that outlive the connection."""

import os
import shlex
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
LOST = (10, 30, 35, 255)  # exit codes of ssh and rsync for a connection that failed
SECONDS = 120.0  # that a short command may take


class SshError(RuntimeError):
    """What went wrong on a host, in a line. `lost`: the connection failed, the host may go on."""

    def __init__(self, reason: str, *, lost: bool = False):
        super().__init__(reason)
        self.lost = lost


@dataclass(frozen=True)
class Remote:
    """A host as after the command ssh. A set `stop` ends what is under way with SshError."""

    name: str
    options: tuple[str, ...] = ()
    stop: threading.Event | None = None

    def run(self, command: str, *, said: str = "", seconds: float = SECONDS) -> str:
        """Run shell code there, `said` on its standard input; returns what it printed."""
        wrapped = f"exec bash -c {shlex.quote(command)}"
        return self._execute(["ssh", *OPTIONS, *self.options, "--", self.name, wrapped], said, seconds)

    def push(self, local: Path, remote: str) -> None:
        """Copy a file there; what an interrupted copy left is gone on with."""
        self._rsync(str(local.absolute()), f"{self.name}:{remote}")

    def pull(self, remote: str, local: Path) -> None:
        self._rsync(f"{self.name}:{remote}", str(local.absolute()))

    def _rsync(self, source: str, target: str) -> None:
        shell = shlex.join(["ssh", *OPTIONS, *self.options])
        self._execute(["rsync", "-s", "-t", "--partial", "-e", shell, "--", source, target], "", None)

    def _execute(self, command: Sequence[str], said: str, seconds: float | None) -> str:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for us to handle
            )
        except FileNotFoundError:
            raise SshError(f"{command[0]} is not installed on this machine") from None
        waited, given = 0.0, said
        while True:
            try:
                out, error = process.communicate(given, timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                waited, given = waited + 0.2, None
                stopped = self.stop is not None and self.stop.is_set()
                if stopped or (seconds is not None and waited > seconds):
                    process.kill()
                    process.communicate()
                    reason = "stopped" if stopped else f"no answer to {command[0]} in {seconds:g} s"
                    raise SshError(f"{self.name}: {reason}", lost=not stopped) from None
        if process.returncode:
            lines = [line.strip() for line in error.splitlines() if line.strip()] or [
                f"exit code {process.returncode}"
            ]
            telling = [line for line in lines if "No space left" in line or "command not found" in line]
            reason = telling[0] if telling else lines[-1]
            raise SshError(f"{self.name}: {reason}", lost=process.returncode in LOST)
        return out


def job_script(lines: Sequence[str], setup: str = "") -> str:
    """`run.sh` of a job: holds `lock` while anything of it runs, leaves its exit code in `exit`."""
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            'cd -- "$(dirname -- "$0")"',
            "exec 9> lock; flock -w 10 9 || exit 75  # what we start inherits it",
            "echo $$ > pid; rm -f exit",
            *filter(None, [setup]),
            *lines,
            'echo "$?" > exit.partial; mv exit.partial exit',
            "",
        ]
    )


def start(host: Remote, folder: str, environment: Mapping[str, str]) -> None:
    """Start `run.sh` of a folder there, detached; a job that runs already is left alone.

    `environment` travels on standard input: it shows in no list of processes and lies in no file.
    """
    command = f"""cd -- {shlex.quote(folder)} || exit 1
while IFS= read -r name && IFS= read -r value; do export "$name=$value"; done
touch lock; flock -n -s lock true || exit 0
rm -f exit
nohup setsid bash run.sh > run.log 2>&1 < /dev/null &
for wait in $(seq 100); do [ -e exit ] && break; flock -n -s lock true || break; sleep 0.1; done"""
    host.run(command, said="".join(f"{name}\n{value}\n" for name, value in environment.items()))


@dataclass(frozen=True)
class State:
    """`state` is running, ended (with `code`), gone (ended without a word: killed), or absent."""

    state: str
    code: int | None = None
    key: str = ""
    last: str = ""  # last line of the watched file
    log: str = ""  # last line that the job said


def look(host: Remote, folder: str, watched: str) -> State:
    """How a job does. `watched` is a file, relative to `folder`, whose last line is brought along."""
    command = f"""cd -- {shlex.quote(folder)} 2> /dev/null || {{ echo absent; exit 0; }}
touch lock
if ! flock -n -s lock true; then echo running; elif [ -e exit ]; then echo "ended $(cat exit)"; else echo gone; fi
cat key 2> /dev/null || echo
tail -n 1 {shlex.quote(watched)} 2> /dev/null | tr -d '\\n'; echo
tail -n 1 run.log 2> /dev/null || true"""
    lines = host.run(command).splitlines() + [""] * 4
    state, _, code = lines[0].partition(" ")
    return State(state, int(code) if code.strip().isdigit() else None, *lines[1:4])


def stop(host: Remote, folder: str) -> None:
    """End a job there with all it started."""
    command = f"""cd -- {shlex.quote(folder)} || exit 0
flock -n -s lock true && exit 0
kill -TERM -- "-$(cat pid)" 2> /dev/null
flock -w 20 lock true || kill -KILL -- "-$(cat pid)" || true"""
    host.run(command)


@dataclass(frozen=True)
class Abilities:
    gpus: int
    free_bytes: int
    lacks: tuple[str, ...]


def probe(host: Remote, folder: str, setup: str, programs: Sequence[str]) -> Abilities:
    """What a host has: GPUs, space where `folder` is or will be, and which programs it lacks."""
    tests = "; ".join(f"command -v {program} > /dev/null || echo lacks {program}" for program in programs)
    command = f"""{setup or ":"}
mkdir -p -- {shlex.quote(folder)} || exit 1
echo gpus "$(nvidia-smi -L 2> /dev/null | grep -c .)"
echo free "$(df -Pk -- {shlex.quote(folder)} | tail -n 1 | tr -s ' ' | rev | cut -d ' ' -f 3 | rev)"
{tests}"""
    answers = [line.split() for line in host.run(command).splitlines()]
    found = {words[0]: words[1] for words in answers if len(words) == 2 and words[0] in ("gpus", "free")}
    lacks = tuple(words[1] for words in answers if words[:1] == ["lacks"])
    return Abilities(int(found.get("gpus", 0)), 1024 * int(found.get("free", 0)), lacks)


def handed_on(names: Sequence[str]) -> dict[str, str]:
    """Those environment variables that are set here, for `start`."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}
