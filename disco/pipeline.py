"""Run a graph of stages: what is fresh stays, what is stale or missing is made, nothing else."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

import transformers

from disco import artifacts
from disco.artifacts import ArtifactError
from disco.billing import billed
from disco.check import check
from disco.config import ConfigError, Experiment, closest
from disco.experts import is_for_any_processes
from disco.job import JOB, stop_jobs
from disco.running import making, running
from disco.stages import Stage, stages
from disco.train import price_of

FRESH, STALE, MISSING, STARTED, WAITING, DAMAGED = "fresh", "stale", "missing", "started", "waiting", "damaged"
RUNNING = "running"


def expected_inputs(config: Experiment, stage: Stage) -> dict[str, str]:
    """Fingerprints of what the stage reads. Raises ArtifactError where an input is not there yet."""
    return {need: artifacts.content(config.folder / need) for need in stage.needs}


def status(config: Experiment, graph: Iterable[Stage] | None = None) -> dict[str, str]:
    """The state of every stage: fresh, stale, running (anywhere), started (resumes), missing, damaged, or waiting
    for another. `graph`: stages other than the pipeline's."""
    states: dict[str, str] = {}
    for stage in stages(config).values() if graph is None else graph:
        name = stage.name
        folder = config.folder / name
        if running(config.folder, name):
            states[name] = RUNNING
        elif any(states[need] != FRESH for need in stage.needs):
            states[name] = WAITING
        elif folder.exists():
            key = artifacts.stage_key(expected_inputs(config, stage), stage.section, config.seed)
            try:
                artifacts.verify(folder, hashes=False)
                states[name] = FRESH if artifacts.manifest(folder)["key"] == key else STALE
            except ArtifactError:
                states[name] = DAMAGED
        else:
            states[name] = STARTED if stage.trains and artifacts.partial_of(folder).exists() else MISSING
    return states


def run(
    config: Experiment,
    *,
    until: str | Iterable[str] | None = None,
    start: str | None = None,
    force: Iterable[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Make every stage that is stale or missing, in order; submodels `launch.parallel` at a time.

    `until` is the last stage made (or several), `start` the first of those made again, `force` names stages to
    make again although fresh. A fresh stage whose files differ from its manifest raises ArtifactError: it is made
    again only with `force` or `start`.
    """
    graph = stages(config)
    until = [until] if isinstance(until, str) else list(until or ())
    for name in [*force, *until, *filter(None, [start])]:
        if not any(_named(stage, name) for stage in graph):
            raise ConfigError(f"no stage is called '{name}': {closest(name, graph)}")
    check(config, trained_here(_until(graph, until)))
    transformers.utils.logging.disable_progress_bar()
    with artifacts.lock(config.folder):
        (config.folder / "experiment.yaml").write_text(config.dump(), encoding="utf-8")
        make_stale(config, _until(graph, until), _again(graph, start, force), say)


def make_stale(config: Experiment, todo: list[Stage], again: set[str], say: Callable[[str], None]) -> None:
    """Make those of the stages in `todo`, in order, that are not fresh or are named in `again`."""
    while todo:
        batch, todo = todo[:1], todo[1:]
        if batch[0].submodel:  # its siblings need none of each other
            family = batch[0].name.rpartition("/")[0]
            batch += [stage for stage in todo if stage.submodel and stage.name.rpartition("/")[0] == family]
            todo = [stage for stage in todo if stage not in batch]
        batch = [stage for stage in batch if not _fresh(config, stage, stage.name in again, say)]
        for stage in batch:
            if stage.trains and stage.name not in again:
                _suit_processes(config, stage, say)
        _make_all(config, batch, say)


def trained_here(todo: Iterable[Stage]) -> set[str]:
    """The sections of the experiment whose processes these stages start."""
    trains = [stage for stage in todo if stage.trains]
    return {
        "train" if stage.submodel else "seed_phase" if stage.name == "start" else "finetune" for stage in trains
    }


def run_submodel(config: Experiment, name: str, *, say: Callable[[str], None] = print) -> None:
    """Make one submodel (a stage such as train/3) and, where it is missing, what it needs.

    Any number of processes can do so in one run folder, on any machines that share it, each with its own submodel.
    """
    stage = stages(config)[name]
    states = status(config)
    if any(states[need] != FRESH for need in stage.needs):
        run(config, until=stage.needs, say=say)
    check(config, trained_here([stage]))
    transformers.utils.logging.disable_progress_bar()
    with (
        artifacts.lock(config.folder, shared=True),
        artifacts.lock(config.folder, name=f"launch/running/{name}.lock"),
    ):
        if not _fresh(config, stage, False, say):
            _suit_processes(config, stage, say)
            _make(config, stage, say)


def _suit_processes(config: Experiment, stage: Stage, say: Callable[[str], None]) -> None:
    """Let a half-trained stage go on where only the number of its processes has changed.

    Raises ArtifactError where its checkpoint is for the number that wrote it.
    """
    partial = artifacts.partial_of(config.folder / stage.name)
    job = partial / artifacts.SCRATCH / JOB
    checkpoints = sorted((job.parent / "checkpoints").glob("step-*[0-9]"))
    if not job.exists() or not checkpoints:
        return
    [name] = trained_here([stage])
    before, now = artifacts.read_json(job)["section"], getattr(config, name)
    shares = {key: before[key] for key in ("processes", "micro_batch_size")}
    section = stage.section | shares
    if stage.name == "baselines/joint":  # which is trained as fine-tuning is
        section = stage.section | {key: stage.section[key] | shares for key in ("finetune", "joint")}
    key_of = functools.partial(artifacts.stage_key, expected_inputs(config, stage), seed=config.seed)
    if before["processes"] == now.processes or not artifacts.made_from(partial, key_of(section)):
        return
    if is_for_any_processes(checkpoints[-1]):
        artifacts.remake_from(partial, key_of(stage.section))
        return say(
            f"{stage.name}: goes on with {now.processes} processes from a checkpoint of {before['processes']}"
        )
    raise ArtifactError(
        f"{partial} has a checkpoint of {before['processes']} processes, {name}.processes is {now.processes}: "
        "checkpoints of bcd, of ZeRO 3 and of autoep are a file a process: "
        f"it goes on with {name}.processes={before['processes']} only; --force {stage.name} begins anew"
    )


def _make_all(config: Experiment, batch: list[Stage], say: Callable[[str], None]) -> None:
    """Make independent stages side by side. One that fails does not stop the others; all are named at the end."""
    if len(batch) == 1:
        return _make(config, batch[0], say)
    failed = {}
    pool = ThreadPoolExecutor(max_workers=config.launch.parallel)
    try:
        pending = {pool.submit(_make, config, stage, say): stage for stage in batch}
        for future in as_completed(pending):
            if error := future.exception():
                failed[pending[future].name] = error
    finally:  # on Ctrl-C too: nothing new starts, and what runs is stopped
        pool.shutdown(wait=False, cancel_futures=True)
        stop_jobs()
    if failed:
        reasons = "; ".join(str(error) for _, error in sorted(failed.items()))
        raise ArtifactError(f"{len(failed)} of {len(batch)} submodels failed: {reasons}. The others are kept")


def _make(config: Experiment, stage: Stage, say: Callable[[str], None]) -> None:
    folder, inputs = config.folder / stage.name, expected_inputs(config, stage)
    if artifacts.finish(folder, artifacts.stage_key(inputs, stage.section, config.seed)):
        return say(f"{stage.name}: was whole already")
    say(f"{stage.name}: making it")
    with (
        making(config.folder, stage.name),
        artifacts.stage_folder(
            folder,
            stage=stage.name,
            inputs=inputs,
            section=stage.section,
            seed=config.seed,
            keep_partial=stage.trains,
        ) as out,
    ):
        price = price_of(config, config.hardware.other)
        with contextlib.nullcontext() if stage.trains else billed(config.folder, stage.name, price):
            stage.make(out)


def _fresh(config: Experiment, stage: Stage, again: bool, say: Callable[[str], None]) -> bool:
    folder = config.folder / stage.name
    if again or not folder.exists():
        return False
    recorded = artifacts.manifest(folder)
    key = artifacts.stage_key(expected_inputs(config, stage), stage.section, config.seed)
    if recorded.get("key") != key:
        say(f"{stage.name}: stale ({_difference(recorded, config, stage)})")
        return False
    artifacts.verify(folder)
    say(f"{stage.name}: fresh")
    return True


def _difference(recorded: dict, config: Experiment, stage: Stage) -> str:
    """Why a stage is stale, in words."""
    inputs = expected_inputs(config, stage)
    changed = [need for need in inputs if recorded.get("inputs", {}).get(need) != inputs[need]]
    if changed:
        return f"{', '.join(changed)} changed"
    return "its configuration changed" if recorded.get("seed") == config.seed else "the seed changed"


def _named(name: str, pattern: str) -> bool:
    """`train` names train/0, train/1, ... too."""
    return name == pattern or name.startswith(pattern + "/")


def _until(graph: dict[str, Stage], until: list[str]) -> list[Stage]:
    order = list(graph.values())
    if not until:
        return order
    last = [stage for stage in order if any(_named(stage.name, name) for name in until)]
    wanted, queue = set(), [stage.name for stage in last]
    while queue:
        name = queue.pop()
        if name not in wanted:
            wanted.add(name)
            queue += graph[name].needs
    return [stage for stage in order if stage.name in wanted]


def _again(graph: dict[str, Stage], start: str | None, force: Iterable[str]) -> set[str]:
    again = {name for name in graph for pattern in force if _named(name, pattern)}
    if start is not None:
        again |= {name for name in graph if _named(name, start)}
        for name, stage in graph.items():
            if any(need in again for need in stage.needs):
                again.add(name)
    return again
