"""Published planners and token routings behind the interface of ``plan`` and ``route``.

Each is written from its paper's or project's description. Planners take ``(load, topology, slots)`` and return a
``Layout``; routings take ``(load, layout, topology)`` and return tokens [N, P], compact as ``route_copies``. Inputs
are checked as by ``plan`` and ``route``. A device never holds an expert twice: where the original would put a
second copy there, the next best device takes it.

Shapes: N devices, E experts, C slots a device, G nodes, P copies.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from fsep.check import check_load, check_slots
from fsep.jit import jit
from fsep.layout import Layout
from fsep.place import apportion, even_counts, place, place_over_nodes
from fsep.routing import modelled_seconds, traffic
from fsep.topology import Topology


def static(load: np.ndarray, topology: Topology, slots: int) -> Layout:
    """Plain expert parallelism, blind to the load: slot s of device j holds expert (j * C + s) mod E."""
    load_NE, slots = _checked(load, topology, slots)
    N, E = load_NE.shape
    used = min(slots, E)
    return Layout.from_table((np.arange(N)[:, None] * used + np.arange(used)) % E, E, slots)


def eplb(load: np.ndarray, topology: Topology, slots: int, *, groups: int | None = None) -> Layout:
    """DeepSeek's expert-parallelism load balancer (deepseek-ai/EPLB).

    Global policy (``groups=None``): copies go one by one to the expert with the most load a copy, then, largest
    first, to the least loaded device with a free slot. Hierarchical policy: ``groups`` of consecutive experts are
    first packed on nodes; each node then replicates and packs its own experts. As there, it falls back to the
    global policy where groups don't divide the experts or nodes don't divide the groups, and here also where nodes
    are of unequal size or too small.
    """
    load_NE, slots = _checked(load, topology, slots)
    N, E = load_NE.shape
    G, sizes = topology.nodes, topology.node_sizes
    total_E = load_NE.sum(0).astype(float)
    if groups is not None and groups < 1:
        raise ValueError(f"groups is {groups}: give at least 1")
    replicas_EN = np.zeros((E, N), np.uint8)
    divides = groups is not None and E % groups == 0 and groups % G == 0
    if not divides or sizes.min() != sizes.max() or sizes[0] * slots < E // G:
        _replicate_and_pack(total_E, np.arange(E), np.arange(N), slots, replicas_EN)
        return Layout(replicas_EN, slots)
    members = np.arange(E).reshape(groups, -1)
    load_G, count_G = np.zeros(G), np.zeros(G, int)
    node_of_group = np.zeros(groups, int)
    group_load = total_E[members].sum(1)
    for group in np.argsort(-group_load, kind="stable"):
        node = min((g for g in range(G) if count_G[g] < groups // G), key=lambda g: (load_G[g], g))
        node_of_group[group] = node
        load_G[node] += group_load[group]
        count_G[node] += 1
    for g in range(G):
        experts = members[node_of_group == g].ravel()
        _replicate_and_pack(total_E, experts, np.flatnonzero(topology.node_of == g), slots, replicas_EN)
    return Layout(replicas_EN, slots)


def hierarchical_eplb(load: np.ndarray, topology: Topology, slots: int) -> Layout:
    """``eplb`` with as many groups as nodes."""
    return eplb(load, topology, slots, groups=topology.nodes)


def laer(load: np.ndarray, topology: Topology, slots: int) -> Layout:
    """LAER-MoE's planner (arXiv 2602.11686).

    Two candidates for the number of copies: one a node and the rest by a priority queue on load a copy, and all
    slots split evenly. In descending load a copy, each goes to the least loaded device with a free slot among the
    nodes with the fewest copies of its expert. The candidate quicker under lite routing is kept. Where there
    are too few slots for one copy a node, the queue starts from one in all.
    """
    load_NE, slots = _checked(load, topology, slots)
    N, E = load_NE.shape
    total_E = load_NE.sum(0).astype(float)
    most = N * min(slots, E)
    a_node = np.full(E, topology.nodes if most >= E * topology.nodes else 1)
    layouts = []
    for count_E in (apportion(total_E, a_node, most, N), even_counts(total_E, most, N)):
        replicas_EN = np.zeros((E, N), np.uint8)
        place_over_nodes(total_E, count_E, topology.node_of, slots, replicas_EN)
        layouts.append(Layout(replicas_EN, slots))
    return min(layouts, key=lambda layout: _seconds(lite(load_NE, layout, topology), layout, topology))


def smartmoe(load: np.ndarray, topology: Topology, slots: int) -> Layout:
    """SmartMoE's placement: one copy an expert, longest processing time first on the least loaded device."""
    load_NE, slots = _checked(load, topology, slots)
    replicas_EN = np.zeros(load_NE.shape[::-1], np.uint8)
    total_E = load_NE.sum(0).astype(float)
    once_E = np.ones(len(total_E), int)
    place(total_E, once_E, np.arange(len(total_E)), np.arange(len(load_NE)), slots, replicas_EN)
    return Layout(replicas_EN, slots)


def least_loaded(
    load: np.ndarray, topology: Topology, slots: int, *, alpha: float = 1.0, chunk: int = 1024, bypass: float = 1.3
) -> Layout:
    """Least-loaded expert parallelism (LLEP).

    Experts sit on their home devices. While the homes' imbalance is at least ``bypass``, experts from the most
    loaded down keep what fits below ``alpha`` times the mean at home and spill the rest, ``chunk`` tokens at least
    at a time, to the least loaded device with a free slot.
    """
    load_NE, slots = _checked(load, topology, slots)
    N, E = load_NE.shape
    total_E = load_NE.sum(0)
    home_E = np.arange(E) * N // E
    replicas_EN = np.zeros((E, N), np.uint8)
    replicas_EN[np.arange(E), home_E] = 1
    home_load_N = np.bincount(home_E, total_E, N)
    mean = total_E.sum() / N
    if home_load_N.max() < bypass * mean:
        return Layout(replicas_EN, slots)
    left_N = home_load_N.copy()
    load_N = np.zeros(N)
    for e in np.argsort(-total_E, kind="stable"):
        rest, home = float(total_E[e]), home_E[e]
        # Homes' own experts that come later keep their claim on the home's capacity.
        left_N[home] -= total_E[e]
        stay = min(rest, max(0.0, alpha * mean - load_N[home] - left_N[home]))
        load_N[home] += stay
        rest -= stay
        while rest > 0:
            free = (replicas_EN.sum(0) < slots) & (replicas_EN[e] == 0)
            burden = load_N + left_N
            if not free.any() or burden[free].min() >= burden[home]:
                load_N[home] += rest
                break
            device = int(np.flatnonzero(free)[np.argmin(burden[free])])
            part = min(rest, max(chunk, alpha * mean - burden[device]))
            replicas_EN[e, device] = 1
            load_N[device] += part
            rest -= part
    return Layout(replicas_EN, slots)


def even(load: np.ndarray, layout: Layout, topology: Topology) -> np.ndarray:
    """Every device splits its tokens for an expert evenly over all copies. [N, P] int64."""
    load_NE = check_load(load, topology, experts=layout.experts, whole=True)
    return _split(load_NE, layout.copies, topology.node_of, False)


def lite(load: np.ndarray, layout: Layout, topology: Topology) -> np.ndarray:
    """LAER's lite routing: evenly over the copies on the own node if there are any, else over all. [N, P] int64."""
    load_NE = check_load(load, topology, experts=layout.experts, whole=True)
    return _split(load_NE, layout.copies, topology.node_of, True)


def lp(load: np.ndarray, layout: Layout, topology: Topology) -> np.ndarray:
    """Least largest device load by linear programming (HiGHS), blind to nodes, as LPLB does. [N, P] int64."""
    load_NE = check_load(load, topology, experts=layout.experts, whole=True)
    copies = layout.copies
    N, E, P = layout.devices, layout.experts, len(copies.expert)
    total_E = load_NE.sum(0)
    # Variables: tokens of each copy, then the largest load.
    copy = np.arange(P)
    supply = coo_array((np.ones(P), (copies.expert, copy)), shape=(E, P + 1))
    rows, columns = np.concatenate([copies.device, np.arange(N)]), np.concatenate([copy, np.full(N, P)])
    most = coo_array((np.concatenate([np.ones(P), -np.ones(N)]), (rows, columns)), shape=(N, P + 1))
    objective = np.zeros(P + 1)
    objective[P] = 1
    found = linprog(objective, most.tocsr(), np.zeros(N), supply.tocsr(), total_E, method="highs")
    return _split_in_proportion(load_NE, np.maximum(found.x[:P], 0), copies)


def _checked(load: np.ndarray, topology: Topology, slots: int) -> tuple[np.ndarray, int]:
    load_NE = check_load(load, topology, whole=False)
    return load_NE, check_slots(slots, *load_NE.shape)


def _seconds(tokens_NP: np.ndarray, layout: Layout, topology: Topology) -> float:
    source_R, copy_R = np.nonzero(tokens_NP)
    shipments = source_R, copy_R, tokens_NP[source_R, copy_R]
    return modelled_seconds(traffic(shipments, layout.copies.device, topology.node_of), topology.seconds)


def _replicate_and_pack(total_E, experts, devices, slots, replicas_EN):
    most = len(devices) * min(slots, len(experts))
    count_E = np.zeros(len(total_E), int)
    count_E[experts] = apportion(total_E[experts], np.ones(len(experts), int), most, len(devices))
    place(total_E, count_E, experts, devices, slots, replicas_EN)


@jit
def _split(load_NE, copies, node_of, at_home):
    expert_P, device_P, start_E, _, _ = copies
    N, E = load_NE.shape
    tokens_NP = np.zeros((N, len(expert_P)), np.int64)
    for i in range(N):
        for e in range(E):
            tokens = load_NE[i, e]
            if tokens == 0:
                continue
            lo, hi = start_E[e], start_E[e + 1]
            mine = 0
            if at_home:
                for p in range(lo, hi):
                    mine += node_of[device_P[p]] == node_of[i]
            left = mine if mine > 0 else hi - lo
            # Devices start at different copies, or the first copy would take every remainder.
            for k in range(hi - lo):
                p = lo + (i + k) % (hi - lo)
                if mine > 0 and node_of[device_P[p]] != node_of[i]:
                    continue
                part = -(-tokens // left)
                tokens_NP[i, p] = part
                tokens -= part
                left -= 1
    return tokens_NP


@jit
def _split_in_proportion(load_NE, weight_P, copies):
    """Whole tokens in proportion to the weights: running totals over devices and copies, rounded."""
    _, _, start_E, _, _ = copies
    N, E = load_NE.shape
    tokens_NP = np.zeros((N, len(weight_P)), np.int64)
    for e in range(E):
        lo, hi = start_E[e], start_E[e + 1]
        total = weight_P[lo:hi].sum()
        # The copies' shares of the expert are made whole first, then walked through device by device.
        whole = load_NE[:, e].sum()
        if whole == 0:
            continue
        sent_P = np.zeros(hi - lo, np.int64)
        for i in range(N):
            left = load_NE[i, e]
            seen = load_NE[: i + 1, e].sum()
            for p in range(lo, hi):
                if p == hi - 1:
                    part = left
                else:
                    part = np.int64(np.rint(weight_P[p] / total * seen)) - sent_P[p - lo]
                    part = min(max(part, 0), left)
                tokens_NP[i, p] = part
                sent_P[p - lo] += part
                left -= part
    return tokens_NP


PLANNERS = {
    "static": static,
    "eplb": eplb,
    "eplb-hierarchical": hierarchical_eplb,
    "laer": laer,
    "smartmoe": smartmoe,
    "least-loaded": least_loaded,
}
ROUTINGS = {"even": even, "lite": lite, "lp": lp}
