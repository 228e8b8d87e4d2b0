"""Planners side by side on a load trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fsep import baselines
from fsep.bounds import lower_bound
from fsep.costs import cost_of_pairs
from fsep.layout import Layout
from fsep.planner import plan
from fsep.routing import route_copies
from fsep.topology import Topology
from fsep.traces import LoadTrace

PLANNERS: dict[str, Callable[..., Layout]] = {"fsep": plan, **baselines.PLANNERS}
ROUTINGS: dict[str, Callable[..., np.ndarray]] = {"flow": route_copies, **baselines.ROUTINGS}
# The routing that each planner was published with, and for the strongest also better ones.
METHODS: dict[str, tuple[str, ...]] = {
    "fsep": ("flow",),
    "static": ("lite",),
    "laer": ("lite", "lp"),
    "eplb": ("even", "lp"),
    "eplb-hierarchical": ("even", "lp"),
    "smartmoe": ("even",),
    "least-loaded": ("lp",),
}


@dataclass(frozen=True)
class Result:
    """One planner and routing at one age of its load: means over snapshots unless named otherwise.

    ``step_ms`` is the modelled time of a layer's step, ``bound_ms`` the mean of ``lower_bound`` on the same
    snapshots (NaN when not asked for), ``worst_over_bound`` the largest ratio of the two. ``plan_ms`` and
    ``route_ms`` are medians of measured time a layer.
    """

    planner: str
    routing: str
    stale: int
    snapshots: int
    imbalance: float
    imbalance_p95: float
    inter_node_fraction: float
    step_ms: float
    bound_ms: float
    worst_over_bound: float
    plan_ms: float
    route_ms: float


def simulate(
    trace: LoadTrace,
    topology: Topology,
    slots: int,
    *,
    planners: Sequence[str] = tuple(METHODS),
    stale: Sequence[int] = (0,),
    snapshots: int | None = 60,
    bound: bool = True,
) -> list[Result]:
    """Plan and route every snapshot of a trace; a snapshot is a (step, layer, micro-batch).

    Args:
        stale: ages in steps of the trace: the layout is planned on the load of the same layer and micro-batch that
            many steps earlier, tokens are routed with the current load.
        snapshots: the most snapshots, evenly spaced; None for all.

    Raises:
        ValueError: an unknown planner, a trace of another number of devices, an age that the trace does not reach.
    """
    for name in planners:
        if name not in METHODS:
            raise ValueError(f"planner is {name!r}: choose one of {', '.join(METHODS)}, all")
    if trace.devices != topology.devices:
        raise ValueError(
            f"the trace has {trace.devices} devices but topology.devices is {topology.devices}: make them agree"
        )
    for age in stale:
        if not 0 <= age < trace.steps:
            raise ValueError(f"stale is {age} but the trace has {trace.steps} steps: give 0 to {trace.steps - 1}")
    if snapshots is not None and snapshots < 1:
        raise ValueError(f"snapshots is {snapshots}: give at least 1")
    bounds: dict[tuple[int, int, int], float] = {}
    results = []
    for age in stale:
        chosen = _chosen(trace, age, snapshots)
        for at in chosen if bound else ():
            if at not in bounds:
                bounds[at] = 1e3 * lower_bound(trace.tokens[at], topology, slots)
        for planner in planners:
            for routing in METHODS[planner]:
                results.append(_measure(trace, topology, slots, planner, routing, age, chosen, bounds))
    return results


def _chosen(trace: LoadTrace, age: int, snapshots: int | None) -> list[tuple[int, int, int]]:
    every = [
        (step, layer, micro)
        for step in range(age, trace.steps)
        for layer in range(trace.layers)
        for micro in range(trace.microbatches)
    ]
    if snapshots is None or snapshots >= len(every):
        return every
    return [every[k] for k in np.linspace(0, len(every) - 1, snapshots).round().astype(int)]


def _measure(
    trace: LoadTrace,
    topology: Topology,
    slots: int,
    planner: str,
    routing: str,
    age: int,
    chosen: list[tuple[int, int, int]],
    bounds: dict[tuple[int, int, int], float],
) -> Result:
    make, send = PLANNERS[planner], ROUTINGS[routing]
    # The first call compiles.
    first = trace.tokens[chosen[0]]
    send(first, make(first, topology, slots), topology)
    rows = []
    for step, layer, micro in chosen:
        begin = time.perf_counter()
        layout = make(trace.tokens[step - age, layer, micro], topology, slots)
        planned = time.perf_counter()
        tokens_NP = send(trace.tokens[step, layer, micro], layout, topology)
        routed = time.perf_counter()
        price = cost_of_pairs(pairs(tokens_NP, layout), topology)
        least = bounds.get((step, layer, micro), np.nan)
        step_ms = 1e3 * price.total_s
        rows.append(
            (
                price.imbalance,
                price.inter_node_fraction,
                step_ms,
                least,
                step_ms / least if least else 1.0,
                1e3 * (planned - begin),
                1e3 * (routed - planned),
            )
        )
    imbalance, inter, step_ms, least, ratio, plan_ms, route_ms = np.array(rows).T
    return Result(
        planner=planner,
        routing=routing,
        stale=age,
        snapshots=len(rows),
        imbalance=float(imbalance.mean()),
        imbalance_p95=float(np.percentile(imbalance, 95)),
        inter_node_fraction=float(inter.mean()),
        step_ms=float(step_ms.mean()),
        bound_ms=float(least.mean()),
        worst_over_bound=float(ratio.max()),
        plan_ms=float(np.median(plan_ms)),
        route_ms=float(np.median(route_ms)),
    )


def pairs(tokens_NP: np.ndarray, layout: Layout) -> np.ndarray:
    """Tokens from device i to device j, [N, N], of a compact routing [N, P]."""
    sent_NN = np.zeros((layout.devices, layout.devices), np.int64)
    np.add.at(sent_NN.T, layout.copies.device, tokens_NP.T)
    return sent_NN
