"""Submodels to the full MoE, streamed: experts bit for bit, shared part averaged, router rows gathered.

The shared part is base + sum_k w_k (theta_k - base), computed in float64 and cast once. Only one chunk of one
tensor is in memory at a time, whatever the number of experts and layers.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from disco.artifacts import ArtifactError, write_json
from disco.checkpoint import (
    FLOATS,
    Checkpoint,
    Output,
    Stored,
    as_bytes,
    as_tensor,
    copy_side_files,
    identity,
    seeded,
    tokenizer_identity,
    write_model,
)
from disco.config import ConfigError
from disco.family import family_of, num_experts, renormalizes, top_k, with_experts
from disco.split import SubmodelNote, read_submodel_note

# What a config says besides the architecture; a difference here does not make another model.
INCIDENTAL = (
    "_name_or_path",
    "architectures",
    "dtype",
    "norm_topk_prob",
    "output_router_logits",
    "router_aux_loss_coef",
    "transformers_version",
    "use_cache",
)


class Submodel(NamedTuple):
    checkpoint: Checkpoint
    note: SubmodelNote
    weight: float


def merge(
    start: Path,
    submodels: list[Path],
    out: Path,
    *,
    full_config: PretrainedConfig | None = None,
    weights: list[float] | None = None,
    original: Path | None = None,
    renormalize: bool | None = None,
    seed: int = 0,
    max_shard_bytes: int = 2_000_000_000,
) -> None:
    """Write the MoE whose expert j is that of `submodels[j]` to the folder `out`.

    start: what the submodels were trained from, the full model or one with a single expert.
    full_config: config of the merged model; the start's own where that is the full model.
    weights: share of each submodel in the shared part, normalised here; equal if absent.
    original: the full model whose router rows are kept (row of the expert that each submodel was split from);
        without it rows are drawn from N(0, initializer_range) by seed, layer and expert.
    renormalize: norm_topk_prob of the result. Experts are trained at weight 1, so that top-k weights have to sum
        to 1: absent means true where the family can, but with `original` the config's own setting.

    Permuting `submodels` permutes experts and router rows and changes nothing else. Raises ConfigError or
    ArtifactError, before anything is written, where submodels do not belong together; ArtifactError naming
    tensor and folder where a weight is not finite.
    """
    start, out = Path(start), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    submodels = [Path(folder) for folder in submodels]
    base = Checkpoint.open(start)
    config = base.config if full_config is None else full_config
    if num_experts(config) != len(submodels):
        raise ConfigError(
            f"{len(submodels)} submodels but the merged model has {num_experts(config)} experts: "
            "give one submodel an expert"
        )
    if renormalize is None and original is None and family_of(config).renormalize is not False:
        renormalize = True
    config = with_experts(config, len(submodels), top_k(config), renormalize)
    parts = _open_submodels(base, submodels, config, _shares(weights, len(submodels)))
    router = None if original is None else _open_original(Path(original), config, parts[0].checkpoint)

    outputs = []
    for key, stored in parts[0].checkpoint.tensors.items():
        role = base.family.role(key)
        if role.kind == "shared":
            outputs.append(_averaged(key, base, parts))
        elif role.kind == "router":
            rows = [part.note.expert for part in parts]
            chunks = (
                _random_rows(key, stored, rows, config.initializer_range, seed)
                if router is None
                else _kept_rows(router.tensors[key], rows)
            )
            outputs.append(Output(key, stored.dtype, (len(parts), *stored.shape[1:]), chunks))
        elif role.expert == 0:  # others are stand-ins
            for e, part in enumerate(parts):
                chunks = partial(_finite, key, part.checkpoint)
                outputs.append(Output(role.template.format(e=e), stored.dtype, stored.shape, chunks))
    write_model(out, config, outputs, "the merged model", max_shard_bytes)
    copy_side_files(start, out)
    note = {
        "base": parts[0].note.base,
        "clustering": parts[0].note.clustering,
        "experts": [part.note.expert for part in parts],
        "weights": [part.weight for part in parts],
        "router": "random" if original is None else "original",
        "renormalize": renormalizes(config),
    }
    write_json(out / "merge.json", note)


def _shares(weights: list[float] | None, count: int) -> list[float]:
    weights = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(weights) != count:
        raise ConfigError(f"merge.backbone has {len(weights)} weights for {count} submodels")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights) <= 0:
        raise ConfigError(f"merge.backbone is {weights}: weights are at least 0 and not all 0")
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _open_submodels(
    base: Checkpoint, folders: list[Path], config: PretrainedConfig, shares: list[float]
) -> list[Submodel]:
    """Open the submodels and refuse those that do not belong together, by name."""
    start = identity(base.folder)
    tokenizer = tokenizer_identity(base.folder)
    wanted = _architecture(with_experts(config, 1, 1))
    if _architecture(with_experts(base.config, 1, 1)) != wanted:
        raise ConfigError(f"{base.folder}: the start's config is not that of the merged model")
    parts: list[Submodel] = []
    for folder, share in zip(folders, shares, strict=True):
        note = read_submodel_note(folder)
        checkpoint = Checkpoint.open(folder)
        first = parts[0] if parts else None
        if note.base != start:
            raise ArtifactError(
                f"{folder}: was trained from another base ({note.base[:12]}) than {base.folder} ({start[:12]}): "
                "split and train it again from this one"
            )
        found = _architecture(checkpoint.config)
        other = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
        if other:
            key = other[0]
            raise ArtifactError(
                f"{folder}: config has {key} = {found.get(key)}, {wanted.get(key)} expected of a submodel"
            )
        if not note.tokenizer == tokenizer_identity(folder) == tokenizer:
            raise ArtifactError(f"{folder}: has another tokenizer than {base.folder}")
        if note.of != len(folders):
            raise ArtifactError(f"{folder}: is one of {note.of} submodels, but {len(folders)} are to be merged")
        if first and note.clustering != first.note.clustering:
            raise ArtifactError(
                f"{folder}: was trained on clustering '{note.clustering}', "
                f"{first.checkpoint.folder} on '{first.note.clustering}'"
            )
        for earlier in parts:
            if earlier.note.expert == note.expert:
                raise ArtifactError(f"{folder}: is submodel {note.expert}, as is {earlier.checkpoint.folder}")
        reference = first.checkpoint.tensors if first else checkpoint.tensors
        for key, stored in checkpoint.tensors.items():
            same = base.tensors[key] if base.family.role(key).kind == "shared" else reference[key]
            if stored.dtype != same.dtype:
                raise ArtifactError(f"{folder}: {key} is {stored.dtype}, {same.dtype} in {same.path.parent}")
        parts.append(Submodel(checkpoint, note, share))
    return parts


def _architecture(config: PretrainedConfig) -> dict:
    return {key: value for key, value in config.to_dict().items() if key not in INCIDENTAL}


def _open_original(folder: Path, config: PretrainedConfig, submodel: Checkpoint) -> Checkpoint:
    original = Checkpoint.open(folder)
    if num_experts(original.config) != num_experts(config):
        raise ConfigError(
            f"merge.router: original needs a full model to take rows from, but {folder} has "
            f"{num_experts(original.config)} experts, not {num_experts(config)}: set merge.router=probe"
        )
    for key, stored in submodel.tensors.items():
        if original.family.role(key).kind == "router":
            kept = original.tensors.get(key)
            if kept is None or (kept.dtype, kept.shape[1:]) != (stored.dtype, stored.shape[1:]):
                raise ArtifactError(f"{folder}: {key} does not fit the submodels' ({stored.dtype})")
    return original


def _kept_rows(router: Stored, rows: list[int]) -> Callable[[], Iterator]:
    def chunks() -> Iterator:
        for row in rows:
            yield from router.row(row).chunks()

    return chunks


def _random_rows(key: str, like: Stored, rows: list[int], std: float, seed: int) -> Callable[[], Iterator]:
    """Rows of N(0, std), each seeded by itself, so that a row follows its expert; biases are 0."""

    def chunks() -> Iterator:
        for row in rows:
            if len(like.shape) == 1:
                yield from like.row(0).filled(0.0)
                continue
            values = torch.randn(like.shape[1:], generator=seeded(seed, key, row), dtype=torch.float64) * std
            yield as_bytes(values.to(FLOATS[like.dtype]))

    return chunks


def _finite(key: str, part: Checkpoint) -> Iterator[bytearray]:
    """Chunks of a tensor of `part`. Raises ArtifactError at one that is not finite."""
    stored = part.tensors[key]
    for chunk in stored.chunks():
        # The extremes are NaN where any value is; this is ten times as fast as isfinite.
        if stored.dtype in FLOATS and not torch.stack(as_tensor(chunk, stored.dtype).aminmax()).isfinite().all():
            raise ArtifactError(f"{part.folder}: {key} is not finite: train that submodel again")
        yield chunk


def _averaged(key: str, base: Checkpoint, parts: list[Submodel]) -> Output:
    # Summed in the order of the experts, so that the order of the arguments does not show in the last bit.
    ordered = sorted(parts, key=lambda part: part.note.expert)
    dtype = base.tensors[key].dtype

    def chunks() -> Iterator:
        sources = (base, *(part.checkpoint for part in ordered))
        for anchor, *thetas in zip(*(_finite(key, source) for source in sources), strict=True):
            if dtype not in FLOATS and any(theta != thetas[0] for theta in thetas):
                raise ArtifactError(f"{key} is {dtype} and differs between submodels: it has no average")
            yield average(anchor, thetas, [part.weight for part in ordered], dtype)

    return Output(key, dtype, base.tensors[key].shape, chunks)


def average(base: bytearray, thetas: list[bytearray], weights: list[float], dtype: str) -> bytearray | memoryview:
    """base + sum_k w_k (theta_k - base) in float64, cast once; raw values of `dtype` in and out.

    Where all thetas are the same, so is the result, bit for bit (the sum would be off by its own rounding).
    """
    if all(theta == thetas[0] for theta in thetas):
        return thetas[0]
    anchor = as_tensor(base, dtype).double()
    mean = anchor.clone()
    for theta, weight in zip(thetas, weights, strict=True):
        mean += as_tensor(theta, dtype).double().sub_(anchor).mul_(weight)
    return as_bytes(mean.to(FLOATS[dtype]))
