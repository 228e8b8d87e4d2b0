"""Block coordinate descent in a training stage: which blocks there are and how long each stays active."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

import bcd
from disco.config import BlockDescent, ConfigError, Optimizer
from disco.family import set_trainable

DEFAULT_STAY = bcd.Config.model_fields["steps_per_block"].default


def blocks_of(
    settings: BlockDescent, section: Optimizer, model: PretrainedConfig, trainable: str = "all"
) -> bcd.Partition:
    """The blocks of a model, from its config alone. Raises ConfigError for settings that do not suit it."""
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(model)
    set_trainable(shapes, trainable)
    try:
        cut = bcd.partition(
            shapes,
            settings.granularity,
            always_on=settings.always_on,
            expert_groups=settings.expert_groups,
            max_block_gb=settings.max_block_gb,
            bytes_per_parameter=12 if section.precision == "fp32" else 14,
        )
    except ValueError as error:
        raise ConfigError(f"bcd: {error}") from None
    if settings.active_blocks > len(cut.blocks):
        raise ConfigError(
            f"bcd.active_blocks is {settings.active_blocks} but there are {len(cut.blocks)} blocks: "
            f"set it to 1 to {len(cut.blocks)}"
        )
    head = next(name for name, p in shapes.named_parameters() if p is shapes.get_output_embeddings().weight)
    if section.zero_stage == 3 and any(p.rows and p.name == head for block in cut.blocks for p in block.pieces):
        raise ConfigError(
            f"bcd.max_block_gb is {settings.max_block_gb}, which cuts {head} by rows; with zero_stage 3 that "
            "cannot be: set zero_stage=2, or raise bcd.max_block_gb"
        )
    if section.zero_stage == 3 and settings.expansion is not None:
        raise ConfigError(
            "bcd.expansion is set with zero_stage 3, under which a rank holds whole weights only while their layer "
            "computes: set zero_stage=2, or drop bcd.expansion"
        )
    return cut


def turns_of(settings: BlockDescent, cut: bcd.Partition) -> int:
    """Turns of a cycle over the blocks."""
    active = min(settings.active_blocks, len(cut.blocks))
    depths = [block.depth for block in cut.blocks]
    order = bcd.BlockSchedule(len(cut.blocks), settings.order, active=active, depths=depths).current_order
    return -(-len(order) // active)


def with_stay(
    settings: BlockDescent,
    section: Optimizer,
    model: PretrainedConfig,
    updates: int,
    *,
    place: str,
    trainable: str = "all",
) -> BlockDescent:
    """`settings` with a steps_per_block that lets every block train within `updates` updates.

    Absent, it becomes the largest that is no more than the default of `bcd.Config` and makes whole cycles of
    (nearly) all updates. Raises ConfigError naming `place` where not even one cycle fits.
    """
    cut = blocks_of(settings, section, model, trainable)
    blocks, visits = len(cut.blocks), turns_of(settings, cut)
    stay = settings.steps_per_block
    if updates < visits * (stay or 1):
        remedy = f"bcd.active_blocks={-(-blocks // max(1, updates))}" if stay is None else "no bcd.steps_per_block"
        if settings.order == "ends" and stay is None:
            remedy = "another bcd.order"
        if stay is not None and updates >= visits:
            remedy = f"bcd.steps_per_block={updates // visits}"
        raise ConfigError(
            f"{place} makes {updates} updates but one cycle over {blocks} blocks takes {visits * (stay or 1)} "
            f"({visits} turns of {stay or 1}), so some would never train: give it more tokens, a smaller "
            f"batch_size, or set {remedy}"
        )
    if stay is None:
        cycles = -(-updates // (visits * DEFAULT_STAY))
        stay = updates // (visits * cycles)
    return settings.model_copy(update={"steps_per_block": stay})


def engine_config(settings: BlockDescent, section: Optimizer, model: torch.nn.Module, seed: int) -> dict[str, Any]:
    """`bcd.Config` of a stage for the module that is trained, whose child `model` is the Hugging Face model.

    Weight decay touches matrices only. The learning rate follows the trainer, which writes it at each update.
    """
    granularity = settings.granularity
    if not isinstance(granularity, str):
        named = granularity if isinstance(granularity, dict) else {pattern: (pattern,) for pattern in granularity}
        granularity = {name: _below(patterns) for name, patterns in named.items()}
    return settings.settings | {
        "granularity": granularity,
        "always_on": _below(settings.always_on),
        "lr": section.learning_rate,
        "betas": section.betas,
        "weight_decay": section.weight_decay,
        "no_decay": tuple(name for name, parameter in model.named_parameters() if parameter.dim() < 2),
        "seed": seed,
        "fused": section.zero_stage == 0 and section.precision == "fp32",
    }


def _below(patterns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"model.{pattern}" for pattern in patterns)
