"""Rebuilding experts from the slices of all ranks, and taking gradients back to them.

Shapes: E experts, N ranks, C slots, P copies, S values a slice.
One all-to-all a slot: slices arrive where they are used, [N, S] one after the other, without a second buffer.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fsep.layout import Layout
from fsep.link import Link, Pending


@dataclass(frozen=True)
class Slot:
    """What one slot of all ranks holds: experts [<= N] in the order of the ranks ``sent`` (1 or 0 slices each)."""

    experts: Tensor
    sent: list[int]
    received: list[int]


class Placement:
    """A layout in the form that the exchanges of rank ``rank`` need.

    ``filled`` is the number of this rank's slots that hold an expert; they come first.
    """

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        table_NC = layout.table
        N = layout.devices
        table_NC = table_NC[:, (table_NC >= 0).any(0)]
        self.layout = layout
        self.filled = int((table_NC[rank] >= 0).sum())
        self.slots = []
        for slot, experts_N in enumerate(table_NC.T):
            held = experts_N >= 0
            sent = held.astype(int).tolist()
            received = [int(slot < self.filled)] * N
            self.slots.append(Slot(torch.from_numpy(experts_N[held]).to(device), sent, received))
        # Gradients come back ordered by (slot, rank); they are added copy by copy of each expert, in rank order.
        experts_P = np.concatenate([experts_N[experts_N >= 0] for experts_N in table_NC.T])
        rank_P = np.concatenate([np.flatnonzero(experts_N >= 0) for experts_N in table_NC.T])
        order = np.lexsort((rank_P, experts_P))
        start_E = np.searchsorted(experts_P[order], np.arange(layout.experts))
        count_E = np.bincount(experts_P, minlength=layout.experts)
        self.rounds = []
        for nth in range(count_E.max()):
            experts = np.flatnonzero(count_E > nth)
            rows = order[start_E[experts] + nth]
            self.rounds.append((torch.from_numpy(experts).to(device), torch.from_numpy(rows).to(device)))


class Meter:
    """Elements alive now and at most."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, elements: int) -> None:
        self.now += elements
        self.peak = max(self.peak, self.now)


@dataclass
class _Rebuild:
    flat: Tensor  # [filled, N, S]
    pending: list[Pending]


class Rebuilder:
    """Rebuilt experts of the layers in flight, each started, taken and freed once."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.meter = Meter()
        self._flying: dict[Hashable, _Rebuild] = {}

    def start(self, key: Hashable, shard_ES: Tensor, placement: Placement, name: str) -> None:
        """Start to rebuild this rank's slots, unless that was done already; a collective call."""
        if key in self._flying:
            return
        N, S = self.link.size, shard_ES.shape[1]
        flat = shard_ES.new_empty((placement.filled, N, S))
        self.meter.add(flat.numel())
        pending = []
        for index, slot in enumerate(placement.slots):
            output = flat[index] if index < placement.filled else shard_ES.new_empty((0, S))
            slices = shard_ES.detach()[slot.experts]
            pending.append(self.link.exchange(output, slices, slot.received, slot.sent, f"unshard of {name}"))
        self._flying[key] = _Rebuild(flat, pending)

    def take(self, key: Hashable) -> Tensor:
        """The rebuilt experts [filled, N * S], waited for; ``free`` them after use or ``hold`` them."""
        rebuild = self._flying.pop(key)
        for pending in rebuild.pending:
            pending.wait()
        return rebuild.flat.flatten(1)

    def hold(self, key: Hashable, flat: Tensor) -> None:
        """Keep experts for a second ``take``."""
        self._flying[key] = _Rebuild(flat, [])

    def free(self, flat: Tensor) -> None:
        """Count experts as gone; the caller drops its reference."""
        self.meter.add(-flat.numel())

    def drop_all(self) -> None:
        """Wait for and forget what nobody took."""
        for key in list(self._flying):
            self.free(self.take(key))


class Resharding:
    """Gradients of one rank's rebuilt experts on their way to the ranks that own the slices."""

    def __init__(self, link: Link, meter: Meter, grads: Tensor, placement: Placement, name: str) -> None:
        """Start the exchange of ``grads`` [filled, N, S]; a collective call."""
        self._placement, self._meter, self._elements = placement, meter, grads.numel()
        S = grads.shape[2]
        self._received = grads.new_empty((sum(len(slot.experts) for slot in placement.slots), S))
        outputs = self._received.split([len(slot.experts) for slot in placement.slots])
        self._pending = []
        for index, (slot, output) in enumerate(zip(placement.slots, outputs, strict=True)):
            slices = grads[index] if index < placement.filled else grads.new_empty((0, S))
            self._pending.append(link.exchange(output, slices, slot.sent, slot.received, f"reshard of {name}"))

    def finish(self) -> Tensor:
        """[E, S] fp32: the copies' gradients summed, for each expert from the lowest rank to the highest."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        self._meter.add(-self._elements)
        (_, rows), *rest = self._placement.rounds
        total_ES = self._received[rows].float()
        for experts, rows in rest:
            total_ES[experts] = total_ES[experts] + self._received[rows].float()
        return total_ES
