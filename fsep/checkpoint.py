"""Checkpoints, of a run with sharded experts or without, that can be resumed exactly at any number of ranks.

Every state (weight, fp32 master, optimizer moments) of every parameter is written as intervals in one coordinate
space (``fsep.state``); a rank that loads reads the intersections with what it holds now, and no more.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from fsep.experts import expert_layers
from fsep.files import PARTIAL, Reader, WriteError, Writer, first_rank_says, replace_text
from fsep.space import Interval
from fsep.state import State

FORMAT = 1
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def save_checkpoint(
    engine, folder: str | os.PathLike, tag: str | None = None, client_state: dict | None = None
) -> Path:
    """Write ``folder/tag``, whole or not at all, and make it the latest; a collective call.

    Holds weights, fp32 masters, optimizer state (sharded experts' and all else, under ZeRO or not), DeepSpeed's
    counters, its learning-rate scheduler and ``client_state``. No rank gathers more than it holds. The random
    number generators and the planner's forecasts are not part of it.

    Args:
        folder: on a file system that all ranks share.
        tag: None for ``global_step<n>``; an older checkpoint of that name is replaced.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: in the middle of a gradient accumulation, fp16, ZeRO stage 3.
        WriteError: the disk is full.
    """
    accumulation = engine.gradient_accumulation_steps()
    if engine.micro_steps % accumulation:
        raise ValueError(
            f"{engine.micro_steps % accumulation} of {accumulation} micro-batches are accumulated: "
            "save after engine.step() has updated the weights"
        )
    state, folder = State(engine), Path(folder)
    tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    partial = folder / f"{tag}{PARTIAL}"
    first_rank_says(lambda: _begin(folder, tag, partial))
    writer = Writer(partial)
    parts = []
    for number, part in enumerate(state.owned()):
        key = f"{state.rank}.{number}"
        writer.add(key, part.values)
        parts.append([part.parameter, part.state, *part.interval, key])
    try:
        files = writer.finish()
    except WriteError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    gathered: list = [None] * state.ranks
    dist.all_gather_object(gathered, (parts, state.scalars(), state.options()))
    first_rank_says(lambda: _finish(engine, state, folder, tag, files, gathered, client_state or {}))
    return folder / tag


def load_checkpoint(engine, folder: str | os.PathLike, tag: str | None = None) -> tuple[Path, dict]:
    """Bring an engine of the same model to the state that was saved, at any number of ranks; a collective call.

    What does not match is refused before anything is changed.

    Args:
        tag: None for the latest.

    Returns:
        The folder of the checkpoint and the ``client_state``.

    Raises:
        ValueError: no checkpoint, a damaged one, or one of another model or another set of trained parameters.
    """
    state, error, path = State(engine), None, None
    try:
        path = Path(folder) / (tag if tag is not None else _latest(Path(folder)))
        manifest = _manifest(path)
        plan = _plan(state, path, manifest)
        loaded = torch.load(path / "engine.pt", map_location="cpu", weights_only=False)
    except ValueError as refusal:
        error = str(refusal)
    everywhere: list = [None] * state.ranks
    dist.all_gather_object(everywhere, error)
    for error in filter(None, everywhere):
        raise ValueError(error)
    for part, common, interval, stored in plan:
        values = stored[:, common.start - interval.start : common.stop - interval.start]
        into = part.values[:, common.start - part.interval.start : common.stop - part.interval.start]
        into.copy_(values)
    state.set_scalars(manifest["scalars"], manifest["options"])
    for name, buffer in _buffers(engine).items():
        buffer.copy_(loaded["buffers"][name])
    for name in COUNTERS:
        setattr(engine, name, manifest["counters"][name])
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    if engine.lr_scheduler is not None and loaded["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(loaded["lr_scheduler"])
    for layer in expert_layers(engine.module):
        layer.loaded = True
    return path, loaded["client_state"]


def _plan(state: State, path: Path, manifest: dict) -> list[tuple]:
    """What to copy: (part, common interval, stored interval, stored tensor); makes missing optimizer states.

    Raises:
        ValueError: another model, other trained parameters, or coordinates that are not there.
    """
    if manifest["parameters"] != state.sizes():
        raise ValueError(f"{path} is of another model: {_first_difference(manifest['parameters'], state.sizes())}")
    trained, saved = state.trained(), set(manifest["scalars"])
    if trained != saved:
        odd = sorted(trained ^ saved)[0]
        raise ValueError(
            f"{path}: {odd} is trained {'there but not here' if odd in saved else 'here but not there'}"
        )
    pieces: dict[tuple[str, str], list] = {}
    for file in manifest["files"].values():
        for name, kind, start, stop, key in file["parts"]:
            pieces.setdefault((name, kind), []).append((Interval(start, stop), key))
    reader = Reader(path, {part[4]: name for name, file in manifest["files"].items() for part in file["parts"]})
    state.prepare({kind for name, kind in pieces if name in saved})
    plan = []
    for part in state.parts():
        found = [
            (part.interval & stored, stored, key) for stored, key in pieces.get((part.parameter, part.state), [])
        ]
        if sum(common.size for common, *_ in found) != part.interval.size:
            raise ValueError(
                f"{path} lacks coordinates {part.interval.start} to {part.interval.stop} of {part.state} of "
                f"{part.parameter}: it was saved with another optimizer or precision"
            )
        for common, stored, key in found:
            if common.size:
                tensor = reader.slice_of(key, (state.rows(part.parameter), stored.size))
                plan.append((part, common, stored, tensor))
    return plan


def _begin(folder: Path, tag: str, partial: Path) -> None:
    if Path(tag).name != tag or tag.endswith(PARTIAL):
        raise ValueError(f"tag is {tag!r}: give a plain name")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()


def _finish(engine, state: State, folder: Path, tag: str, files: list, gathered: list, client_state: dict) -> None:
    """On rank 0: manifest, the engine's own state, then the names."""
    partial, final = folder / f"{tag}{PARTIAL}", folder / tag
    described = {}
    scalars, options = {}, {}
    for found, (parts, own_scalars, own_options) in zip(files, gathered, strict=True):
        by_key = {part[4]: part for part in parts}
        scalars |= own_scalars
        options |= own_options
        for written, keys in found.items():
            name = written.removesuffix(PARTIAL)
            os.replace(partial / written, partial / name)
            described[name] = {
                "bytes": (partial / name).stat().st_size,
                "parts": [by_key[key] for key in keys],
            }
    scheduler = engine.lr_scheduler
    torch.save(
        {
            "client_state": client_state,
            "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "buffers": {name: buffer.cpu() for name, buffer in _buffers(engine).items()},
        },
        partial / "engine.pt",
    )
    manifest = {
        "format": FORMAT,
        "ranks": state.ranks,
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "parameters": state.sizes(),
        "scalars": scalars,
        "options": options,
        "files": described | {"engine.pt": {"bytes": (partial / "engine.pt").stat().st_size, "parts": []}},
    }
    replace_text(partial / "manifest.json", json.dumps(manifest))
    old = folder / f"{tag}.old{PARTIAL}"
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(partial, final)
    shutil.rmtree(old, ignore_errors=True)
    replace_text(folder / "latest", tag)


def _latest(folder: Path) -> str:
    try:
        return (folder / "latest").read_text().strip()
    except OSError:
        raise ValueError(f"{folder} has no file `latest`: give a folder of checkpoints, or a tag") from None


def _manifest(path: Path) -> dict:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no whole checkpoint of fsep.save_checkpoint ({error})") from None
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} has format {manifest.get('format')}: this version reads {FORMAT}")
    for name, file in manifest["files"].items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found != file["bytes"]:
            raise ValueError(f"{path / name} has {found} bytes, not {file['bytes']}: the checkpoint is damaged")
    return manifest


def _first_difference(saved: dict, here: dict) -> str:
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            return f"{name} is {saved.get(name)} there and {here.get(name)} here"
    return "the order of parameters"


def _buffers(engine) -> dict[str, torch.Tensor]:
    """Persistent buffers of the module."""
    own = dict(engine.module.named_buffers())
    return {name: own[name] for name in engine.module.state_dict() if name in own}
