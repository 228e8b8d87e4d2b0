"""The planner: which device should hold which experts for a given load.

Two levels. Nodes first: each node hosts the experts its own devices ask for most, as many as leave it slots to cut
some of them between devices; tokens for the others cross to a node that hosts them. Then, inside each node, the
alias construction of ``pack`` fills every device to the same load, and free slots take further copies. Where that
is not at the bound - few slots, slow links, lopsided sources - other constructions and exchanges are tried, and the
layout whose routing has the least modelled time is kept.

Shapes: N devices, E experts, C slots, G nodes, P copies.
"""

from __future__ import annotations

import numpy as np

from fsep.check import check_load, check_slots
from fsep.construct import build, hosts_by_demand, hosts_by_size, index_copies
from fsep.exchange import exchange
from fsep.jit import jit
from fsep.layout import Layout
from fsep.place import apportion, even_counts, place, place_over_nodes
from fsep.routing import by_node, solve, traffic
from fsep.topology import Topology

# A new layout must be this much quicker, relatively, than ``previous`` to replace it.
MIN_GAIN = 0.002
# Price of one trial in milliseconds for each (device, copy) pair; fixed, so that ranks agree on their number.
TRIAL_MS = 4e-5
DEFAULT_BUDGET_MS = 0.5
MOST_TRIALS = 10_000
# Constructions of ``_construct`` that tell nodes apart, and those beyond the first four, each for a trial.
BY_NODE = (1, 2, 4, 5)
OTHER_WAYS = 5


def plan(
    load: np.ndarray,
    topology: Topology,
    slots: int,
    *,
    previous: Layout | None = None,
    budget_ms: float | None = None,
) -> Layout:
    """Place experts for ``load`` so that ``cost(route(load, layout, topology))`` is small.

    Deterministic: equal arguments give equal layouts on every rank. No device holds an expert twice; slots stay
    empty only where a device holds every expert its node hosts.

    Args:
        load: [N, E] tokens that device i has for expert e; may be fractional (a forecast). All zero counts as
            uniform.
        slots: C, the most experts a device holds; ``N * C >= E``.
        previous: the layout in use. It is kept unless the new one is quicker by more than 0.2 %; a new one has its
            devices renumbered inside nodes so that as few slots as possible change.
        budget_ms: effort for layouts beyond the first four constructions, tried only where those are not at the
            bound. It buys trials at a fixed price of 40 ns for each (device, copy) pair, not by the clock, so that
            ranks agree. Default 0.5.

    Raises:
        ValueError: a load that is not [N, E], negative or not finite; too few slots; a ``previous`` of other sizes;
            a negative budget.
    """
    load_NE = check_load(load, topology, whole=False)
    N, E = load_NE.shape
    slots = check_slots(slots, N, E)
    budget_ms = DEFAULT_BUDGET_MS if budget_ms is None else budget_ms
    if not (np.isfinite(budget_ms) and budget_ms >= 0):
        raise ValueError(f"budget_ms is {budget_ms}: give a finite number of at least 0")
    if previous is not None and (previous.replicas.shape != (E, N) or previous.slots > slots):
        raise ValueError(
            f"previous has {previous.experts} experts, {previous.devices} devices and {previous.slots} slots but "
            f"the plan is for {E}, {N} and {slots}: give a layout of these sizes"
        )
    if load_NE.sum() == 0:
        load_NE = np.ones_like(load_NE)
    shape = topology.node_of, topology.node_start, topology.seconds
    trials = min(MOST_TRIALS, int(budget_ms / (TRIAL_MS * N * min(N * slots, N * E))))
    replicas_EN, seconds = _search(load_NE, slots, *shape, trials)
    if previous is not None:
        replicas_EN = _settle(load_NE, replicas_EN, seconds, previous.replicas, *shape)
    return Layout(replicas_EN, slots)


def modelled_time(load: np.ndarray, layout: Layout, topology: Topology) -> float:
    """Seconds of a step under ``route``; ``load`` [N, E] may be a forecast, and is then rounded as by ``plan``."""
    load_NE = check_load(load, topology, experts=layout.experts, whole=False)
    return solve(load_NE, layout.copies, topology.node_of, topology.node_start, topology.seconds)[1]


@jit
def _search(load_NE, slots, node_of, node_start, seconds, trials):
    """The layout of least modelled time among constructions and exchanges: (replicas [E, N], seconds).

    It ends early at a layout that has the least possible load and no traffic between nodes that could be felt.
    """
    N, E = load_NE.shape
    load_GE = by_node(load_NE, node_start)
    mean = -(-load_NE.sum() // N)
    best = np.inf
    best_EN = np.zeros((E, N), np.uint8)
    for way in range(4 + min(trials, OTHER_WAYS)):
        if way in BY_NODE and len(node_start) == 2:
            continue
        replicas_EN = _construct(way, load_GE, slots, node_of, node_start)
        copies = index_copies(replicas_EN)
        shipments, took = solve(load_NE, copies, node_of, node_start, seconds)
        if took < best:
            best, best_EN = took, replicas_EN
            load, intra, inter, _ = traffic(shipments, copies[1], node_of)
            unfelt = max(intra * seconds[1], 0.0005 * load * seconds[0])
            if load <= mean * 1.0005 and inter * seconds[2] <= unfelt:
                return best_EN, best
    if trials > OTHER_WAYS:
        return exchange(load_NE, best_EN, slots, node_of, node_start, seconds, trials - OTHER_WAYS)
    return best_EN, best


@jit
def _construct(way, load_GE, slots, node_of, node_start):
    """One of nine layouts [E, N], see the branches."""
    G, E = load_GE.shape
    N = node_start[G]
    most = N * min(slots, E)
    total_E = load_GE.sum(0).astype(np.float64)
    replicas_EN = np.zeros((E, N), np.uint8)
    if way == 0:  # blind to the load
        used = min(slots, E)
        for j in range(N):
            for c in range(used):
                replicas_EN[(j * used + c) % E, j] = 1
    elif way in BY_NODE:
        # Slots kept free for cuts, at most one less than devices in a node: all that there are, a half, none.
        size_G = node_start[1:] - node_start[:-1]
        kept = min(1.0, (N * slots - E) / max(1, N - G)) * (0.5 if way == 4 else 0.0 if way == 5 else 1.0)
        room_G = size_G * slots - ((size_G - 1) * kept).astype(np.int64)
        if way == 2:
            hosted_EG = hosts_by_size(load_GE, room_G, size_G)
        else:
            hosted_EG = hosts_by_demand(load_GE, room_G)
        replicas_EN = build(load_GE, hosted_EG, slots, node_start)
    elif way == 3:  # as if all were one node
        whole_GE = load_GE.sum(0).reshape(1, E)
        replicas_EN = build(whole_GE, np.ones((E, 1), np.uint8), slots, np.array([0, N]))
    elif way == 6:
        count_E = apportion(total_E, np.full(E, G if most >= E * G else 1), most, N)
        place_over_nodes(total_E, count_E, node_of, slots, replicas_EN)
    elif way == 7:
        place_over_nodes(total_E, even_counts(total_E, most, N), node_of, slots, replicas_EN)
    else:
        count_E = apportion(total_E, np.ones(E, np.int64), most, N)
        place(total_E, count_E, np.arange(E), np.arange(N), slots, replicas_EN)
    return replicas_EN


@jit
def _settle(load_NE, replicas_EN, new_seconds, previous_EN, node_of, node_start, seconds):
    """The previous layout unless the new one gains enough; else the new one, renumbered to change little."""
    old = solve(load_NE, index_copies(previous_EN), node_of, node_start, seconds)[1]
    if new_seconds >= old * (1 - MIN_GAIN):
        return previous_EN.copy()
    matched_EN = np.empty_like(replicas_EN)
    for g in range(len(node_start) - 1):
        first, last = node_start[g], node_start[g + 1]
        n = last - first
        shared = np.zeros((n, n), np.int64)
        for a in range(n):
            for b in range(n):
                for e in range(len(replicas_EN)):
                    shared[a, b] += replicas_EN[e, first + a] & previous_EN[e, first + b]
        for _ in range(n):
            k = np.argmax(shared)
            a, b = k // n, k % n
            matched_EN[:, first + b] = replicas_EN[:, first + a]
            shared[a, :] = -1
            shared[:, b] = -1
    # Renumbering leaves balance and traffic between nodes alone, but not who finds an expert at home.
    matched = solve(load_NE, index_copies(matched_EN), node_of, node_start, seconds)[1]
    return matched_EN if matched < old * (1 - MIN_GAIN) else replicas_EN
