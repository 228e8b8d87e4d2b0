"""Devices, the nodes they stand in, and how fast they compute and talk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

# name: (devices a node, Gbit/s a device inside the node, Gbit/s a device to other nodes, dense bf16 TFLOP/s).
# One direction, vendor's peak figures.
HARDWARE: dict[str, tuple[int, float, float, float]] = {
    "a100": (8, 2400.0, 200.0, 312.0),
    "h100": (8, 3600.0, 400.0, 989.0),
    "h200": (8, 3600.0, 400.0, 989.0),
    "b200": (8, 7200.0, 400.0, 2250.0),
    "4090": (8, 200.0, 12.5, 165.0),
    "v100": (8, 1200.0, 25.0, 125.0),
}


@dataclass(frozen=True)
class Topology:
    """A cluster as the cost model sees it.

    Args:
        devices: number of devices N.
        devices_per_node: an int (the last node holds what is left when it does not divide ``devices``), or the
            size of every node, in order.
        intra_gbps: Gbit/s of one device to the devices of its own node, each direction.
        inter_gbps: Gbit/s of one device to other nodes, each direction.
        tokens_per_second: expert tokens one device computes in a second, forward only.
        bytes_per_token: bytes of one token's hidden state on the wire.

    The defaults are A100s running Mixtral-8x7B's expert (hidden 4096, width 14336, bf16) at half their peak.

    Raises:
        ValueError: a size or a rate that is not positive and finite, or node sizes that do not add up.
    """

    devices: int
    devices_per_node: int | Sequence[int] = 8
    intra_gbps: float = 2400.0
    inter_gbps: float = 200.0
    tokens_per_second: float = 443_000.0
    bytes_per_token: float = 8192.0

    def __post_init__(self) -> None:
        if not _is_positive_int(self.devices):
            raise ValueError(f"topology.devices is {self.devices!r}: give a whole number of at least 1")
        sizes = self.devices_per_node
        if isinstance(sizes, (int, np.integer)):
            if not _is_positive_int(sizes):
                raise ValueError(f"topology.devices_per_node is {sizes!r}: give a whole number of at least 1")
            object.__setattr__(self, "devices_per_node", int(sizes))
        else:
            sizes = tuple(sizes)
            if not sizes or not all(_is_positive_int(n) for n in sizes):
                raise ValueError(f"topology.devices_per_node is {sizes!r}: give every node at least one device")
            if sum(sizes) != self.devices:
                raise ValueError(
                    f"topology.devices_per_node adds up to {sum(sizes)} but topology.devices is {self.devices}: "
                    "make them agree"
                )
            object.__setattr__(self, "devices_per_node", tuple(int(n) for n in sizes))
        object.__setattr__(self, "devices", int(self.devices))
        for name in ("intra_gbps", "inter_gbps", "tokens_per_second", "bytes_per_token"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"topology.{name} is {value!r}: give a positive, finite number")

    @classmethod
    def from_hardware(
        cls,
        name: str,
        devices: int,
        *,
        devices_per_node: int | Sequence[int] | None = None,
        hidden: int = 4096,
        expert_width: int = 14336,
        bytes_per_value: int = 2,
        utilisation: float = 0.5,
    ) -> Topology:
        """A topology of ``devices`` cards of ``HARDWARE[name]``.

        A gated expert costs ``6 * hidden * expert_width`` FLOPs a token forward; ``utilisation`` is the share of
        the peak that expert compute reaches.

        Raises:
            ValueError: an unknown name, or sizes that are not positive.
        """
        if name.lower() not in HARDWARE:
            raise ValueError(f"hardware is {name!r}: choose one of {', '.join(sorted(HARDWARE))}")
        if min(hidden, expert_width, bytes_per_value) < 1 or not 0 < utilisation <= 1:
            raise ValueError(
                f"hidden={hidden}, expert_width={expert_width}, bytes_per_value={bytes_per_value}, "
                f"utilisation={utilisation}: sizes must be at least 1 and utilisation in (0, 1]"
            )
        per_node, intra, inter, tflops = HARDWARE[name.lower()]
        return cls(
            devices=devices,
            devices_per_node=per_node if devices_per_node is None else devices_per_node,
            intra_gbps=intra,
            inter_gbps=inter,
            tokens_per_second=tflops * 1e12 * utilisation / (6 * hidden * expert_width),
            bytes_per_token=hidden * bytes_per_value,
        )

    @cached_property
    def node_sizes(self) -> np.ndarray:
        """Devices in each node, [G] int64."""
        if isinstance(self.devices_per_node, tuple):
            return np.array(self.devices_per_node, np.int64)
        full, rest = divmod(self.devices, self.devices_per_node)
        return np.array([self.devices_per_node] * full + [rest] * (rest > 0), np.int64)

    @cached_property
    def node_start(self) -> np.ndarray:
        """First device of each node and, last, the number of devices, [G + 1] int64."""
        return np.concatenate([[0], np.cumsum(self.node_sizes)]).astype(np.int64)

    @cached_property
    def node_of(self) -> np.ndarray:
        """Node of each device, [N] int64; a node's devices are consecutive."""
        return np.repeat(np.arange(len(self.node_sizes)), self.node_sizes).astype(np.int64)

    @property
    def nodes(self) -> int:
        """Number of nodes G."""
        return len(self.node_sizes)

    @cached_property
    def seconds(self) -> np.ndarray:
        """Seconds of a training step for one token: [compute, intra-node link, inter-node link].

        Compute counts the forward pass once and the backward pass twice; a link is crossed four times, by dispatch
        and combine, forward and backward.
        """
        on_wire = 4 * self.bytes_per_token * 8 / 1e9
        return np.array([3 / self.tokens_per_second, on_wire / self.intra_gbps, on_wire / self.inter_gbps])


def _is_positive_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 1
