"""Carry a submodel's training, or a tuning stage, to another machine and its result back.

A pack is a tar file with a small run folder in it: the experiment, the model to begin from, the rows to train on
and the fingerprints of what they come from. `disco train experiment.yaml --submodel k` (or `--stage finetune`)
works there as at home and leaves a result file, which `disco collect` takes back after checking that it was made
from this run.
"""

import shutil
import tarfile
from pathlib import Path

from disco import artifacts
from disco.artifacts import ArtifactError
from disco.config import ConfigError, Experiment, closest
from disco.pipeline import expected_inputs
from disco.stages import Stage, clusters, dashed, packed_file, packed_rows, stages, submodel_input
from launch.ledger import append, read

TRAINED = "submodel"  # folder of the trained model in a result


def name_of(config: Experiment, what: int | str) -> str:
    """What a pack is called: of a submodel's number, or a stage's name."""
    return f"{config.name}-submodel-{what}" if isinstance(what, int) else f"{config.name}-{dashed(what)}"


def pack(config: Experiment, what: int | str, out: Path) -> Path:
    """Write `<name>-submodel-<k>.tar`, or for the name of a tuning stage `<name>-<stage>.tar`, with all that the
    training needs. Returns its path."""
    stage = stage_of(config, what)
    begin = stage.needs[-1]
    for need in stage.needs:
        artifacts.verify(config.folder / need)
    inputs = expected_inputs(config, stage)
    target = out / f"{name_of(config, what)}.tar"
    work = target.with_name(target.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    root = work / name_of(config, what)
    carried = config.model_copy(update={"runs": "runs"})
    folder = root / carried.folder
    shutil.copytree(config.folder / begin, folder / begin)
    note = None
    if isinstance(what, int):
        rows, note = submodel_input(config, "", what)
        rows.export(folder / f"rows-{what}")
    else:
        for rows, place in zip(stage.carries(), packed_rows(folder, what), strict=True):
            rows.export(place)
    artifacts.write_json(packed_file(folder, what), {"inputs": inputs, "note": note, "begin": begin})
    (root / "experiment.yaml").write_text(carried.dump(), encoding="utf-8")
    _tar(root, target)
    shutil.rmtree(work)
    return target


def train_packed(config: Experiment, what: int | str) -> Path:
    """Train what an unpacked folder is the pack of; returns the result file to carry home."""
    stage = stage_of(config, what)
    packed = artifacts.read_json(packed_file(config.folder, what))
    begin = packed["begin"]
    artifacts.verify(config.folder / begin)
    folder = config.folder / stage.name
    with artifacts.lock(config.folder):
        if not folder.exists():
            with artifacts.stage_folder(
                folder,
                stage=stage.name,
                inputs=packed["inputs"],
                section=stage.section,
                seed=config.seed,
                keep_partial=True,
            ) as out:
                stage.make(out)
        artifacts.verify(folder)
        result = Path(f"{name_of(config, what)}.result.tar")
        work = result.with_name(result.name + ".partial")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        shutil.copytree(folder, work / TRAINED)
        for name in ("ledger.jsonl", "metrics.jsonl"):
            shutil.copy(config.folder / name, work / name)
        _tar(work, result)
        shutil.rmtree(work)
    return result


def collect(config: Experiment, result: Path) -> str:
    """Take a result file back into the run. Returns what became of it, in words.

    Raises ArtifactError where the file is damaged, or made from another experiment, clustering or start.
    """
    if not result.is_file():
        raise ArtifactError(f"{result}: no such result file")
    with artifacts.lock(config.folder):
        work = config.folder / "collect.partial"
        shutil.rmtree(work, ignore_errors=True)
        try:
            return _take(config, result, work)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _take(config: Experiment, result: Path, work: Path) -> str:
    try:
        with tarfile.open(result) as archive:
            archive.extractall(work, filter="data")  # refuses paths and links that lead outside
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ArtifactError(f"{result}: cannot be unpacked: {error}") from None
    roots = list(work.iterdir())
    if len(roots) != 1 or not (roots[0] / TRAINED / artifacts.MANIFEST).is_file():
        raise ArtifactError(f"{result}: not a result of disco train: it holds no trained model with a manifest")
    root = roots[0]
    artifacts.verify(root / TRAINED)
    manifest = artifacts.manifest(root / TRAINED)
    stage = stages(config).get(manifest["stage"])
    if stage is None or not (stage.submodel or stage.carries):
        raise ArtifactError(f"{result}: holds '{manifest['stage']}', which is no submodel of {config.name}")
    inputs = expected_inputs(config, stage)
    differing = [name for name in inputs if manifest["inputs"].get(name) != inputs[name]]
    if differing or manifest["key"] != artifacts.stage_key(inputs, stage.section, config.seed):
        what = f"another {' and '.join(differing)}" if differing else "another configuration or seed"
        raise ArtifactError(f"{result}: {stage.name} was trained from {what} than this run has: pack it again")
    target = config.folder / stage.name
    if target.exists():
        present = artifacts.manifest(target)
        if present["fingerprint"] == manifest["fingerprint"]:
            return f"{stage.name}: there already, the same to the last byte"
        if present["key"] == manifest["key"]:
            raise ArtifactError(f"{target} is there, with other weights: remove it to take {result} instead")
        shutil.rmtree(target)  # stale: made from something else than this run has now
    target.parent.mkdir(parents=True, exist_ok=True)
    for name in ("ledger.jsonl", "metrics.jsonl"):
        _append_new(config.folder / name, root / name, stage.name)
    (root / TRAINED).rename(target)
    return f"{stage.name}: taken from {result}"


def _append_new(home: Path, carried: Path, phase: str) -> None:
    """Append the phase's rows that are not there yet, so that collecting twice bills once."""
    known = read(home)
    for row in read(carried):
        if row.get("phase") == phase and row not in known:
            append(home, row)


def _tar(root: Path, target: Path) -> None:
    partial = target.with_name(target.name + ".partial.tar")
    with tarfile.open(partial, "w") as archive:
        archive.add(root, arcname=root.name)
    partial.rename(target)


def stage_of(config: Experiment, what: int | str, baseline: str | None = None) -> Stage:
    """The stage of a submodel, of DisCo's own or of those of a baseline, or the tuning stage of that name."""
    if isinstance(what, str):
        known = {name: stage for name, stage in stages(config).items() if stage.carries}
        if what not in known:
            raise ConfigError(f"--stage {what}: no such stage to take elsewhere: {closest(what, known)}")
        return known[what]
    submodel = what
    if not 0 <= submodel < clusters(config):
        raise ConfigError(f"--submodel {submodel}: this experiment has submodels 0 to {clusters(config) - 1}")
    graph = stages(config)
    name = f"baselines/{baseline}/train/{submodel}" if baseline else f"train/{submodel}"
    if name not in graph:
        raise ConfigError(f"--baseline {baseline}: this experiment has no such baseline with submodels")
    return graph[name]
