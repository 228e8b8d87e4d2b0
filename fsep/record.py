"""Recording load traces from a live model.

Shapes: S steps, L layers, M micro-batches, N devices, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from fsep.traces import LoadTrace


class TraceRecorder:
    """Counts the tokens that a Hugging Face model's routers send to each expert.

    Every module that is named a router (``...Router``), has ``num_experts`` and returns expert numbers last is
    watched, in module order; on a model that ``fsep.attach`` has changed, every layer of sharded experts. Only a
    layer's first call in a micro-batch counts, so that a recomputation under activation checkpointing is not
    counted twice. Use as a context manager::

        with TraceRecorder(model) as recorder:
            for step in ...:
                for batch in ...:
                    model(**batch)
                    recorder.end_microbatch()
                recorder.end_step(iteration)
        recorder.trace().save("loads.npz")

    Raises:
        ValueError: a model without such a router, or routers over different numbers of experts.
    """

    def __init__(self, model: nn.Module, group: torch.distributed.ProcessGroup | None = None) -> None:
        named = {name: module for name, module in model.named_modules() if hasattr(module, "num_experts")}
        kinds = {name: type(module).__name__.lower() for name, module in named.items()}
        self._sharded = "shardedexperts" in kinds.values()
        suffix = "shardedexperts" if self._sharded else "router"
        names = [name for name in named if kinds[name].endswith(suffix)]
        self._routers = [named[name] for name in names]
        numbers = [re.search(r"(?:^|\.)layers\.(\d+)\.", name) for name in names]
        self._layers = np.array([int(found[1]) for found in numbers]) if all(numbers) else None
        if not self._routers:
            raise ValueError(f"{type(model).__name__} has no router: give a mixture-of-experts model")
        experts = {int(router.num_experts) for router in self._routers}
        if len(experts) > 1:
            raise ValueError(
                f"the routers have {sorted(experts)} experts: a trace needs the same number in every layer"
            )
        self._experts = experts.pop()
        self._group = group
        self._counts: dict[int, torch.Tensor] = {}
        self._microbatches: list[torch.Tensor] = []
        self._steps: list[torch.Tensor] = []
        self._iterations: list[int] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> TraceRecorder:
        for index, router in enumerate(self._routers):
            if self._sharded:  # called with (hidden states, expert numbers, weights)
                handle = router.register_forward_pre_hook(self._hook(index, lambda inputs, _: inputs[1]))
            else:
                handle = router.register_forward_hook(self._hook(index, lambda _, output: output[-1]))
            self._handles.append(handle)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def end_microbatch(self) -> None:
        """Close a micro-batch.

        Raises:
            ValueError: a router did not run in it.
        """
        missing = [index for index in range(len(self._routers)) if index not in self._counts]
        if missing:
            raise ValueError(f"router {missing[0]} did not run in this micro-batch: call the model first")
        self._microbatches.append(torch.stack([self._counts[index] for index in range(len(self._routers))]))
        self._counts.clear()

    def end_step(self, iteration: int) -> None:
        """Close a step of at least one micro-batch; all steps need equally many.

        Raises:
            ValueError: another number of micro-batches than in earlier steps.
        """
        if not self._microbatches or (self._steps and len(self._microbatches) != len(self._steps[0])):
            expected = len(self._steps[0]) if self._steps else "at least 1"
            raise ValueError(f"the step has {len(self._microbatches)} micro-batches: expected {expected}")
        self._steps.append(torch.stack(self._microbatches))
        self._iterations.append(iteration)
        self._microbatches.clear()

    def trace(self) -> LoadTrace:
        """The steps recorded so far; a collective call where torch.distributed is initialised: ranks are devices.

        Raises:
            ValueError: no step was closed yet.
        """
        if not self._steps:
            raise ValueError("no step recorded yet: call end_step first")
        counts_SMLE = torch.stack(self._steps)
        ranks = [counts_SMLE]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = [torch.empty_like(counts_SMLE) for _ in range(torch.distributed.get_world_size(self._group))]
            torch.distributed.all_gather(ranks, counts_SMLE, group=self._group)
        tokens_SLMNE = torch.stack(ranks).permute(1, 3, 2, 0, 4).cpu().numpy()
        return LoadTrace(tokens_SLMNE, np.array(self._iterations), self._layers)

    def _hook(self, index: int, chosen: Callable[[tuple, tuple | None], torch.Tensor]):
        def count(_module: nn.Module, inputs: tuple, output: tuple | None = None) -> None:
            if index not in self._counts:
                # On the device, so that recording never waits for it.
                experts = chosen(inputs, output).detach().flatten()
                self._counts[index] = torch.bincount(experts, minlength=self._experts)

        return count
