"""A training stage before it is started: what is trained when, and its operations and time."""

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

import bcd
from bcd.blocks import depths as depths_of
from bcd.config import read as read_bcd
from bcd.expansion import divide
from bcd.schedule import BlockSchedule
from disco.config import Optimizer
from disco.family import set_trainable
from disco.operations import step_flops, update_flops
from launch.estimate import communication_seconds, compute_seconds
from launch.hardware import Device

ITEM = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """One training stage: `rows` of `length` positions, `labels` of them with a label, on what and how."""

    name: str
    model: PretrainedConfig
    section: Optimizer
    rows: int
    labels: int
    length: int
    priced_as: str
    submodel: int | None = None
    trainable: str = "all"
    method: str = "adamw"  # or bcd
    blocks: dict[str, Any] | None = None  # settings of bcd
    seed: int = 0
    row_labels: np.ndarray | None = None  # of each row, where they are known

    @property
    def updates(self) -> int:
        return -(-self.rows // self.section.batch_size)

    @cached_property
    def shapes(self) -> torch.nn.Module:
        """The model without data, with what is trained marked."""
        return shapes_of(self.model, self.trainable)

    @property
    def alike(self) -> tuple:
        """Equal for stages that only their rows' order and name tell apart."""
        each = None if self.row_labels is None else self.row_labels.tobytes()
        return id(self.shapes), self.rows, self.labels, each, self.method, str(self.blocks), str(self.section)

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.shapes.parameters())

    @cached_property
    def turns(self) -> list[tuple[int, frozenset[str], frozenset[str], int]]:
        """Stretches of updates in order: how many, what is trained in them by name, what bcd's expansion updates
        besides, and the elements of both."""
        if self.method == "adamw":
            trained = {name: p.numel() for name, p in self.shapes.named_parameters() if p.requires_grad}
            return [(self.updates, frozenset(trained), frozenset(), sum(trained.values()))]
        settings = read_bcd({k: v for k, v in self.blocks.items() if k != "steps_per_block"})
        cut = bcd.partition(
            self.shapes,
            settings.granularity,
            always_on=settings.always_on,
            expert_groups=settings.expert_groups,
            max_block_gb=settings.max_block_gb,
            bytes_per_parameter=12 if self.section.precision == "fp32" else 14,
        )
        count, active = len(cut.blocks), min(settings.active_blocks, len(cut.blocks))
        order = "shuffled" if settings.order == "importance" else settings.order  # gradients are not known yet
        depths = [block.depth for block in cut.blocks]
        schedule = BlockSchedule(count, order, active=active, seed=self.seed, depths=depths)
        stay = stay_of(self, len(schedule.current_order), active)
        parameters = {name: p for name, p in self.shapes.named_parameters() if p.requires_grad}
        depth = depths_of(self.shapes, cut.layers)
        turns = []
        for begin in range(0, self.updates, stay):
            blocks, above = divide(cut, schedule.blocks, depth, parameters, settings)
            pieces = [*cut.always_on, *(piece for block in blocks for piece in block.pieces)]
            names = frozenset(piece.name for piece in pieces)
            size = sum(piece.numel for piece in pieces) + sum(parameters[name].numel() for name in above)
            turns.append((min(stay, self.updates - begin), names, frozenset(above), size))
            schedule.advance()
        return turns

    @cached_property
    def flops(self) -> int:
        """Operations of the stage, as the ledger counts them."""
        flops_of = cache(partial(step_flops, self.model, self.length, self.section))
        size, total, done = self.section.batch_size, 0, 0
        labels = self.row_labels
        if labels is None:
            labels = np.full(self.rows, self.labels // max(1, self.rows))
        for count, names, above, _ in self.turns:
            batches = Counter(tuple(labels[i * size : (i + 1) * size]) for i in range(done, done + count))
            total += sum(
                times * update_flops(flops_of, names, above, np.array(batch), self.section)
                for batch, times in batches.items()
            )
            done += count
        return total

    @cached_property
    def active(self) -> int:
        """Elements trained at once, on average over the updates."""
        return round(sum(count * size for count, *_, size in self.turns) / max(1, self.updates))

    def seconds(
        self, device: Device, *, devices: int, zero_stage: int | None, micro_batch: int, utilization: float
    ):
        """Wall time of the training steps alone: products at `utilization` of the peak, or the links, whichever
        takes longer (as if they overlapped entirely)."""
        section, item = self.section, ITEM[self.section.precision]
        links = communication_seconds(
            item * self.parameters,
            item * self.active,
            device,
            devices=devices,
            zero_stage=zero_stage,
            accumulation=max(1, -(-section.batch_size // (micro_batch * devices))),
        )
        computing = compute_seconds(self.flops, device, section.precision, devices=devices, utilization=utilization)
        return max(computing, self.updates * links)


def stay_of(training: Training, blocks: int, active: int) -> int:
    """steps_per_block: as set, or for whole cycles within the updates, no longer than bcd's default."""
    given = (training.blocks or {}).get("steps_per_block")
    if given is not None:
        return given
    visits, longest = -(-blocks // active), bcd.Config.model_fields["steps_per_block"].default
    cycles = max(1, -(-training.updates // (visits * longest)))
    return max(1, training.updates // (visits * cycles))


_shapes: dict[str, torch.nn.Module] = {}


def shapes_of(model: PretrainedConfig, trainable: str = "all") -> torch.nn.Module:
    """The model of a configuration without data, the same object for the same one."""
    key = json.dumps([model.to_dict(), trainable], sort_keys=True, default=str)
    if key not in _shapes:
        with torch.device("meta"):
            _shapes[key] = AutoModelForCausalLM.from_config(model)
        set_trainable(_shapes[key], trainable)
    return _shapes[key]


def like(training: Training, **changed: Any) -> Training:
    """The stage with something changed; what was worked out for it is worked out anew."""
    return replace(training, **changed)


def weights_of(model: PretrainedConfig) -> int:
    """Parameters of a model."""
    return sum(parameter.numel() for parameter in shapes_of(model).parameters())
