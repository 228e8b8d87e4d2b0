"""Carry a submodel's training to another machine and its result back.

A pack is a tar file with a small run folder in it: the experiment, the start model, the rows of one cluster and
the fingerprints of what they come from. `disco train experiment.yaml --submodel k` works there as at home and
leaves a result file, which `disco collect` takes back after checking that it was made from this run.
"""

import shutil
import tarfile
from pathlib import Path

from disco import artifacts
from disco.artifacts import ArtifactError
from disco.config import ConfigError, Experiment
from disco.pipeline import expected_inputs
from disco.stages import Stage, begins_from, clusters, packed_file, stages, submodel_input
from launch.ledger import append, read


def pack(config: Experiment, submodel: int, out: Path) -> Path:
    """Write `<name>-submodel-<k>.tar` with all that training submodel k needs. Returns its path."""
    stage = stage_of(config, submodel)
    begin = begins_from(config, submodel)
    for need in stage.needs:
        artifacts.verify(config.folder / need)
    inputs = expected_inputs(config, stage)
    target = out / f"{config.name}-submodel-{submodel}.tar"
    work = target.with_name(target.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    root = work / f"{config.name}-submodel-{submodel}"
    carried = config.model_copy(update={"runs": "runs"})
    folder = root / carried.folder
    shutil.copytree(config.folder / begin, folder / begin)
    rows, note = submodel_input(config, "", submodel)
    rows.export(folder / f"rows-{submodel}")
    artifacts.write_json(packed_file(folder, submodel), {"inputs": inputs, "note": note, "begin": begin})
    (root / "experiment.yaml").write_text(carried.dump(), encoding="utf-8")
    _tar(root, target)
    shutil.rmtree(work)
    return target


def train_packed(config: Experiment, submodel: int) -> Path:
    """Train a submodel in the unpacked folder; returns the result file to carry home."""
    stage = stage_of(config, submodel)
    packed = artifacts.read_json(packed_file(config.folder, submodel))
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
        result = Path(f"{config.name}-submodel-{submodel}.result.tar")
        work = result.with_name(result.name + ".partial")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        shutil.copytree(folder, work / "submodel")
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
    if len(roots) != 1 or not (roots[0] / "submodel" / artifacts.MANIFEST).is_file():
        raise ArtifactError(f"{result}: not a result of disco train: it holds no submodel with a manifest")
    root = roots[0]
    artifacts.verify(root / "submodel")
    manifest = artifacts.manifest(root / "submodel")
    stage = stages(config).get(manifest["stage"])
    if stage is None or not stage.submodel:
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
    (root / "submodel").rename(target)
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


def stage_of(config: Experiment, submodel: int, baseline: str | None = None) -> Stage:
    """The stage of a submodel, of DisCo's own or of those of a baseline."""
    if not 0 <= submodel < clusters(config):
        raise ConfigError(f"--submodel {submodel}: this experiment has submodels 0 to {clusters(config) - 1}")
    graph = stages(config)
    name = f"baselines/{baseline}/train/{submodel}" if baseline else f"train/{submodel}"
    if name not in graph:
        raise ConfigError(f"--baseline {baseline}: this experiment has no such baseline with submodels")
    return graph[name]
