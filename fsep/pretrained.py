"""Hugging Face checkpoints of a model with sharded experts, read and written a slice at a time.

Shapes: E experts, N ranks, S values a slice, F expert width, H hidden width.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsep.experts import ShardedExperts
from fsep.families import Family, family_of
from fsep.files import CHUNK, PARTIAL, Reader, Writer, first_rank_says, replace_text
from fsep.layout import Layout
from fsep.sharding import sharded_layers
from fsep.weights import Placement


def load_pretrained(model: nn.Module, folder: str | os.PathLike) -> nn.Module:
    """Read a Hugging Face safetensors checkpoint into an attached model, and into it what is on the meta device.

    Each rank reads its own slices of the experts and no more. Parameters that are not on the meta device keep
    their values, experts excepted.

    Args:
        model: as returned by ``fsep.attach``, before ``deepspeed.initialize``.
        folder: holds ``model.safetensors`` or ``model.safetensors.index.json``.

    Returns:
        The model.

    Raises:
        ValueError: no checkpoint, a tensor that is missing or of another shape, or an engine instead of a model.
    """
    layers = sharded_layers(model)
    if hasattr(layers[0].shard, "_hp_mapping") or hasattr(model, "zero_optimization_stage"):
        raise ValueError("the model is under a DeepSpeed engine already: load before deepspeed.initialize")
    inner, reader = layers[0].runtime.model, Reader.of_model(folder)
    family, device = family_of(inner), layers[0].shard.device
    for layer in layers:
        _load_experts(layer, reader, family)
        layer.loaded = True
    tied = dict(getattr(inner, "all_tied_weights_keys", None) or {})
    for name, parameter in list(inner.named_parameters(remove_duplicate=False)):
        if parameter.is_meta and name not in tied:
            value = reader.read(family.on_disk(name), tuple(parameter.shape)).to(device, parameter.dtype)
            owner, _, leaf = name.rpartition(".")
            new = nn.Parameter(value, requires_grad=parameter.requires_grad)
            inner.get_submodule(owner)._parameters[leaf] = new
    for owner, module in inner.named_modules():
        on_meta = [leaf for leaf, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for leaf in on_meta:
            module._buffers[leaf] = torch.empty_like(module._buffers[leaf], device=device)
        if on_meta and module._non_persistent_buffers_set.issuperset(on_meta):
            inner._init_weights(module)  # no checkpoint holds these; Hugging Face computes them
        elif on_meta:
            for leaf in on_meta:
                buffer = module._buffers[leaf]
                buffer.copy_(reader.read(family.on_disk(f"{owner}.{leaf}"), tuple(buffer.shape)))
    inner.tie_weights()
    return model


def _load_experts(layer: ShardedExperts, reader: Reader, family: Family) -> None:
    space, E = layer.space, layer.num_experts
    own = space.owned(layer.runtime.tokens.rank, layer.ep_size)
    stacked = family.on_disk(f"{layer.name}.gate_up_proj")
    for expert in range(E):
        for rows in space.rows(own):
            shape = space.matrices[rows.matrix]
            if stacked in reader:
                key, full = stacked, (E, 2 * shape[0], shape[1])
                first = rows.first + rows.matrix * shape[0]
                if rows.matrix == 2:
                    key, full, first = family.on_disk(f"{layer.name}.down_proj"), (E, *shape), rows.first
                values = reader.slice_of(key, full)[expert, first : first + rows.last - rows.first]
            else:
                key = family.expert_key(layer.name, expert, rows.matrix)
                values = reader.slice_of(key, shape)[rows.first : rows.last]
            values = values.flatten()[rows.skip : rows.skip + rows.into.size]
            into = slice(rows.into.start - own.start, rows.into.stop - own.start)
            layer.shard.data[expert, into] = values.to(layer.shard)


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike, *, dtype: torch.dtype | None = None, max_file_bytes: int = CHUNK
) -> None:
    """Write an ordinary sharded Hugging Face checkpoint; a collective call.

    Streamed: a rank joins at most ``slots`` experts of one layer at a time, and holds at most ``max_file_bytes`` of
    tensors that wait to be written. Files take their names when all are whole; ``AutoModelForCausalLM`` opens the
    folder.

    Args:
        model: an attached model, an engine or a wrapper around one.
        folder: on a file system that all ranks share; a checkpoint that is there is replaced.
        dtype: of the tensors written; None keeps the model's.

    Raises:
        ValueError: no sharded experts, or ``folder`` is a file. WriteError (a RuntimeError): the disk is full.
    """
    layers = sharded_layers(model)
    inner, folder = layers[0].runtime.model, Path(folder)
    family, rank = family_of(inner), dist.get_rank()
    first_rank_says(lambda: _make_folder(folder))
    writer = Writer(folder, max_file_bytes)

    def add(key: str, tensor: Tensor) -> None:
        writer.add(key, tensor if dtype is None else tensor.to(dtype))

    if rank == 0:
        tied = dict(getattr(inner, "all_tied_weights_keys", None) or {})
        sharded = tuple(f"{layer.name}." for layer in layers)
        for name, tensor in inner.state_dict().items():
            if name not in tied and not name.startswith(sharded):
                add(family.on_disk(name), tensor)
    for layer in layers:
        _save_experts(layer, family, add)
    files = writer.finish()
    total = sum(len(of_rank) for of_rank in files)
    names = [
        (rank, old, f"model-{number:05d}-of-{total:05d}.safetensors")
        for number, (rank, old) in enumerate(((r, old) for r, found in enumerate(files) for old in found), start=1)
    ]
    index_path = folder / "model.safetensors.index.json"
    if rank == 0:  # without its index an old checkpoint can't be taken for the new one
        index_path.unlink(missing_ok=True)
        (folder / "model.safetensors").unlink(missing_ok=True)
    dist.barrier()
    for owner, old, new in names:
        if owner == rank:
            os.replace(folder / old, folder / new)
    dist.barrier()
    if rank == 0:
        kept = {new for _, _, new in names}
        for stale in folder.glob("model-*-of-*.safetensors"):
            if stale.name not in kept:
                stale.unlink()
        _save_config(inner, folder, dtype)
        sizes = {new: files[owner][old] for owner, old, new in names}
        index = {
            "metadata": {"total_size": sum(sum(found.values()) for found in sizes.values())},
            "weight_map": {key: new for new, found in sizes.items() for key in found},
        }
        replace_text(index_path, json.dumps(index, indent=2, sort_keys=True))
    dist.barrier()


def _make_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(f"rank-*{PARTIAL}"):
        left_over.unlink()


def _save_experts(layer: ShardedExperts, family: Family, add) -> None:
    """Each rank joins and adds its share of the layer's experts, ``ceil(E / N)`` of them, which slots allow."""
    run, E, N = layer.runtime, layer.num_experts, layer.ep_size
    share = -(-E // N)
    experts = np.arange(N * share).reshape(N, share)
    placement = Placement(
        Layout.from_table(np.where(experts < E, experts, -1), E), run.weights.rank, layer.shard.device
    )
    key = ("save", layer.index)
    run.rebuilder.start(key, layer.shard, placement, layer.name)
    flat = run.rebuilder.take(key)
    for expert, values in zip(experts[run.weights.rank], flat, strict=False):
        start = 0
        for matrix, (rows, columns) in enumerate(layer.space.matrices):
            part = values[start : start + rows * columns].view(rows, columns)
            add(family.expert_key(layer.name, int(expert), matrix), part)
            start += rows * columns
    run.rebuilder.free(flat)


def _save_config(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype or next(model.parameters()).dtype
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(folder)
