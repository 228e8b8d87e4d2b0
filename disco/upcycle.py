"""A dense model to a Mixture-of-Experts of the class that is the same outside the feed-forward part, streamed.

Every expert begins from the dense feed-forward part, of F neurons (columns of the down-projection, rows of the
other two), as one of

- `copy`: whole (sparse upcycling, arXiv 2212.05055);
- `drop`: with a share of its neurons drawn anew, others in each expert, with the mean and standard deviation of the
  matrix (drop-upcycling, arXiv 2502.19261);
- `split`: the neurons dealt out at random among the experts, without overlap, outputs scaled by the number of
  experts (LLaMA-MoE, arXiv 2406.16554): with all experts active at equal weights the sum is the dense model.

Top-k weights sum to one, so that with identical experts (`copy` without noise) the logits are those of the dense
model whatever the router says, up to the rounding of the weighted sum: within 1e-5 of the largest logit in float32,
within 2e-2 in bfloat16. Shapes: R rows, C columns of a chunk, E experts, H hidden, F dense width.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from disco.checkpoint import Checkpoint, copy_side_files, write_model
from disco.config import ConfigError
from disco.family import FAMILIES, Family, with_experts
from disco.model_section import Upcycle
from disco.tensor_files import BYTES_OF, CHUNK_BYTES, NAME_OF, Output, Stored, as_bytes, as_tensor, seeded

FEED_FORWARD = re.compile(r"^(?P<layer>.*layers\.\d+)\.mlp\.(?P<part>gate|up|down)_proj\.weight$")
DROP = 0.5


@dataclass(frozen=True)
class Target:
    """The MoE class of a dense one. `needs`: values that the dense config must have, because the class has no
    place for others; `sets`: what the MoE config needs beside the keys that both have."""

    model_type: str
    width: str = "intermediate_size"
    needs: dict[str, Any] = field(default_factory=dict)
    sets: dict[str, Any] = field(default_factory=dict)


TARGETS = {
    "llama": Target("mixtral", needs={"attention_bias": False, "mlp_bias": False}, sets={"sliding_window": None}),
    "mistral": Target("mixtral"),
    "qwen2": Target(
        "qwen2_moe",
        width="moe_intermediate_size",
        needs={"use_sliding_window": False},
        sets={"qkv_bias": True, "shared_expert_intermediate_size": 0},
    ),
    "qwen3": Target("qwen3_moe", width="moe_intermediate_size", needs={"use_sliding_window": False}),
    "olmo2": Target("flex_olmo"),
}
# Dense families for which one might expect a target, and why there is none.
WITHOUT = {
    "olmo": "its layer norms have no weights, those of OLMoE have",
    "olmo3": "some of its layers attend within a window, those of FlexOlmo do not",
    "gemma": "no class has its scaled embeddings and norms with experts",
    "gpt_neox": "no class has its parallel attention and biases with experts",
}


def upcycled_config(dense: PretrainedConfig, section: Upcycle) -> PretrainedConfig:
    """Config of the MoE that a dense model becomes.

    Raises ConfigError, with the reason, for a family or a setting that no MoE class has, and for numbers that do
    not fit.
    """
    if dense.model_type not in TARGETS:
        reason = WITHOUT.get(dense.model_type, "it has no Mixture-of-Experts class that is the same otherwise")
        raise ConfigError(
            f"model.upcycle: model_type '{dense.model_type}' cannot be upcycled: {reason}: "
            f"one of {', '.join(sorted(TARGETS))} can"
        )
    target = TARGETS[dense.model_type]
    for key, value in target.needs.items():
        if (found := getattr(dense, key, value)) != value:
            raise ConfigError(
                f"model.upcycle: {dense.model_type} with {key} = {found} has no counterpart: "
                f"{target.model_type} is the same only where {key} = {value}"
            )
    width = dense.intermediate_size
    if section.method == "split":
        if width % section.experts:
            raise ConfigError(
                f"model.upcycle.experts is {section.experts}, which does not divide intermediate_size {width}: "
                "method split needs equal parts"
            )
        width //= section.experts
    family, config_class = FAMILIES[target.model_type], CONFIG_MAPPING[target.model_type]
    kept = {*config_class.__dataclass_fields__, "head_dim", "dtype"} - {"model_type", "transformers_version"}
    raw = {key: value for key, value in dense.to_dict().items() if key in kept and value is not None}
    raw |= {key: None for key in ("bos_token_id", "eos_token_id", "pad_token_id") if getattr(dense, key) is None}
    raw |= target.sets | {target.width: width}
    raw |= {family.experts_key: section.experts, family.top_k_key: section.top_k}
    raw |= {"architectures": [config_class.__name__.removesuffix("Config") + "ForCausalLM"]}
    renormalize = None if isinstance(family.renormalize, bool) else True
    return with_experts(config_class(**raw), section.experts, section.top_k, renormalize)


def identical_experts(section: Upcycle) -> bool:
    return section.method == "copy" and section.noise == 0


def upcycle(
    dense: Path,
    out: Path,
    section: Upcycle,
    *,
    seed: int,
    dtype: torch.dtype,
    single_expert: bool = False,
    max_shard_bytes: int = 2_000_000_000,
) -> None:
    """Write the MoE that the dense model in `dense` becomes to the folder `out`, in `dtype`.

    `single_expert`: a model with one expert, the dense model in the other class. Router rows are
    N(0, initializer_range), seeded. Raises ConfigError as `upcycled_config` does, and where a single expert is
    wanted of experts that differ; ArtifactError for a damaged checkpoint.
    """
    dense, out = Path(dense), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    source = Checkpoint.open(dense, dense=True)
    config = upcycled_config(source.config, section)
    config.dtype = dtype
    if single_expert:
        if not identical_experts(section):
            raise ConfigError("model.upcycle: experts that differ cannot begin as one: set seed_phase.model=full")
        config = with_experts(config, 1, 1)
    family = FAMILIES[config.model_type]
    experts = 1 if single_expert else section.experts
    moments = cache(Stored.moments)  # of a matrix, for all experts
    outputs = []
    for key, stored in source.tensors.items():
        if found := FEED_FORWARD.match(key):
            block = f"{found['layer']}.{family.block_on_disk}"
            name = _part_name(family, found["part"])
            for e in range(experts):
                expert = f"{block}.experts.{e}.{name}"
                place = (found["layer"], found["part"], e)
                outputs.append(_expert(expert, stored, moments, section, *place, seed, dtype))
            if found["part"] == "gate":
                outputs += _router(f"{block}.{family.router}.weight", config, experts, seed, dtype)
                if config.model_type == "qwen2_moe":
                    outputs += _no_shared_expert(block, config, dtype)
        else:
            outputs.append(Output.cast(key, stored, dtype))
    write_model(out, config, outputs, "the upcycled model", max_shard_bytes)
    copy_side_files(dense, out)


def _part_name(family: Family, part: str) -> str:
    (_, (gate, up)), (_, (down,)) = family.stacked
    return {"gate": gate, "up": up, "down": down}[part]


def _router(key: str, config: PretrainedConfig, experts: int, seed: int, dtype: torch.dtype) -> list[Output]:
    def chunks() -> Iterator:
        for e in range(experts):
            row_H = torch.randn(config.hidden_size, generator=seeded(seed, key, e)) * config.initializer_range
            yield as_bytes(row_H.to(dtype))

    return [Output(key, NAME_OF[dtype], (experts, config.hidden_size), chunks)]


def _no_shared_expert(block: str, config: PretrainedConfig, dtype: torch.dtype) -> list[Output]:
    """Qwen2Moe always has a shared expert: one of no width, whose output is 0, and its gate."""
    hidden = config.hidden_size
    shapes = {"gate_proj": (0, hidden), "up_proj": (0, hidden), "down_proj": (hidden, 0)}
    nothing = [
        Output(f"{block}.shared_expert.{name}.weight", NAME_OF[dtype], shape, lambda: ())
        for name, shape in shapes.items()
    ]
    gate_1H = torch.zeros(1, hidden, dtype=dtype)
    return [
        *nothing,
        Output(f"{block}.shared_expert_gate.weight", NAME_OF[dtype], (1, hidden), lambda: [as_bytes(gate_1H)]),
    ]


def _expert(
    key: str,
    stored: Stored,
    moments: Callable[[Stored], tuple[float, float]],
    section: Upcycle,
    layer: str,
    part: str,
    e: int,
    seed: int,
    dtype: torch.dtype,
) -> Output:
    """One matrix of expert `e`, made from the dense one chunk by chunk."""
    if identical_experts(section):
        return Output.cast(key, stored, dtype)
    down = part == "down"
    width = stored.shape[1] if down else stored.shape[0]
    shape = list(stored.shape)
    chosen = None
    if section.method == "split":
        size = width // section.experts
        shape[1 if down else 0] = size
        chosen = partial(_dealt, width, size, e, (seed, layer, "split"))
    elif section.method == "drop":
        share = DROP if section.drop is None else section.drop
        chosen = partial(_dealt, width, round(share * width), 0, (seed, layer, "drop", e))

    def chunks() -> Iterator:
        generator = seeded(seed, key, "values")
        mean, std = moments(stored)
        mask_F = None if chosen is None else chosen()
        row = 0
        for values_RC in _rows(stored):
            rows = len(values_RC)
            mask = mask_F if mask_F is None or down else mask_F[row : row + rows]
            row += rows
            if section.method == "drop":
                fresh_RC = torch.randn(values_RC.shape, generator=generator) * std + mean
                values_RC = torch.where(mask if down else mask[:, None], fresh_RC, values_RC)
            elif section.method == "split":
                values_RC = values_RC[:, mask] * section.experts if down else values_RC[mask]
            if section.noise:
                values_RC = values_RC + section.noise * std * torch.randn(values_RC.shape, generator=generator)
            yield as_bytes(values_RC.to(dtype))

    return Output(key, NAME_OF[dtype], tuple(shape), chunks)


def _dealt(width: int, size: int, hand: int, name: tuple) -> torch.Tensor:
    """bool [F]: hand number `hand` of `size` neurons, after a shuffle that depends on `name`."""
    mask_F = torch.zeros(width, dtype=torch.bool)
    mask_F[torch.randperm(width, generator=seeded(*name))[hand * size : (hand + 1) * size]] = True
    return mask_F


def _rows(stored: Stored) -> Iterator[torch.Tensor]:
    """The matrix in float32, some whole rows at a time."""
    width = stored.shape[1] * BYTES_OF[stored.dtype]
    for chunk in stored.chunks(max(1, CHUNK_BYTES // width) * width):
        yield as_tensor(chunk, stored.dtype).float().reshape(-1, stored.shape[1])
