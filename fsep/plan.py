"""The planner: which device should hold which experts for a given load.

Two levels. Nodes first: each node hosts the experts its own devices ask for most, as many as leave it slots to cut
some of them between devices; tokens for the others cross to a node that hosts them. Then, inside each node, the
alias construction of ``pack`` fills every device to the same load, and free slots take further copies of the hot
experts. This is done for several numbers of cuts, and the layout whose routing has the least modelled time is kept.

Shapes: N devices, E experts, C slots, G nodes, P copies.
"""

from __future__ import annotations

import numpy as np

from fsep.check import check_load
from fsep.flow import balance, hosts, make_work, start_flow
from fsep.jit import jit
from fsep.layout import Layout
from fsep.pack import pack
from fsep.route import by_node, solve
from fsep.topology import Topology


def plan(
    load: np.ndarray,
    topology: Topology,
    slots: int,
    *,
    previous: Layout | None = None,
    budget_ms: float | None = None,
) -> Layout:
    load_NE = check_load(load, topology, whole=False)
    if load_NE.sum() == 0:
        load_NE = np.ones_like(load_NE)
    replicas, seconds = search(load_NE, slots, topology.node_of, topology.node_start, topology.seconds)
    return Layout(replicas, slots)


@jit
def index_copies(replicas_EN):
    """``Copies`` of a layout, compiled."""
    E, N = replicas_EN.shape
    start_E = np.zeros(E + 1, np.int64)
    device_start = np.zeros(N + 1, np.int64)
    for e in range(E):
        for j in range(N):
            if replicas_EN[e, j]:
                start_E[e + 1] += 1
                device_start[j + 1] += 1
    for e in range(E):
        start_E[e + 1] += start_E[e]
    for j in range(N):
        device_start[j + 1] += device_start[j]
    P = start_E[E]
    expert_P, device_P, on_device = np.empty(P, np.int64), np.empty(P, np.int64), np.empty(P, np.int64)
    fill = device_start.copy()
    p = 0
    for e in range(E):
        for j in range(N):
            if replicas_EN[e, j]:
                expert_P[p], device_P[p] = e, j
                on_device[fill[j]] = p
                fill[j] += 1
                p += 1
    return expert_P, device_P, start_E, on_device, device_start


@jit
def choose_hosts(load_GE, room_G, size_G):
    """Which node hosts which expert: the largest local loads first, every expert at least once. [E, G] uint8."""
    G, E = load_GE.shape
    hosted_EG = np.zeros((E, G), np.uint8)
    room = np.minimum(room_G, E)
    total_room = room.sum()
    homeless = E
    count_E = np.zeros(E, np.int64)
    load_G = np.zeros(G, np.int64)
    flat = load_GE.ravel()
    for k in np.argsort(-flat, kind="mergesort"):
        g, e = k // E, k % E
        if flat[k] == 0:
            break
        if room[g] == 0 or (count_E[e] > 0 and total_room <= homeless):
            continue
        homeless -= count_E[e] == 0
        count_E[e] += 1
        room[g] -= 1
        total_room -= 1
        hosted_EG[e, g] = 1
        load_G[g] += flat[k]
    total_E = load_GE.sum(0)
    for e in np.argsort(-total_E, kind="mergesort"):
        if count_E[e] == 0:
            best = -1
            for g in range(G):
                if room[g] > 0 and (best < 0 or load_G[g] * size_G[best] < load_G[best] * size_G[g]):
                    best = g
            hosted_EG[e, best] = 1
            room[best] -= 1
            load_G[best] += total_E[e]
    return hosted_EG


@jit
def build(load_GE, hosted_EG, slots, node_start):
    """Replicas [E, N] for experts hosted by nodes: balance the nodes, pack each, fill what is free."""
    E, G = hosted_EG.shape
    N = node_start[G]
    replicas_EN = np.zeros((E, N), np.uint8)
    size_G = node_start[1:] - node_start[:-1]
    nodes = np.arange(G)
    copies = index_copies(hosted_EG)
    flow_PG = np.zeros((len(copies[0]), G), np.int64)
    load_G = np.zeros(G, np.int64)
    work = make_work(G, G, E)
    start_flow(load_GE, copies, nodes, flow_PG, load_G)
    mean = -(-load_GE.sum() // N)
    hosted_GE = hosts(copies, nodes, G, E)
    balance(copies, nodes, size_G, hosted_GE, False, mean, flow_PG, load_G, work)
    balance(copies, nodes, size_G, hosted_GE, True, mean, flow_PG, load_G, work)
    for g in range(G):
        mine = copies[3][copies[4][g] : copies[4][g + 1]]
        size_M = flow_PG[mine].sum(1)
        n = size_G[g]
        amount, held = pack(size_M, np.ones(n, np.int64), np.full(n, slots, np.int64))
        for b in range(n):
            for k in range(len(mine)):
                if held[b, k]:
                    replicas_EN[copies[0][mine[k]], node_start[g] + b] = 1
        fill_free(size_M, copies[0][mine], slots, node_start[g], node_start[g + 1], replicas_EN)
    return replicas_EN


@jit
def fill_free(size_M, expert_M, slots, first, last, replicas_EN):
    """Give free slots of devices ``first .. last`` to the expert with the most load a copy."""
    M = len(size_M)
    copies_M = np.zeros(M, np.int64)
    for k in range(M):
        copies_M[k] = replicas_EN[expert_M[k], first:last].sum()
    free = np.zeros(last - first, np.int64)
    for j in range(first, last):
        free[j - first] = slots - replicas_EN[:, j].sum()
    while True:
        b = np.argmax(free)
        if free[b] <= 0:
            break
        best = -1
        for k in range(M):
            if replicas_EN[expert_M[k], first + b] == 0 and (
                best < 0 or size_M[k] * copies_M[best] > size_M[best] * copies_M[k]
            ):
                best = k
        if best < 0:
            free[b] = 0
            continue
        replicas_EN[expert_M[best], first + b] = 1
        copies_M[best] += 1
        free[b] -= 1


@jit
def search(load_NE, slots, node_of, node_start, seconds):
    """The layout of least modelled time among those built with several numbers of cuts: (replicas, seconds)."""
    N, E = load_NE.shape
    G = len(node_start) - 1
    size_G = node_start[1:] - node_start[:-1]
    load_GE = by_node(load_NE, node_start)
    bound = -(-load_NE.sum() // N) * seconds[0]
    best = np.inf
    best_EN = np.zeros((E, N), np.uint8)
    for quarter in (4, 3, 2, 1, 0):
        room_G = np.empty(G, np.int64)
        for g in range(G):
            room_G[g] = size_G[g] * slots - (size_G[g] - 1) * quarter // 4
        if np.minimum(room_G, E).sum() < E:
            continue
        hosted_EG = choose_hosts(load_GE, room_G, size_G)
        replicas_EN = build(load_GE, hosted_EG, slots, node_start)
        copies = index_copies(replicas_EN)
        took = solve(load_NE, copies, node_of, node_start, seconds)[1]
        if took < best:
            best, best_EN = took, replicas_EN
        if best <= bound * 1.0005:
            break
    return best_EN, best
