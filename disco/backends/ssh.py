"""Back end `ssh`: submodels, and tuning where a host is named for it, travel to other machines as packs and come
back as results; the rest runs here.

Jobs there are detached: they outlive the connection and the launcher, and the same command finds them again.
"""

import contextlib
import hashlib
import itertools
import json
import shlex
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from disco import artifacts
from disco.backends import away, local
from disco.backends.away import own_submodels, script_of
from disco.backends.crew import Progress, SlotLost, StepError, work_through
from disco.backends.plan import Step, what_of
from disco.config import ConfigError, Experiment
from disco.launching import Host
from disco.pack import collect, name_of, pack, stage_of
from disco.pipeline import expected_inputs
from disco.running import drop_note, write_note
from launch import ssh
from launch.scripts import SECRETS, script
from launch.ssh import Remote, SshError

START = local.START
PROGRAMS = ("rsync", "flock", "tar", "disco")
_home = threading.Lock()  # the run folder takes one result at a time


@dataclass(frozen=True)
class Slot:
    """Devices of a host that train one submodel at a time; of `beside` such slots."""

    remote: Remote
    index: int
    beside: int
    devices: str | None

    def __str__(self) -> str:
        return self.remote.name + (f":{self.index}" if self.beside > 1 else "")


def place_of(config: Experiment) -> str:
    """The run's folder on every host: a name of its own for each run folder of each machine."""
    home = f"{socket.gethostname()}:{config.folder.absolute()}"
    folder = config.launch.ssh.folder.removeprefix("~/")
    return f"{folder}/{config.name}-{hashlib.sha256(home.encode()).hexdigest()[:8]}"


def scripts(config: Experiment, steps: list[Step], experiment: Path) -> dict[str, str]:
    """As the launcher does it, without its queue and polling: one script a step, each waits for its own end."""
    hosts, tuner = itertools.cycle(_hosts(config)), config.launch.ssh.finetune
    files, lanes = {}, {host.name: [] for host in config.launch.ssh.hosts}
    for step in own_submodels(steps):
        host = next(hosts)
        lanes[host.name].append(f"bash {script_of(step)}")
        files[script_of(step)] = _by_hand(config, step, host, experiment)

    def tuning(part: Step) -> dict[str, str]:
        return {script_of(part): _by_hand(config, part, _remote(config, tuner), experiment)}

    return files | away.scripts(
        config,
        steps,
        experiment,
        jobs=[f"({' && '.join(lane)})" for lane in lanes.values() if lane],
        tuning=tuning if tuner else None,
        about="The whole experiment, submodels on their hosts.",
    )


def _by_hand(config: Experiment, step: Step, host: Remote, experiment: Path) -> str:
    option, place = shlex.join(step.options), place_of(config)
    name = name_of(config, what_of(step))
    folder, here = f"{place}/{name}", experiment.parent
    reach = shlex.join(["ssh", *ssh.OPTIONS, *host.options])
    copy = f"rsync -s -t --partial -e {shlex.quote(reach)} --"
    setup = config.launch.ssh.setup
    inside = [f"cd -- {shlex.quote(place)}", f"tar -xf {name}.tar", f"cd {name}", *filter(None, [setup])]
    inside += [f"disco train experiment.yaml {option}"]
    disco = shlex.join(step.command("")[:3])
    lines = [
        f"{disco} pack {shlex.quote(str(experiment))} {option} --out {shlex.quote(str(here))}",
        f"{reach} -- {host.name} {shlex.quote(f'mkdir -p -- {shlex.quote(place)}')}",
        f"{copy} {shlex.quote(str(here / f'{name}.tar'))} {shlex.quote(f'{host.name}:{place}/')}",
        f"{reach} -- {host.name} {shlex.quote(' && '.join(inside))}",
        f"{copy} {shlex.quote(f'{host.name}:{folder}/{name}.result.tar')} {shlex.quote(str(here))}/",
        f"flock {shlex.quote(str(here / '.collect'))} {disco} collect {shlex.quote(str(experiment))} "
        + shlex.quote(str(here / f"{name}.result.tar")),
    ]
    return script(
        lines, about=f"{step.about} On {host.name}, whose shell must find rsync and disco.", folder=Path.cwd()
    )


def _remote(config: Experiment, host: Host) -> Remote:
    return Remote(host.name, tuple(config.launch.ssh.options))


def _hosts(config: Experiment) -> list[Remote]:
    hosts = config.launch.ssh.hosts
    if not hosts:
        raise ConfigError("launch.ssh.hosts is empty: name the machines, such as launch.ssh.hosts=[gpu1, me@gpu2]")
    return [_remote(config, host) for host in hosts]


def slots_of(config: Experiment, needed: int) -> list[Slot]:
    """Ask every host what it has. Raises ConfigError naming all that cannot be used, before any work."""
    _hosts(config)
    return _slots(config, config.launch.ssh.hosts, config.train.processes, needed, "a submodel")


def tuner_of(config: Experiment, needed: int) -> list[Slot]:
    """The same of the host that tunes, if one is named: one slot."""
    named = config.launch.ssh.finetune
    if named is None:
        return []
    return _slots(config, [named.model_copy(update={"devices": 1})], config.finetune.processes, needed, "tuning")


def _slots(config: Experiment, named: list[Host], processes: int, needed: int, what: str) -> list[Slot]:
    section, hosts = config.launch.ssh, [_remote(config, host) for host in named]
    for program in ("ssh", "rsync"):
        if shutil.which(program) is None:
            raise ConfigError(f"--on ssh: {program} is not on this machine: install it")

    def ask(host: Remote) -> ssh.Abilities | str:
        try:
            return ssh.probe(host, place_of(config), section.setup, PROGRAMS)
        except SshError as error:
            return f"host {error}"

    with ThreadPoolExecutor(max_workers=min(16, len(hosts))) as pool:
        answers = list(pool.map(ask, hosts))
    problems, slots = [answer for answer in answers if isinstance(answer, str)], []
    for host, asked, able in zip(named, hosts, answers, strict=True):
        if isinstance(able, str):
            continue
        if able.lacks:
            remedy = "install it there, or make launch.ssh.setup put it on the PATH"
            problems.append(f"host {host.name}: has no {', no '.join(able.lacks)}: {remedy}")
        if able.free_bytes < needed:
            problems.append(
                f"host {host.name}: {able.free_bytes / 1e9:.2f} GB free, {what} needs {needed / 1e9:.2f}: "
                "free some space there or set launch.ssh.folder"
            )
        devices = host.devices * processes if host.devices else able.gpus
        if able.gpus and devices > able.gpus:
            problems.append(f"host {host.name}: has {able.gpus} GPUs, {devices} are asked for")
        count = max(1, devices // processes)
        for index in range(count):
            own = ",".join(str(device) for device in range(index * processes, (index + 1) * processes))
            slots.append(Slot(asked, index, count, own if able.gpus else None))
    if problems:
        raise ConfigError("; ".join(problems))
    return sorted(slots, key=lambda slot: slot.index)  # one on each host before a second on any


def launch(config: Experiment, steps: list[Step], experiment: Path, console: Console) -> None:
    """Carry the plan out. Raises LaunchError naming what is missing at the end."""
    folder = experiment.parent
    slots_of(config, needed=0)  # before hours of preparation
    tuner_of(config, needed=0)
    local.here(steps[0], folder, config.launch.retries)
    _train_away(config, own_submodels(steps), slots_of(config, needed=_pack_bytes(config, 0)), console)

    def tune(part: Step) -> None:
        _train_away(config, [part], tuner_of(config, needed=_pack_bytes(config, part.stage)), console)

    local.after_submodels(config, steps, folder, tune if config.launch.ssh.finetune else None)


def _train_away(config: Experiment, steps: list[Step], slots: list[Slot], console: Console) -> None:
    """Train elsewhere what is not fresh. Raises LaunchError naming what is missing."""
    todo = local.not_fresh(config, steps)

    def make(step: Step, slot: Slot, progress: Progress, stop: threading.Event) -> None:
        try:
            _make(config, step, slot, progress, stop)
        except SshError as error:
            if not stop.is_set():
                raise (SlotLost if error.lost else StepError)(str(error), again=True) from None
        finally:
            if stop.is_set():
                with contextlib.suppress(SshError):
                    ssh.stop(slot.remote, _folder(config, step))
                drop_note(config.folder, step.stage)

    ended = work_through(todo, slots, make, retries=config.launch.retries, console=console)
    local.complain(ended, "ssh")


def _pack_bytes(config: Experiment, what: int | str) -> int:
    """Space that a training takes there: pack, unpacked, checkpoint (three times the weights), model and result."""
    begin = config.folder / stage_of(config, what).needs[-1]
    return 8 * sum(entry["bytes"] for entry in artifacts.manifest(begin)["files"].values())


def _folder(config: Experiment, step: Step) -> str:
    return f"{place_of(config)}/{name_of(config, what_of(step))}"


def _make(config: Experiment, step: Step, slot: Slot, progress: Progress, stop: threading.Event) -> None:
    """Ship, start, watch, and take the result; each only where it is not done yet."""
    host, folder = replace(slot.remote, stop=stop), _folder(config, step)
    watched = f"runs/{config.name}/metrics.jsonl"
    stage = stage_of(config, what_of(step))
    key = artifacts.stage_key(expected_inputs(config, stage), stage.section, config.seed)
    found = ssh.look(host, folder, watched)
    if found.key != key:
        if found.state == "running":
            raise StepError(
                f"{host.name}: another form of {step.stage} runs in {folder}: end it first", again=False
            )
        _ship(config, step, slot, host, folder, key)
        found = replace(found, state="absent")
    if found.state != "running" and found.code != 0:
        devices = {"CUDA_VISIBLE_DEVICES": slot.devices} if slot.devices else {}
        ssh.start(host, folder, ssh.handed_on([*SECRETS, "WANDB_MODE", "WANDB_BASE_URL"]) | devices)
    heard = time.monotonic()
    while True:
        try:
            found = ssh.look(host, folder, watched)
            heard = time.monotonic()
            write_note(config.folder, step.stage, host.name)
        except SshError as error:
            if not error.lost or time.monotonic() - heard > config.launch.ssh.patience_seconds:
                goes_on = "what runs there goes on, and the same command finds it again"
                raise SlotLost(f"{error} (out of reach too long; {goes_on})", again=True) from None
        if found.state != "running":
            break
        with contextlib.suppress(ValueError):
            row = json.loads(found.last)
            progress.metrics = row if "steps" in row else progress.metrics
        if stop.wait(config.launch.ssh.poll_seconds):
            return
    drop_note(config.folder, step.stage)
    if found.code != 0:
        ended = "was killed" if found.code is None else f"exit code {found.code}"
        raise StepError(
            f"{host.name}: {ended}: {found.log} (all of it: {folder}/run.log there)", again=found.code != 2
        )
    _take(config, host, folder)


def _ship(config: Experiment, step: Step, slot: Slot, host: Remote, folder: str, key: str) -> None:
    place = place_of(config)
    out = config.folder / "launch" / "packs"
    out.mkdir(exist_ok=True)
    archive = pack(config, what_of(step), out)
    quoted = shlex.quote(folder)
    train = f"disco train experiment.yaml launch.parallel={slot.beside} {shlex.join(step.options)}"
    try:
        host.run(f"mkdir -p -- {shlex.quote(place)}")
        host.push(archive, f"{place}/{archive.name}")
        host.run(
            f"cd -- {shlex.quote(place)} && rm -rf -- {shlex.quote(Path(folder).name)} && "
            f"tar -xf {shlex.quote(archive.name)} && rm -- {shlex.quote(archive.name)}",
            seconds=3600,
        )
    finally:
        archive.unlink()
    write = f"cd -- {quoted} && cat > run.sh && printf '%s\\n' {key} > key"
    host.run(write, said=ssh.job_script([train], config.launch.ssh.setup))


def _take(config: Experiment, host: Remote, folder: str) -> None:
    """Bring the result home, put it in its place, and clear up there."""
    name = f"{Path(folder).name}.result.tar"
    result = config.folder / "launch" / "results" / name
    result.parent.mkdir(exist_ok=True)
    host.pull(f"{folder}/{name}", result)
    try:
        with _home:
            collect(config, result)
    except artifacts.ArtifactError as error:
        raise StepError(str(error), again=True) from None
    result.unlink()
    host.run(f"rm -rf -- {shlex.quote(folder)}")
