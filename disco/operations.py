"""Operations of an update by formula, as the ledger counts them and a plan foresees them."""

import functools
from collections.abc import Callable

import numpy as np

from disco.config import Optimizer
from launch.flops import training_flops


def update_flops(
    flops_of: Callable, trained: frozenset[str], above: frozenset[str], labels: np.ndarray, section: Optimizer
) -> int:
    """Operations of an update over rows of so many `labels`; `above` has gradients in the last micro-batch."""
    last = len(labels)
    parts = np.array_split(labels, section.accumulation * section.processes)
    if above:
        last = sum(map(len, parts[: -section.processes]))
    total = 0
    for names, part in ((trained, labels[:last]), (trained | above, labels[last:])):
        per_row, per_label = flops_of(names)
        total += len(part) * per_row + int(part.sum()) * per_label
    return total


def step_flops(config, length: int, section: Optimizer, trained: frozenset[str]) -> tuple[int, int]:
    """Operations of training a row of `length` positions without its labels, and of each label."""
    flops_of = functools.partial(
        training_flops, config, length, trainable=trained, activation_checkpointing=section.activation_checkpointing
    )
    return flops_of(labels=0), flops_of(labels=1) - flops_of(labels=0)
