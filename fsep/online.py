"""Planning during training: forecast, plan beside the step, and adopt on all ranks or on none.

Shapes: L layers, N devices (= ranks), E experts.
"""

from __future__ import annotations

import hashlib
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from fsep.check import check_slots
from fsep.forecast import Forecaster
from fsep.layout import Layout
from fsep.planner import modelled_time, plan
from fsep.topology import Topology

if TYPE_CHECKING:
    import torch.distributed


class Planner:
    """Keeps one layout a layer in step with the load, the same on every rank.

    Call ``observe`` once a step on every rank; read ``layouts`` in between. Ranks agree by construction: each
    rank's counts are all-reduced, so all plan from identical integers with a deterministic planner, in a background
    thread that no step waits for. A later ``observe`` adopts the plan only when every rank has it and the ranks'
    hashes are equal; when one is late all keep the old layouts until the next step (``late`` counts these), when
    hashes differ all drop the plan (``rejected``).

    Args:
        topology: its ``devices`` must be the number of ranks.
        slots: C, experts a device may hold.
        layers, experts: sizes L and E.
        forecast: a kind of ``Forecaster``.
        every: plan only at each ``every``-th ``observe``.
        threshold: least relative gain in modelled step time, on the forecast, for a layer's layout to change.
        group: process group; None is the default group where torch.distributed is initialised, else this process
            plans alone for all devices.
        background: plan in a thread. False plans inside ``observe``, to simulate or to debug.
        budget_ms: see ``plan``.

    Raises:
        ValueError: sizes that do not fit, a threshold that is negative or not finite.
    """

    def __init__(
        self,
        topology: Topology,
        slots: int,
        *,
        layers: int,
        experts: int,
        forecast: str = "auto",
        threshold: float = 0.01,
        every: int = 1,
        group: torch.distributed.ProcessGroup | None = None,
        background: bool = True,
        budget_ms: float | None = None,
    ) -> None:
        if layers < 1 or experts < 1:
            raise ValueError(f"layers is {layers} and experts is {experts}: give at least 1 of each")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every is {every!r}: give a whole number of at least 1")
        check_slots(slots, topology.devices, experts)
        if not (np.isfinite(threshold) and threshold >= 0):
            raise ValueError(f"threshold is {threshold}: give a finite number of at least 0")
        self.topology, self.slots, self.layers, self.experts = topology, slots, layers, experts
        self.threshold, self.every, self.budget_ms = threshold, every, budget_ms
        self._ranks = _Ranks(group)
        if self._ranks.size not in (1, topology.devices):
            raise ValueError(
                f"topology.devices is {topology.devices} but the process group has {self._ranks.size} ranks: "
                "make them agree"
            )
        # A plan is adopted one step after its load at the earliest, and then serves the step after.
        self._forecasters = [Forecaster(forecast, horizon=2) for _ in range(layers)]
        uniform = plan(np.ones((topology.devices, experts)), topology, slots)
        self.layouts: list[Layout] = [uniform] * layers
        self.adopted = self.late = self.rejected = 0
        self.plan_ms: float | None = None  # CPU milliseconds a layer that the last plan took
        self._observed = 0
        self._pending: Future[list[Layout]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fsep-planner") if background else None

    def observe(self, load: np.ndarray) -> bool:
        """Take in one step's load; adopt a plan that is ready on all ranks, or start the next one.

        Args:
            load: this rank's tokens an expert, [L, E] whole numbers; without a process group of more than one rank,
                those of all devices, [L, N, E].

        Returns:
            Whether some layout changed, the same on every rank.

        Raises:
            ValueError: another shape, negative or not whole. Exceptions of the planning thread come out here.
        """
        loads_LNE = self._gather(load)
        self._observed += 1
        for forecaster, load_NE in zip(self._forecasters, loads_LNE, strict=True):
            forecaster.update(load_NE)
        changed = False
        if self._pending is not None:
            if not self._ranks.all_true(self._pending.done()):
                self.late += 1
                return False
            changed = self._adopt(self._pending.result())
            self._pending = None
        if (self._observed - 1) % self.every:
            return changed
        forecasts = [forecaster.predict() for forecaster in self._forecasters]
        if self._thread is not None:
            self._pending = self._thread.submit(self._plan, forecasts, list(self.layouts))
            return changed
        return self._adopt(self._plan(forecasts, self.layouts)) or changed

    def close(self) -> None:
        """End the planning thread; layouts stay readable."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _gather(self, load: np.ndarray) -> np.ndarray:
        alone = self._ranks.size == 1
        shape = (self.layers, self.topology.devices, self.experts) if alone else (self.layers, self.experts)
        load = np.asarray(load)
        if alone and self.topology.devices == 1 and load.shape == (self.layers, self.experts):
            load = load[:, None]
        if load.shape != shape:
            raise ValueError(f"load has shape {load.shape}: give {shape}")
        whole = np.asarray(load, np.int64)
        if (whole != load).any() or (whole < 0).any():
            raise ValueError("load holds negative, fractional or non-finite entries: give token counts")
        return whole if alone else self._ranks.gather(whole)

    def _plan(self, forecasts: list[np.ndarray], current: list[Layout]) -> list[Layout]:
        """Runs in the thread; reads nothing that changes, and leaves behind how long it took."""
        chosen, started = [], time.thread_time()
        for forecast_NE, old in zip(forecasts, current, strict=True):
            new = plan(forecast_NE, self.topology, self.slots, previous=old, budget_ms=self.budget_ms)
            if new != old:
                before, after = (modelled_time(forecast_NE, layout, self.topology) for layout in (old, new))
                new = new if after < before * (1 - self.threshold) else old
            chosen.append(new)
        self.plan_ms = 1e3 * (time.thread_time() - started) / len(chosen)
        return chosen

    def _adopt(self, planned: list[Layout]) -> bool:
        digest = hashlib.blake2b(b"".join(layout.digest() for layout in planned), digest_size=16).digest()
        if not self._ranks.all_equal(digest):
            self.rejected += 1
            return False
        changed = any(new != old for new, old in zip(planned, self.layouts, strict=True))
        self.adopted += changed
        self.layouts = planned
        return changed


class _Ranks:
    """The few collectives that agreement takes; no-ops for a single process."""

    def __init__(self, group: torch.distributed.ProcessGroup | None) -> None:
        # Without torch loaded there is no process group, and no reason to load it.
        torch = sys.modules.get("torch")
        distributed = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
        self._group = group
        self.size, self._rank = 1, 0
        if distributed:
            self._torch = torch
            self.size, self._rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
            self._device = "cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu"

    def gather(self, load_LE: np.ndarray) -> np.ndarray:
        """[L, N, E] from each rank's [L, E]: every rank adds its own row to zeros."""
        load_LNE = np.zeros((load_LE.shape[0], self.size, load_LE.shape[1]), np.int64)
        load_LNE[:, self._rank] = load_LE
        return self._reduce(load_LNE, "SUM")

    def all_true(self, value: bool) -> bool:
        return value if self.size == 1 else bool(self._reduce(np.array([value], np.int64), "MIN")[0])

    def all_equal(self, digest: bytes) -> bool:
        if self.size == 1:
            return True
        words = np.frombuffer(digest, np.int32).astype(np.int64)
        # Equal when the least and the negated greatest cancel.
        least = self._reduce(np.concatenate([words, -words]), "MIN")
        return bool((least[: len(words)] == -least[len(words) :]).all())

    def _reduce(self, values: np.ndarray, operation: str) -> np.ndarray:
        tensor = self._torch.from_numpy(values).to(self._device)
        distributed = self._torch.distributed
        distributed.all_reduce(tensor, getattr(distributed.ReduceOp, operation), group=self._group)
        return tensor.cpu().numpy()
