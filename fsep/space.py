"""One coordinate space for the weights of an expert, cut into slices for any number of ranks.

Shapes: E experts, H hidden width, F expert width, N ranks, P = 3FH values an expert, S values a slice.
An expert is its gate [F, H], up [F, H] and down [H, F] matrices, row-major, one after the other: coordinates 0..P.
Rank r owns coordinates [rS, (r+1)S) of every expert, S = ceil(P / N); what lies beyond P is padding and stays zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Interval(NamedTuple):
    """Coordinates ``start`` to ``stop``, ``stop`` excluded."""

    start: int
    stop: int

    def __and__(self, other: Interval) -> Interval:
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    @property
    def size(self) -> int:
        return self.stop - self.start


class Rows(NamedTuple):
    """A run of coordinates in one matrix: whole rows ``first`` to ``last`` hold it, from element ``skip`` on."""

    matrix: int
    first: int
    last: int
    skip: int
    into: Interval  # where the run lies in the space


@dataclass(frozen=True)
class ExpertSpace:
    """The coordinates of an expert of hidden width H and expert width F."""

    hidden: int
    width: int

    @property
    def size(self) -> int:
        """P."""
        return 3 * self.hidden * self.width

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of gate, up and down."""
        return ((self.width, self.hidden), (self.width, self.hidden), (self.hidden, self.width))

    def slice_size(self, ranks: int) -> int:
        """S."""
        return -(-self.size // ranks)

    def owned(self, rank: int, ranks: int) -> Interval:
        """What a rank owns, without padding."""
        size = self.slice_size(ranks)
        return Interval(rank * size, (rank + 1) * size) & Interval(0, self.size)

    def rows(self, interval: Interval) -> Iterator[Rows]:
        """The interval as runs of rows of matrices, to read or write it in a file of matrices."""
        start = 0
        for matrix, (rows, columns) in enumerate(self.matrices):
            part = interval & Interval(start, start + rows * columns)
            if part.size:
                first, skip = divmod(part.start - start, columns)
                yield Rows(matrix, first, -(-(part.stop - start) // columns), skip, part)
            start += rows * columns
