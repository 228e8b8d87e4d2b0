"""What the sharded layers of one model share: layouts, links, rebuilt experts, records.

Shapes: L layers, N ranks, E experts, P copies.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fsep.layout import Layout
from fsep.link import Link
from fsep.topology import Topology
from fsep.weights import Meter, Placement, Rebuilder, Resharding

if TYPE_CHECKING:
    from fsep.experts import ShardedExperts


class LayoutSource(Protocol):
    """What ``attach`` takes as planner: ``fsep.Planner`` is one.

    Ranks must read equal ``layouts``, one a layer, at equal times; they may change whenever ``observe`` was called.
    """

    layouts: Sequence[Layout]

    def observe(self, load: np.ndarray) -> object:
        """Take in this rank's [L, E] tokens of the last training micro-batch; called on all ranks."""


class FixedLayouts:
    """Layouts, one a layer, that never change."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layouts = list(layouts)

    def observe(self, load: np.ndarray) -> None:
        """Loads change nothing."""


class Record(NamedTuple):
    """One layer in one micro-batch."""

    load_NE: np.ndarray
    tokens_NP: np.ndarray
    layout: Layout
    route_s: float


class Ticket:
    """Leads the gradient of one layer's experts to its parameter."""

    resharding: Resharding | None = None


class Arrival(torch.autograd.Function):
    """Turns a shard and a ticket into a token [] that stands for the experts in autograd.

    The parameter's gradient is waited for when backward comes to the token's node: autograd runs nodes in the
    reverse order of their making, so the earlier a token is made the longer its exchange may take unnoticed.
    """

    @staticmethod
    def forward(ctx, shard_ES: Tensor, ticket: Ticket) -> Tensor:
        ctx.ticket, ctx.dtype = ticket, shard_ES.dtype
        return shard_ES.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _: Tensor):
        resharding, ctx.ticket.resharding = ctx.ticket.resharding, None
        return resharding.finish().to(ctx.dtype), None


class Pass:
    """One forward pass of the model and its backward, under one set of layouts.

    ``open`` counts the layers that were computed and whose backward has yet to come.
    """

    def __init__(self, run: Runtime, version: int, layouts: list[Layout], placements: list[Placement]) -> None:
        self.version, self.layouts, self.placements = version, layouts, placements
        self.open = 0
        self._shards = [layer.shard for layer in run.layers]
        self._tickets: dict[int, tuple[Tensor, Ticket]] = {}

    def key(self, index: int) -> tuple[int, int]:
        return index, self.version

    def prepare(self, index: int) -> None:
        """Make the token of a layer that is yet to come, unless it is frozen or there is none."""
        if index < len(self._shards) and self._shards[index].requires_grad and index not in self._tickets:
            ticket = Ticket()
            self._tickets[index] = Arrival.apply(self._shards[index], ticket), ticket

    def take_ticket(self, index: int) -> tuple[Tensor | None, Ticket | None]:
        """The layer's token and ticket, for good; None for a frozen layer."""
        self.prepare(index)
        return self._tickets.pop(index, (None, None))


class Runtime:
    """State of one attached model; see ``fsep.attach`` for the arguments."""

    def __init__(
        self,
        model: nn.Module,
        planner: LayoutSource,
        topology: Topology,
        slots: int,
        *,
        prefetch: int,
        delay_reshard: bool,
        timeout_s: float,
    ) -> None:
        self.model = model  # the Hugging Face model, whatever wraps it
        self.planner, self.topology, self.slots = planner, topology, slots
        self.prefetch_layers, self.delay_reshard = prefetch, delay_reshard
        self.tokens, self.weights = Link(timeout_s), Link(timeout_s)
        self.rebuilder = Rebuilder(self.weights)
        self.gradients = Meter()
        self.layers: list[ShardedExperts] = []
        self.records: dict[int, Record] = {}
        self._loads: dict[int, np.ndarray] = {}
        self.current: Pass | None = None
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()  # gone with the graph that holds them
        self._digest: Tensor | None = None

    def begin(self, training: bool) -> None:
        """A forward pass begins: tell the planner of the last one, read its layouts."""
        self.rebuilder.drop_all()
        if training and len(self._loads) == len(self.layers):
            self.planner.observe(np.stack([self._loads[index] for index in range(len(self.layers))]))
        self._loads.clear()
        layouts, before = list(self.planner.layouts), self.current
        if any(other.open for other in self._passes):
            layouts = before.layouts  # a checkpointed layer may yet be recomputed, and has to be as it was
        if before is not None and list(map(id, layouts)) == list(map(id, before.layouts)):
            self._enter(Pass(self, before.version, layouts, before.placements))
            return
        self._check_layouts(layouts)
        known = {} if before is None else dict(zip(map(id, before.layouts), before.placements, strict=True))
        device = self.layers[0].shard.device
        placements = []
        for layout in layouts:
            if id(layout) not in known:
                known[id(layout)] = Placement(layout, self.weights.rank, device)
            placements.append(known[id(layout)])
        digest = hashlib.blake2b(b"".join(layout.digest() for layout in layouts), digest_size=8).digest()
        self._digest = torch.from_numpy(np.frombuffer(digest, np.int64).copy()).to(device)
        self._enter(Pass(self, 0 if before is None else before.version + 1, layouts, placements))

    def _enter(self, step: Pass) -> None:
        self.current = step
        self._passes.add(step)

    def gather_load(self, layer: ShardedExperts, chosen_TK: Tensor, step: Pass) -> np.ndarray:
        """[N, E] int64, equal on all ranks. The first layer also compares the ranks' layouts.

        Raises:
            RuntimeError: layouts differ; nothing of theirs has been exchanged yet.
        """
        E = layer.num_experts
        counts = torch.bincount(chosen_TK.flatten(), minlength=E)
        gathered = self.tokens.gather(torch.cat([counts, self._digest]), f"load of {layer.name}")
        if layer.index == 0 and (gathered[:, E] != gathered[0, E]).any():
            raise RuntimeError(
                f"the planners of ranks 0 and {int((gathered[:, E] != gathered[0, E]).argmax())} give different "
                "layouts: a planner must be deterministic and see the same loads on all ranks"
            )
        return gathered[:, :E]

    def start(self, step: Pass, index: int) -> None:
        """Start to rebuild a layer's experts, unless that is under way."""
        layer = self.layers[index]
        self.rebuilder.start(step.key(index), layer.shard, step.placements[index], layer.name)

    def prefetch(self, step: Pass, index: int, direction: int) -> None:
        """Start the layers that come next in ``direction``."""
        for ahead in range(1, self.prefetch_layers + 1):
            if 0 <= index + direction * ahead < len(self.layers):
                self.start(step, index + direction * ahead)

    def record(self, index: int, load_NE: np.ndarray, tokens_NP: np.ndarray, layout: Layout, route_s: float):
        """Keep what the planner and ``fsep.stats`` ask for."""
        self.records[index] = Record(load_NE, tokens_NP, layout, route_s)
        self._loads[index] = load_NE[self.tokens.rank]

    def _check_layouts(self, layouts: list[Layout]) -> None:
        N, L = self.tokens.size, len(self.layers)
        if len(layouts) != L:
            raise ValueError(f"the planner gives {len(layouts)} layouts but the model has {L} MoE layers")
        for layer, layout in zip(self.layers, layouts, strict=True):
            if (layout.experts, layout.devices) != (layer.num_experts, N) or layout.slots > self.slots:
                raise ValueError(
                    f"the planner's layout of {layer.name} is for {layout.experts} experts on {layout.devices} "
                    f"devices with {layout.slots} slots: the model has {layer.num_experts} experts on {N} ranks "
                    f"with {self.slots} slots"
                )
