"""Where each MoE architecture keeps its router, its experts and its shared part: one table entry a family.

Shapes: E experts, H hidden width, I expert width. The router's tensors have E rows; an expert is a set of
tensors, stored one by one on disk and stacked [E, ...] in memory (a few families stack them on disk too);
everything else, shared experts and dense layers included, is the shared part. A family that is not in the table
is refused, never guessed.
"""

import copy
import math
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

    `stacked` maps each tensor that holds all experts to the canonical per-expert tensors it is made of, in
    the order in which they follow each other along its second dimension.
    """

    model_type: str
    experts_key: str = "num_experts"
    top_k_key: str = "num_experts_per_tok"
    renormalize: str | bool = "norm_topk_prob"  # key of the config; a bool where the family leaves no choice
    groups: int = 0  # routing limited to groups of experts (n_group, topk_group): at least so many in each
    submodel: tuple[tuple[str, int | bool], ...] = ()  # what else the config of a model with one expert needs
    block: str = "mlp"
    block_on_disk: str = "mlp"
    stacked_on_disk: bool = False
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
        experts, rows, *columns = shape
        height = rows // len(parts)
        width = math.prod(columns)
        prefix = f"{found['layer']}.{self.block_on_disk}.experts"
        return [
            Piece(f"{prefix}.{e}.{part}", (e * rows + index * height) * width, (height, *columns))
            for e in range(experts)
            for index, part in enumerate(parts)
        ]


DEEPSEEK = {"experts_key": "n_routed_experts", "submodel": (("n_group", 1), ("topk_group", 1))}
FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="qwen2_moe"),
        Family(model_type="qwen3_moe"),
        Family(model_type="olmoe"),
        Family(model_type="flex_olmo"),
        Family(
            model_type="mixtral",
            experts_key="num_local_experts",
            renormalize=True,
            block_on_disk="block_sparse_moe",
            stacked=(("gate_up_proj", ("w1.weight", "w3.weight")), ("down_proj", ("w2.weight",))),
        ),
        Family(
            model_type="gpt_oss",
            experts_key="num_local_experts",
            renormalize=True,
            router="router",
            router_tensors=("weight", "bias"),
            stacked_on_disk=True,
            stacked=tuple(
                (name, (name,)) for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
            ),
        ),
        Family(model_type="deepseek_v2", renormalize=False, groups=1, **DEEPSEEK),
        Family(
            model_type="deepseek_v3",
            groups=2,  # a group's score is the sum of its two best experts
            router_tensors=("weight", "e_score_correction_bias"),
            **DEEPSEEK,
        ),
    )
}
# Dense families that can be upcycled: all of them is the shared part.
DENSE = {
    name: Family(model_type=name, stacked=(), router_tensors=())
    for name in ("llama", "mistral", "qwen2", "qwen3", "olmo2")
}
# Config key: experts that are there only because the router cannot do with one. They are last, are never chosen,
# belong to no cluster, and vanish in a merge.
STAND_INS = "stand_in_experts"


def family_of(config: PretrainedConfig) -> Family:
    """The table entry of a Hugging Face config. Raises ConfigError naming the model_type and those known."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type '{config.model_type}' is not a mixture-of-experts family known here: "
            f"known are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[config.model_type]


def layout_of(config: PretrainedConfig) -> Family:
    """As `family_of`, and dense families too."""
    return DENSE.get(config.model_type) or family_of(config)


def num_experts(config: PretrainedConfig) -> int:
    """Routed experts, without stand-ins."""
    return getattr(config, family_of(config).experts_key) - getattr(config, STAND_INS, 0)


def top_k(config: PretrainedConfig) -> int:
    return getattr(config, family_of(config).top_k_key)


def renormalizes(config: PretrainedConfig) -> bool:
    """Whether the weights of the chosen experts sum to one (before the family's scaling, if it has one)."""
    setting = family_of(config).renormalize
    return setting if isinstance(setting, bool) else getattr(config, setting)


def expert_weight(config: PretrainedConfig) -> float:
    """What the output of a lone expert is multiplied with: DeepSeek scales what it routes."""
    return getattr(config, "routed_scaling_factor", 1.0)


def with_experts(
    config: PretrainedConfig, experts: int, top_k: int, renormalize: bool | None = None
) -> PretrainedConfig:
    """A copy of `config` with another number of routed experts; `renormalize=None` keeps its own setting.

    Raises ConfigError where top_k does not fit, where experts cannot be grouped as the config says, or where
    the family leaves no choice of renormalising.
    """
    family = family_of(config)
    if top_k is None or not 1 <= top_k <= experts:
        raise ConfigError(
            f"{family.top_k_key} is {top_k} but the model has {experts} experts: set it to 1..{experts}"
        )
    fixed = isinstance(family.renormalize, bool)
    if fixed and renormalize not in (None, family.renormalize):
        habit = "always" if family.renormalize else "never"
        raise ConfigError(
            f"merge.renormalize is {str(renormalize).lower()} but {family.model_type} {habit} renormalises: "
            "leave it out"
        )
    config = copy.deepcopy(config)
    stand_ins = max(0, family.groups - 1) if experts == 1 else 0
    setattr(config, family.experts_key, experts + stand_ins)
    setattr(config, family.top_k_key, top_k)
    if stand_ins:
        setattr(config, STAND_INS, stand_ins)
    elif hasattr(config, STAND_INS):
        delattr(config, STAND_INS)
    if renormalize is not None and not fixed:
        setattr(config, family.renormalize, renormalize)
    if experts == 1:
        for key, value in family.submodel:
            setattr(config, key, value)
        if stand_ins:  # the weight of the only choice has to be one
            setattr(config, family.renormalize, True)
    elif family.groups:
        _check_groups(config, family, experts, top_k)
    return config


def _check_groups(config: PretrainedConfig, family: Family, experts: int, top_k: int) -> None:
    if getattr(config, "topk_method", "group_limited_greedy") != "group_limited_greedy":
        return  # DeepSeek V2 groups only by this method; V3 has no other
    groups, chosen = config.n_group or 0, config.topk_group or 0
    whole = 1 <= chosen <= groups and experts % groups == 0 and experts // groups >= family.groups
    if not whole or top_k > chosen * (experts // groups):
        raise ConfigError(
            f"n_group is {groups} and topk_group {chosen}, which does not fit {experts} experts of which "
            f"{top_k} are chosen: groups are equal, of at least {family.groups}, and the chosen ones hold "
            f"{top_k} or more: set n_group=1 and topk_group=1 to route without groups"
        )


def as_submodel(config: PretrainedConfig, experts: int, renormalize: bool | None = None) -> PretrainedConfig:
    """The config of a submodel with some of the model's experts: top-k in proportion, at least 1, no groups."""
    family = family_of(config)
    chosen = max(1, round(top_k(config) * experts / num_experts(config)))
    config = copy.deepcopy(config)
    for key, value in family.submodel:
        setattr(config, key, value)
    fixed = experts == 1 or isinstance(family.renormalize, bool)
    return with_experts(config, experts, chosen, None if fixed else renormalize)


def routed_like(config: PretrainedConfig, full: PretrainedConfig) -> PretrainedConfig:
    """`config` (of a model with fewer experts, perhaps) with the routing of `full`: experts, top-k, groups."""
    family = family_of(full)
    config = copy.deepcopy(config)
    for key, _ in family.submodel:
        setattr(config, key, getattr(full, key))
    renormalize = None if isinstance(family.renormalize, bool) else renormalizes(full)
    return with_experts(config, num_experts(full), top_k(full), renormalize)


def moe_blocks(model: torch.nn.Module) -> list[MoeBlock]:
    """Router and experts of each MoE layer, front to back; dense layers are left out, and so are dense models."""
    if not hasattr(model.config, "num_experts_per_tok"):
        return []
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
