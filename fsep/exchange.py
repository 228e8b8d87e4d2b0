"""Refinement of a layout by trying exchanges of copies, the most promising first.

Shapes: N devices, E experts, G nodes, P copies.
"""

from __future__ import annotations

import numpy as np

from fsep.construct import index_copies
from fsep.jit import jit
from fsep.routing import by_node, solve


@jit
def exchange(load_NE, replicas_EN, slots, node_of, node_start, seconds, trials):
    """Try ``trials`` exchanges, keeping those that lower the modelled time; (replicas, seconds).

    An exchange relieves the most loaded device or, where loads are even, the device with the most traffic between
    nodes: another device takes a copy of one of its experts, in a free slot, in place of a copy the cluster has
    more of, or by a swap.
    """
    copies = index_copies(replicas_EN)
    shipments, best = solve(load_NE, copies, node_of, node_start, seconds)
    tried = np.empty((trials, 4), np.int64)
    known = 0
    for _ in range(trials):
        move = _promising(
            load_NE, replicas_EN, copies, shipments, slots, node_of, node_start, seconds, tried[:known]
        )
        e, a, y, b = move
        if e < 0:
            break
        trial_EN = replicas_EN.copy()
        trial_EN[e, b] = 1
        if y >= 0:
            trial_EN[y, b] = 0
        if a >= 0:
            trial_EN[e, a], trial_EN[y, a] = 0, 1
        trial_copies = index_copies(trial_EN)
        trial_R, took = solve(load_NE, trial_copies, node_of, node_start, seconds)
        if took < best:
            replicas_EN, copies, shipments, best = trial_EN, trial_copies, trial_R, took
            known = 0
        else:
            tried[known] = e, a, y, b
            known += 1
    return replicas_EN, best


@jit
def _promising(load_NE, replicas_EN, copies, shipments, slots, node_of, node_start, seconds, tried):
    """The untried exchange of the largest estimated gain: (expert e, its device a or -1, expert y or -1, device b).

    Device b takes e. With y = -1 into a free slot, with a = -1 in place of y, else y goes to a in return.
    """
    expert_P, device_P, _, on_device, device_start = copies
    E, N = replicas_EN.shape
    flow_P = np.zeros(len(expert_P), np.int64)
    load_N = np.zeros(N, np.int64)
    cross_P = np.zeros(len(expert_P), np.int64)
    cross_GE = np.zeros((node_of[-1] + 1, E), np.int64)
    for source, p, tokens in zip(*shipments):  # noqa: B905 - numba knows no strict
        flow_P[p] += tokens
        load_N[device_P[p]] += tokens
        if node_of[source] != node_of[device_P[p]]:
            cross_P[p] += tokens
            cross_GE[node_of[source], expert_P[p]] += tokens
    arrive_N = np.zeros(N, np.int64)
    for p in range(len(expert_P)):
        arrive_N[device_P[p]] += cross_P[p]
    demand_GE = by_node(load_NE, node_start)
    hub = np.argmax(arrive_N)
    count_E = replicas_EN.astype(np.int64).sum(1)
    mean = -(-flow_P.sum() // N)
    worst = np.argmax(load_N)
    best, chosen = 0.0, (-1, -1, -1, -1)
    for b in range(N):
        full = device_start[b + 1] - device_start[b] >= slots
        for k in range(device_start[b], device_start[b + 1] + (not full)):
            free = k == device_start[b + 1]
            y = -1 if free else expert_P[on_device[k]]
            flow_y = 0 if free else flow_P[on_device[k]]
            spare = free or count_E[y] > 1
            # Tokens that y serves at home would have to cross.
            lost = 0 if free else flow_y - cross_P[on_device[k]]
            if b != worst and load_N[b] < load_N[worst]:
                for m in range(device_start[worst], device_start[worst + 1]):
                    p = on_device[m]
                    e = expert_P[p]
                    if replicas_EN[e, b]:
                        continue
                    if spare:
                        moved = min(flow_P[p], load_N[worst] - mean, mean - load_N[b] + flow_y)
                        gain = (moved - 0.1 * flow_y) * seconds[0]
                        if gain > best and not _is_tried(tried, e, -1, y, b):
                            best, chosen = gain, (e, -1, y, b)
                    if not free and not replicas_EN[y, worst]:
                        delta = flow_P[p] - flow_y
                        gain = min(delta, load_N[worst] - load_N[b] - delta) * seconds[0]
                        if gain > best and not _is_tried(tried, e, worst, y, b):
                            best, chosen = gain, (e, worst, y, b)
            if not free and node_of[b] != node_of[hub]:
                for m in range(device_start[hub], device_start[hub + 1]):
                    p = on_device[m]
                    e = expert_P[p]
                    change = flow_P[p] - flow_y
                    if replicas_EN[e, b] or replicas_EN[y, hub] or load_N[b] + change > load_N[worst]:
                        continue
                    if load_N[hub] - change > load_N[worst]:
                        continue
                    gain = (cross_P[p] - max(0, flow_y - demand_GE[node_of[hub], y])) * seconds[2]
                    if gain > best and not _is_tried(tried, e, hub, y, b):
                        best, chosen = gain, (e, hub, y, b)
            if spare:
                for e in range(E):
                    saved = cross_GE[node_of[b], e]
                    if saved > 0 and not replicas_EN[e, b]:
                        gain = (saved - lost) * seconds[2] / N
                        if gain > best and not _is_tried(tried, e, -1, y, b):
                            best, chosen = gain, (e, -1, y, b)
    return chosen


@jit
def _is_tried(tried, e, a, y, b):
    for k in range(len(tried)):
        if tried[k, 0] == e and tried[k, 1] == a and tried[k, 2] == y and tried[k, 3] == b:
            return True
    return False
