"""Where each MoE architecture keeps its router, its experts and its shared part: one table entry a family.

Shapes: E experts, H hidden width, I expert width. The router's tensors have E rows; an expert is a set of
matrices, stored one by one on disk (canonical) and stacked [E, ...] in memory; everything else, shared experts and
dense layers included, is the shared part. A family that is not in the table is refused, never guessed.
"""

import copy
import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from disco.config import ConfigError


class Role(NamedTuple):
    """What a canonical key holds. `template` has `{e}` in place of the expert's index, if there is one."""

    kind: str  # "shared", "router" or "expert"
    template: str
    expert: int | None


class Piece(NamedTuple):
    """A canonical tensor inside a stored one: `count` elements from element `start` on, row-major."""

    key: str
    start: int
    shape: tuple[int, ...]


class MoeBlock(NamedTuple):
    layer: int
    router: torch.nn.Module
    experts: torch.nn.Module


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names of one architecture. The defaults are Qwen2Moe's, which most families share.

    `stacked` maps each tensor that holds all experts to the canonical per-expert matrices it is made of, in
    the order in which they follow each other along its second dimension.
    """

    model_type: str
    experts_key: str = "num_experts"
    top_k_key: str = "num_experts_per_tok"
    renormalize_key: str | None = "norm_topk_prob"  # None: top-k weights are always renormalised
    block: str = "mlp"
    block_on_disk: str = "mlp"
    router: str = "gate"
    router_tensors: tuple[str, ...] = ("weight",)
    stacked: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("gate_up_proj", ("gate_proj.weight", "up_proj.weight")),
        ("down_proj", ("down_proj.weight",)),
    )

    @cached_property
    def _patterns(self) -> tuple[re.Pattern, re.Pattern, re.Pattern]:
        block = rf"^(?P<layer>(?:.*\.)?layers\.\d+)\.(?:{self.block}|{self.block_on_disk})"
        tensors = "|".join(map(re.escape, self.router_tensors))
        parts = "|".join(re.escape(part) for _, split in self.stacked for part in split)
        stacks = "|".join(re.escape(name) for name, _ in self.stacked)
        return (
            re.compile(rf"{block}\.{self.router}\.(?P<tensor>{tensors})$"),
            re.compile(rf"{block}\.experts\.(?P<expert>\d+)\.(?P<part>{parts})$"),
            re.compile(rf"{block}\.experts\.(?P<stack>{stacks})$"),
        )

    def role(self, key: str) -> Role:
        """Role of a canonical key, or of a stored one that is not stacked."""
        router, expert, _ = self._patterns
        if found := router.match(key):
            name = f"{found['layer']}.{self.block_on_disk}.{self.router}.{found['tensor']}"
            return Role("router", name, None)
        if found := expert.match(key):
            template = f"{found['layer']}.{self.block_on_disk}.experts.{{e}}.{found['part']}"
            return Role("expert", template, int(found["expert"]))
        return Role("shared", key, None)

    def pieces(self, key: str, shape: tuple[int, ...]) -> list[Piece]:
        """Canonical tensors that the stored tensor `key` consists of (itself, unless it stacks experts)."""
        found = self._patterns[2].match(key)
        if not found:
            role = self.role(key)
            return [Piece(role.template.format(e=role.expert), 0, tuple(shape))]
        parts = dict(self.stacked)[found["stack"]]
        experts, rows, columns = shape
        height = rows // len(parts)
        prefix = f"{found['layer']}.{self.block_on_disk}.experts"
        return [
            Piece(f"{prefix}.{e}.{part}", (e * rows + index * height) * columns, (height, columns))
            for e in range(experts)
            for index, part in enumerate(parts)
        ]


FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="qwen2_moe"),
        Family(model_type="olmoe"),
        Family(
            model_type="mixtral",
            experts_key="num_local_experts",
            renormalize_key=None,
            block_on_disk="block_sparse_moe",
            stacked=(("gate_up_proj", ("w1.weight", "w3.weight")), ("down_proj", ("w2.weight",))),
        ),
    )
}


def family_of(config: PretrainedConfig) -> Family:
    """The table entry of a Hugging Face config. Raises ConfigError naming the model_type and those known."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type '{config.model_type}' is not a mixture-of-experts family known here: "
            f"known are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[config.model_type]


def num_experts(config: PretrainedConfig) -> int:
    return getattr(config, family_of(config).experts_key)


def top_k(config: PretrainedConfig) -> int:
    return getattr(config, family_of(config).top_k_key)


def renormalizes(config: PretrainedConfig) -> bool:
    """Whether the weights of the chosen experts sum to one."""
    key = family_of(config).renormalize_key
    return True if key is None else getattr(config, key)


def with_experts(
    config: PretrainedConfig, experts: int, top_k: int, renormalize: bool | None = None
) -> PretrainedConfig:
    """A copy of `config` with another number of routed experts; `renormalize=None` keeps its own setting.

    Raises ConfigError where top_k does not fit, or where the family cannot do without renormalising.
    """
    family = family_of(config)
    if not 1 <= top_k <= experts:
        raise ConfigError(
            f"{family.top_k_key} is {top_k} but the model has {experts} experts: set it to 1..{experts}"
        )
    if renormalize is False and family.renormalize_key is None:
        raise ConfigError(f"merge.renormalize is false but {family.model_type} always renormalises: leave it out")
    config = copy.deepcopy(config)
    setattr(config, family.experts_key, experts)
    setattr(config, family.top_k_key, top_k)
    if renormalize is not None and family.renormalize_key is not None:
        setattr(config, family.renormalize_key, renormalize)
    return config


def moe_blocks(model: torch.nn.Module) -> list[MoeBlock]:
    """Router and experts of each MoE layer, front to back; dense layers are left out."""
    family = family_of(model.config)
    name_of_block = re.compile(rf"(?:.*\.)?layers\.(\d+)\.{family.block}")
    blocks = []
    for name, module in model.named_modules():
        found = name_of_block.fullmatch(name)
        if found and hasattr(module, "experts"):
            blocks.append(MoeBlock(int(found[1]), getattr(module, family.router), module.experts))
    return blocks


def router_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for block in moe_blocks(model) for parameter in block.router.parameters()]


def expert_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for block in moe_blocks(model) for parameter in block.experts.parameters()]


def set_trainable(model: torch.nn.Module, what: str) -> None:
    """Freeze all but `what`: all, experts (a submodel's router has no gradient anyway) or router."""
    if what == "all":
        return
    chosen = expert_parameters(model) if what == "experts" else router_parameters(model)
    model.requires_grad_(False)
    for parameter in chosen:
        parameter.requires_grad_(True)
