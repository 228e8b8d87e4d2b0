"""Collectives of one process group, with a time limit, counted traffic and errors that say what failed."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


class RankError(RuntimeError):
    """A collective that did not complete: another rank has died, left or fallen out of step."""


class Link:
    """A process group of all ranks of its own, so that its collectives never queue behind others.

    Making one is a collective call. ``sent`` counts the bytes this rank has sent to other ranks, by the first word
    of what they were for.

    Args:
        timeout_s: seconds after which a collective that some rank does not join is given up (gloo; with NCCL
            PyTorch's watchdog ends the process instead).
    """

    def __init__(self, timeout_s: float) -> None:
        self.group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout_s = timeout_s
        self.sent: Counter[str] = Counter()

    def exchange(self, output: Tensor, input: Tensor, received: list[int], sent: list[int], what: str) -> Pending:
        """Start an all-to-all of rows: ``sent[j]`` rows of ``input`` to rank j, ``received[i]`` from rank i."""
        row_bytes = math.prod(input.shape[1:]) * input.element_size()
        self.sent[what.split()[0]] += (sum(sent) - sent[self.rank]) * row_bytes
        start = time.monotonic()
        work = self._try(
            lambda: dist.all_to_all_single(output, input, received, sent, group=self.group, async_op=True),
            what,
            start,
        )
        return Pending(lambda: self._try(work.wait, what, start), (output, input))

    def gather(self, counts: Tensor, what: str) -> np.ndarray:
        """[N, ...] int64: ``counts`` of every rank."""
        out = counts.new_empty((self.size, *counts.shape))
        start = time.monotonic()
        self._try(lambda: dist.all_gather(list(out.unbind()), counts, group=self.group), what, start)
        self.sent[what.split()[0]] += (self.size - 1) * counts.numel() * counts.element_size()
        return self._try(lambda: out.cpu().numpy(), what, start)

    def _try(self, call: Callable, what: str, start: float):
        try:
            return call()
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size}: {what} failed after {time.monotonic() - start:.0f} s "
                f"(limit {self.timeout_s:g} s): another rank has died, left or fallen out of step, see its output: "
                f"{str(error).splitlines()[0]}"
            ) from error


class Pending:
    """An all-to-all under way; keeps its tensors alive until ``wait`` has returned."""

    def __init__(self, wait: Callable[[], object], tensors: tuple[Tensor, Tensor]) -> None:
        self._wait, self._tensors = wait, tensors

    def wait(self) -> Tensor:
        """The output, once it is there."""
        self._wait()
        output, self._tensors = self._tensors[0], ()
        return output


def move_rows(link: Link, input: Tensor, received: list[int], sent: list[int], what: str) -> Tensor:
    """An all-to-all of rows, waited for: [sum(received), ...]."""
    output = input.new_empty((sum(received), *input.shape[1:]))
    return link.exchange(output, input.contiguous(), received, sent, what).wait()


def bytes_sent(*links: Link) -> dict[str, int]:
    """Bytes sent to other ranks over the links, by purpose."""
    total = sum((link.sent for link in links), Counter())
    return dict(total)


def in_backward() -> bool:
    """Whether autograd is running backward in this thread, as when a checkpointed layer is recomputed."""
    return torch._C._current_graph_task_id() != -1
