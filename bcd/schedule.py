"""Which blocks train when, and at what learning rate.

Both schedules count applied updates: a step that was skipped (overflow, not finite) moves neither.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence

ORDERS = ("ascending", "descending", "shuffled", "importance", "ends")
ENDS = (0, -1, -1)  # a cycle of the order "ends": 0 the lowest blocks, -1 the highest ones


class BlockSchedule:
    """Visits blocks 0 .. count - 1, each for exactly `steps_per_block` applied updates a cycle.

    Parameters
    ----------
    count
        Number of blocks.
    order
        ``ascending`` or ``descending`` in the order of the forward pass, ``shuffled`` anew each cycle, or
        ``importance``: each cycle is drawn without replacement with probability proportional to the
        gradient norms measured in earlier cycles (the first cycle is shuffled).
        ``ends``: only the lowest and the highest blocks, in turn; a cycle is lowest, highest, highest. Backward
        reaches down to the bottom in one update of three, and what lies between is left to the expansion.
    steps_per_block
        Applied updates a block stays active.
    depths
        Depth of each block, for ``ends``; the position in the list if not given.
    active
        Blocks that train at once: consecutive ones of the cycle's order, fewer at its end.
    seed
        Orders depend on the seed and the number of the cycle alone (and on the norms for importance).
    """

    def __init__(
        self,
        count: int,
        order: str = "ascending",
        steps_per_block: int = 50,
        *,
        active: int = 1,
        seed: int = 0,
        depths: Sequence[int] | None = None,
    ):
        if count < 1:
            raise ValueError("there is no block to schedule: the partition is empty")
        if order not in ORDERS:
            raise ValueError(f"order is {order!r}: use one of {', '.join(ORDERS)}")
        if steps_per_block < 1:
            raise ValueError(f"steps_per_block is {steps_per_block}: it must be at least 1")
        if not 1 <= active <= count:
            raise ValueError(f"active_blocks is {active} but there are {count} blocks: use 1 to {count}")
        self.count, self.order, self.steps_per_block = count, order, steps_per_block
        self.active, self.seed = active, seed
        self.depths = list(range(count)) if depths is None else list(depths)
        self.cycle = 0
        self.position = 0  # index of the first active block within the cycle's order
        self.inner_step = 0  # applied updates of the present active set
        self.norms: dict[int, float] = {}  # mean gradient norm of each block's last visit
        self._norm_sum = 0.0
        self.current_order = self._draw()

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indices of the blocks active now, lowest first."""
        return tuple(sorted(self.current_order[self.position : self.position + self.active]))

    @property
    def done(self) -> bool:
        """True once the active blocks had their updates: `advance` comes next."""
        return self.inner_step >= self.steps_per_block

    def record(self, gradient_norm: float) -> None:
        """Count one applied update of the active blocks and its gradient norm."""
        self.inner_step += 1
        self._norm_sum += gradient_norm

    def advance(self) -> None:
        """Go on to the next blocks of the cycle, or to the next cycle."""
        if self.inner_step:
            for block in self.blocks:
                self.norms[block] = self._norm_sum / self.inner_step
        self.position += self.active
        self.inner_step, self._norm_sum = 0, 0.0
        if self.position >= len(self.current_order):
            self.cycle, self.position = self.cycle + 1, 0
            self.current_order = self._draw()

    @property
    def upcoming(self) -> tuple[int, ...]:
        """Blocks that `advance` would make active now; the order by importance may still change them."""
        ahead = copy.copy(self)
        ahead.norms = dict(self.norms)
        ahead.advance()
        return ahead.blocks

    def _draw(self) -> list[int]:
        indices = list(range(self.count))
        rng = random.Random(f"{self.seed}-{self.cycle}")
        if self.order == "ends":
            ends = {0: min(self.depths), -1: max(self.depths)}
            indices = [i for end in ENDS for i in range(self.count) if self.depths[i] == ends[end]]
        elif self.order == "descending":
            indices.reverse()
        elif self.order == "importance" and len(self.norms) == self.count:
            # Exponential race (Efraimidis and Spirakis 2006): sorting u ** (1 / w) draws by weight without
            # replacement; the logarithm keeps small weights apart.
            keys = {i: math.log(1.0 - rng.random()) / max(self.norms[i], 1e-30) for i in indices}
            indices.sort(key=keys.__getitem__, reverse=True)
        elif self.order in ("shuffled", "importance"):
            rng.shuffle(indices)
        return indices

    def state_dict(self) -> dict:
        """Everything `load_state_dict` needs to go on in the middle of a block."""
        return {
            "settings": self._settings(),
            "cycle": self.cycle,
            "position": self.position,
            "inner_step": self.inner_step,
            "current_order": list(self.current_order),
            "norms": dict(self.norms),
            "norm_sum": self._norm_sum,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore `state_dict`; ValueError if it was written with other settings."""
        for key, value in self._settings().items():
            if state["settings"][key] != value:
                raise ValueError(
                    f"the checkpoint has {key}={state['settings'][key]!r} but the config says {value!r}: "
                    "resume with the setting of the checkpoint"
                )
        self.cycle, self.position, self.inner_step = state["cycle"], state["position"], state["inner_step"]
        self.current_order = list(state["current_order"])
        self.norms = dict(state["norms"])
        self._norm_sum = state["norm_sum"]

    def _settings(self) -> dict:
        return {
            "blocks": self.count,
            "order": self.order,
            "steps_per_block": self.steps_per_block,
            "active_blocks": self.active,
            "seed": self.seed,
        }


def learning_rate(
    step: int,
    inner_step: int,
    *,
    peak: float,
    schedule: str = "constant",
    warmup_steps: int = 0,
    total_steps: int | None = None,
    min_ratio: float = 0.0,
    switch_warmup: int = 0,
) -> float:
    """Learning rate of the update after `step` applied ones, `inner_step` of them since the last switch.

    Linear warm-up over `warmup_steps`, then ``constant``, or ``linear`` or ``cosine`` down to
    ``peak * min_ratio`` at `total_steps`; times a linear warm-up over `switch_warmup` updates after a switch.
    """
    rate = peak
    if step < warmup_steps:
        rate = peak * (step + 1) / warmup_steps
    elif schedule != "constant":
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        shape = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        rate = peak * (min_ratio + (1.0 - min_ratio) * shape)
    return rate * min(1.0, (inner_step + 1) / (switch_warmup + 1))
