"""Submodels to the full MoE, streamed: experts bit for bit, shared part averaged, router rows gathered.

The shared part is base + sum_k w_k (theta_k - base), computed in float64 and cast once. Only one chunk of one
tensor is in memory at a time, whatever the number of experts and layers.
"""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from disco.artifacts import ArtifactError, write_json
from disco.checkpoint import Checkpoint, copy_side_files, identity, tokenizer_identity, write_model
from disco.combine import SCALE, Shared, task_arithmetic, threshold, ties
from disco.config import ConfigError
from disco.family import family_of, num_experts, renormalizes, top_k, with_experts
from disco.split import SubmodelNote, read_submodel_note
from disco.tensor_files import FLOATS, Output, Stored, as_bytes, as_tensor, seeded

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
    shared: Shared = Shared(),
    own_rows: bool = False,
    clone_noise: float = 0.0,
    seed: int = 0,
    max_shard_bytes: int = 2_000_000_000,
) -> None:
    """Write the MoE whose experts are those of `submodels`, in their order, to the folder `out`.

    A submodel that stands for a group of experts has them all, or one, which is then cloned.

    start: what the submodels were trained from, the full model or one with a single expert.
    full_config: config of the merged model; the start's own where that is the full model.
    weights: share of each submodel in the shared part, normalised here; equal if absent.
    original: the full model whose router rows are kept (row of the expert that each submodel was split from);
        without it rows are drawn from N(0, initializer_range) by seed, layer and expert.
    renormalize: norm_topk_prob of the result. Experts are trained at weight 1, so that top-k weights have to sum
        to 1: absent means true where the family can, but with `original` the config's own setting.
    shared: another way to make the shared part than the weighted average.
    own_rows: without `original`, submodels with several experts keep their own router rows.
    clone_noise: standard deviation of the noise on each clone but the first, as a share of the tensor's own.

    Permuting `submodels` permutes experts and router rows and changes nothing else. Raises ConfigError or
    ArtifactError, before anything is written, where submodels do not belong together; ArtifactError naming
    tensor and folder where a weight is not finite.
    """
    start, out = Path(start), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    submodels = [Path(folder) for folder in submodels]
    base = Checkpoint.open(start)
    config = base.config if full_config is None else full_config
    total = sum(len(read_submodel_note(folder).group) for folder in submodels)
    if num_experts(config) != total:
        of = "" if total == len(submodels) else f" of {total} experts"
        raise ConfigError(
            f"{len(submodels)} submodels{of} but the merged model has {num_experts(config)} experts: "
            "give one submodel an expert, or a group of them"
        )
    if renormalize is None and original is None and family_of(config).renormalize is not False:
        renormalize = True
    config = with_experts(config, total, top_k(config), renormalize)
    parts = open_submodels(base, submodels, config, _shares(weights, len(submodels)))
    roles = {key: base.family.role(key).kind for key in base.tensors}
    shared.check([key for key, kind in roles.items() if kind == "shared"], len(parts))
    router = None if original is None else _open_original(Path(original), config, parts[0].checkpoint)

    outputs = []
    for key, stored in parts[0].checkpoint.tensors.items():
        role = base.family.role(key)
        if role.kind == "shared":
            outputs.append(_shared(key, base, parts, shared))
        elif role.kind == "router":
            chunks = partial(_router_rows, key, parts, router, own_rows, config.initializer_range, seed)
            outputs.append(Output(key, stored.dtype, (total, *stored.shape[1:]), chunks))
        elif role.expert == 0:
            outputs += _experts(role.template, stored, parts, clone_noise, seed)
    write_model(out, config, outputs, "the merged model", max_shard_bytes)
    copy_side_files(start, out)
    note = {
        "base": parts[0].note.base,
        "clustering": parts[0].note.clustering,
        "experts": [expert for part in parts for expert in part.note.group],
        "groups": [len(part.note.group) for part in parts],
        "weights": [part.weight for part in parts],
        "router": "random" if original is None else "original",
        "renormalize": renormalizes(config),
        "shared": shared._asdict(),
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


def open_submodels(
    base: Checkpoint, folders: list[Path], config: PretrainedConfig, shares: list[float] | None = None
) -> list[Submodel]:
    """Open the submodels of `base` for a merged model of `config`; refuse those that do not belong together."""
    shares = _shares(None, len(folders)) if shares is None else shares
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
        if num_experts(checkpoint.config) not in (1, len(note.group)):
            raise ArtifactError(
                f"{folder}: has {num_experts(checkpoint.config)} experts, its note says {len(note.group)}"
            )
        found = _architecture(with_experts(checkpoint.config, 1, 1))
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
            role = base.family.role(key)
            same = base.tensors[key] if role.kind == "shared" else reference[role.template.format(e=0)]
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


def _router_rows(
    key: str, parts: list[Submodel], original: Checkpoint | None, own_rows: bool, std: float, seed: int
) -> Iterator:
    """The original model's rows, the submodels' own, or rows of N(0, std), each seeded by itself, so that a row
    follows its expert (biases are then 0)."""
    for part in parts:
        mine = part.checkpoint.tensors[key]
        for index, expert in enumerate(part.note.group):
            if original is not None:
                yield from original.tensors[key].row(expert).chunks()
            elif own_rows and 1 < len(part.note.group) == num_experts(part.checkpoint.config):
                yield from mine.row(index).chunks()
            elif len(mine.shape) == 1:
                yield from mine.row(0).filled(0.0)
            else:
                values = torch.randn(mine.shape[1:], generator=seeded(seed, key, expert), dtype=torch.float64) * std
                yield as_bytes(values.to(FLOATS[mine.dtype]))


def _experts(template: str, like: Stored, parts: list[Submodel], noise: float, seed: int) -> list[Output]:
    """One tensor of every expert, in the order of the submodels."""
    outputs = []
    for part in parts:
        several = num_experts(part.checkpoint.config) > 1
        for index, expert in enumerate(part.note.group):
            key = template.format(e=index if several else 0)
            chunks = partial(finite, key, part.checkpoint)
            if noise and index and not several:
                chunks = partial(_noisy, key, part.checkpoint, noise, (seed, template, expert))
            outputs.append(Output(template.format(e=len(outputs)), like.dtype, like.shape, chunks))
    return outputs


def _noisy(key: str, part: Checkpoint, noise: float, name: tuple) -> Iterator[memoryview]:
    generator = seeded(*name)
    _, std = part.tensors[key].moments()
    for chunk in finite(key, part):
        values = as_tensor(chunk, part.tensors[key].dtype)
        fresh = torch.randn(values.shape, generator=generator) * (noise * std)
        yield as_bytes((values.float() + fresh).to(values.dtype))


def finite(key: str, part: Checkpoint) -> Iterator[bytearray]:
    """Chunks of a tensor of `part`. Raises ArtifactError at one that is not finite."""
    stored = part.tensors[key]
    for chunk in stored.chunks():
        # The extremes are NaN where any value is; this is ten times as fast as isfinite.
        if stored.dtype in FLOATS and not torch.stack(as_tensor(chunk, stored.dtype).aminmax()).isfinite().all():
            raise ArtifactError(f"{part.folder}: {key} is not finite: train that submodel again")
        yield chunk


def _shared(key: str, base: Checkpoint, parts: list[Submodel], shared: Shared) -> Output:
    """One tensor of the shared part."""
    # Summed in the order of the experts, so that the order of the arguments does not show in the last bit.
    ordered = sorted(parts, key=lambda part: part.note.expert)
    dtype = base.tensors[key].dtype
    weights = [part.weight for part in ordered]
    if (given := shared.weights(key)) is not None:  # in the order of the arguments, as those of all layers are
        of = dict(zip((part.note.expert for part in parts), _shares(given, len(parts)), strict=True))
        weights = [of[part.note.expert] for part in ordered]
    scale = SCALE.get(shared.method) if shared.scale is None else shared.scale

    def chunks() -> Iterator:
        if shared.method == "keep":
            yield from finite(key, ordered[shared.keep].checkpoint)
            return
        thresholds = []
        if shared.method == "ties" and dtype in FLOATS:
            for part in ordered:
                pairs = zip(finite(key, base), finite(key, part.checkpoint), strict=True)
                thresholds.append(threshold(pairs, shared.density, dtype))
        sources = (base, *(part.checkpoint for part in ordered))
        for anchor, *thetas in zip(*(finite(key, source) for source in sources), strict=True):
            if dtype not in FLOATS and any(theta != thetas[0] for theta in thetas):
                raise ArtifactError(f"{key} is {dtype} and differs between submodels: it has no average")
            if shared.method == "average" or all(theta == anchor for theta in thetas):
                yield average(anchor, thetas, weights, dtype)
            elif shared.method == "ties":
                yield ties(anchor, thetas, weights, thresholds, scale, dtype)
            else:
                yield task_arithmetic(anchor, thetas, scale, dtype)

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
