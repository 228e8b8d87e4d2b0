"""Layouts built from the load: which node hosts which expert, and who holds what inside each node.

Shapes: N devices, E experts, C slots, G nodes, P copies.
"""

from __future__ import annotations

import numpy as np

from fsep.flow import balance, device_loads, make_work, node_ranges, push, release, start_flow
from fsep.jit import jit
from fsep.pack import pack

# A free slot goes to the expert with the most (load + PRIOR * mean load) a copy. Fresh loads need none of these
# copies; after the load has moved they carry it. Chosen on the traces at hand: from 0.1 to 1.5 old plans age alike;
# with more the hot experts lack copies and tokens travel, without any a cold expert that wakes up has one device.
PRIOR = 0.3


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
    start_E[:] = np.cumsum(start_E)
    device_start[:] = np.cumsum(device_start)
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
def hosts_by_demand(load_GE, room_G):
    """Nodes host the experts that their own devices ask for most; every expert somewhere. [E, G] uint8.

    ``room_G`` bounds the experts of each node; its sum is at least E, and what experts without a node still need of
    it is never given away.
    """
    G, E = load_GE.shape
    hosted_EG = np.zeros((E, G), np.uint8)
    room_G = np.minimum(room_G, E)
    rooms, homeless = room_G.sum(), E
    count_E = np.zeros(E, np.int64)
    demand = load_GE.ravel()
    for k in np.argsort(-demand, kind="mergesort"):
        g, e = k // E, k % E
        if room_G[g] == 0 or (count_E[e] > 0 and rooms <= homeless):
            continue
        homeless -= count_E[e] == 0
        rooms -= 1
        count_E[e] += 1
        room_G[g] -= 1
        hosted_EG[e, g] = 1
    return hosted_EG


@jit
def hosts_by_size(load_GE, room_G, size_G):
    """Nodes host experts packed for balance between nodes, then those their devices ask for most. [E, G] uint8."""
    G, E = load_GE.shape
    _, held_GE = pack(load_GE.sum(0), size_G, room_G, False)
    room_G = np.minimum(room_G, E)
    hosted_EG = np.zeros((E, G), np.uint8)
    for g in range(G):
        for e in range(E):
            if held_GE[g, e]:
                hosted_EG[e, g] = 1
                room_G[g] -= 1
    for k in np.argsort(-load_GE.ravel(), kind="mergesort"):
        g, e = k // E, k % E
        if room_G[g] > 0 and not hosted_EG[e, g]:
            hosted_EG[e, g] = 1
            room_G[g] -= 1
    return hosted_EG


@jit
def build(load_GE, hosted_EG, slots, node_start):
    """Replicas [E, N] when nodes host ``hosted_EG``: balance the nodes, pack each, fill what is free."""
    E, G = hosted_EG.shape
    N = node_start[G]
    replicas_EN = np.zeros((E, N), np.uint8)
    size_G = node_start[1:] - node_start[:-1]
    # Nodes balanced like devices: home tokens stay unless a node is above its share.
    nodes = np.arange(G)
    copies = index_copies(hosted_EG)
    ranges = node_ranges(copies, nodes)
    work = make_work(G, E, len(copies[0]))
    home_P, away_P = start_flow(load_GE, copies, nodes, ranges)
    load_G = device_loads(copies, home_P, away_P, G)
    mean = -(-load_GE.sum() // N)
    push(copies, ranges, home_P, away_P, load_G, mean * size_G, work)
    release(home_P, away_P)
    balance(copies, ranges, size_G, mean, home_P, away_P, load_G, work)
    for g in range(G):
        mine = copies[3][copies[4][g] : copies[4][g + 1]]
        size_M = away_P[mine]
        expert_M = copies[0][mine]
        first, last = node_start[g], node_start[g + 1]
        # Nodes often see like loads; packed alike, a device's experts would share one device on every node, and a
        # load that moves could not spread. So every other node packs differently.
        _, held_BM = pack(size_M, np.ones(last - first, np.int64), np.full(last - first, slots), g % 2 == 1)
        for b in range(last - first):
            for k in range(len(mine)):
                if held_BM[b, k]:
                    replicas_EN[expert_M[k], first + b] = 1
        fill_free(size_M, expert_M, slots, first, last, replicas_EN)
    return replicas_EN


@jit
def fill_free(size_M, expert_M, slots, first, last, replicas_EN):
    """Fill free slots of devices ``first .. last`` with further copies of the node's experts, see ``PRIOR``."""
    M = len(size_M)
    want_M = size_M + np.int64(PRIOR * size_M.sum() / max(M, 1)) + 1
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
            if not replicas_EN[expert_M[k], first + b] and (
                best < 0 or want_M[k] * copies_M[best] > want_M[best] * copies_M[k]
            ):
                best = k
        if best < 0:
            free[b] = 0
            continue
        replicas_EN[expert_M[best], first + b] = 1
        copies_M[best] += 1
        free[b] -= 1
