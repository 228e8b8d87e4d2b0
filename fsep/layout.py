"""Which device holds which experts.

Shapes: E experts, N devices, C slots a device, P copies (expert, device) in all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np


class Copies(NamedTuple):
    """The copies of a layout as flat arrays, ordered by expert and then by device (all int64).

    ``expert`` and ``device`` have shape [P]; copies of expert e are ``start[e]:start[e + 1]`` ([E + 1]); copies on
    device j are ``on_device[device_start[j]:device_start[j + 1]]`` ([P], [N + 1]).
    """

    expert: np.ndarray
    device: np.ndarray
    start: np.ndarray
    on_device: np.ndarray
    device_start: np.ndarray


@dataclass(frozen=True, eq=False)
class Layout:
    """A placement of experts.

    Args:
        replicas: [E, N] of 0 and 1; ``replicas[e, j]`` says whether device j holds expert e.
        slots: C, the most experts a device may hold.

    Raises:
        ValueError: another shape or another value, an expert without a copy, or a device with more than C.
    """

    replicas: np.ndarray
    slots: int

    def __post_init__(self) -> None:
        replicas = np.asarray(self.replicas)
        if replicas.ndim != 2 or 0 in replicas.shape:
            raise ValueError(f"layout.replicas has shape {replicas.shape}: give [experts, devices]")
        if not np.isin(replicas, (0, 1)).all():
            raise ValueError("layout.replicas holds values other than 0 and 1: a device holds an expert once")
        replicas = replicas.astype(np.uint8)
        homeless = np.flatnonzero(replicas.sum(1) == 0)
        if homeless.size:
            raise ValueError(f"layout.replicas gives expert {homeless[0]} no device: place every expert")
        held = replicas.sum(0, dtype=np.int64)
        if held.max() > self.slots:
            raise ValueError(
                f"layout.replicas puts {held.max()} experts on device {held.argmax()} but slots is {self.slots}"
            )
        replicas.setflags(write=False)
        object.__setattr__(self, "replicas", replicas)

    @classmethod
    def from_table(cls, table: np.ndarray, experts: int, slots: int | None = None) -> Layout:
        """The layout of a placement table [N, C] of expert numbers, -1 for an empty slot."""
        table = np.asarray(table)
        replicas = np.zeros((experts, table.shape[0]), np.uint8)
        device, slot = np.nonzero(table >= 0)
        replicas[table[device, slot], device] = 1
        return cls(replicas, table.shape[1] if slots is None else slots)

    @property
    def experts(self) -> int:
        return self.replicas.shape[0]

    @property
    def devices(self) -> int:
        return self.replicas.shape[1]

    @cached_property
    def copies(self) -> Copies:
        """The layout as flat arrays, see ``Copies``."""
        expert, device = (x.astype(np.int64) for x in np.nonzero(self.replicas))
        start = np.searchsorted(expert, np.arange(self.experts + 1))
        on_device = np.argsort(device, kind="stable")
        device_start = np.searchsorted(device[on_device], np.arange(self.devices + 1))
        return Copies(expert, device, start, on_device, device_start)

    @cached_property
    def table(self) -> np.ndarray:
        """[N, C] int64: the experts of each device in ascending order, then -1 for empty slots."""
        table = np.full((self.devices, self.slots), -1, np.int64)
        copies = self.copies
        rank = np.arange(len(copies.expert)) - np.repeat(copies.device_start[:-1], np.diff(copies.device_start))
        table[copies.device[copies.on_device], rank] = copies.expert[copies.on_device]
        return table

    def digest(self) -> bytes:
        """Sixteen bytes that differ where layouts differ, for ranks to compare."""
        shape = np.array([*self.replicas.shape, self.slots], np.int64).tobytes()
        return hashlib.blake2b(shape + np.packbits(self.replicas).tobytes(), digest_size=16).digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.slots == other.slots and np.array_equal(self.replicas, other.replicas)
