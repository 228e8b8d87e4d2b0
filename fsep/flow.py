"""Exact load balance over a given placement, by maximum flow.

A copy computes tokens of its own node (``home``) and of other nodes (``away``). Home tokens can move to any copy of
their expert on that node, away tokens to any copy at all. Devices above their share push tokens along shortest
augmenting paths to devices below it (Dinic). When no path is left, the devices reached form a cut: their load over
their weight is the least share that can work, and becomes the next share tried (Newton's method on the parametric
cut). It ends at the optimum of the linear program, in whole tokens.

Sources are not kept: copies of an expert on one node are neighbours in ``Copies``, so two numbers a copy suffice,
and ``routing.spread`` restores who sends what.

Shapes: G nodes, E experts, N devices, P copies.
"""

from __future__ import annotations

import numpy as np

from fsep.jit import jit


@jit
def node_ranges(copies, node_of):
    """For each copy the range of copies of its expert on its node: (first [P], last [P])."""
    expert_P, device_P, _, _, _ = copies
    P = len(expert_P)
    first_P, last_P = np.empty(P, np.int64), np.empty(P, np.int64)
    lo = 0
    for p in range(1, P + 1):
        if p == P or expert_P[p] != expert_P[lo] or node_of[device_P[p]] != node_of[device_P[lo]]:
            first_P[lo:p] = lo
            last_P[lo:p] = p
            lo = p
    return first_P, last_P


@jit
def start_flow(load_GE, copies, node_of, ranges):
    """Tokens split evenly over the copies of their node or, where it has none, over all: (home [P], away [P])."""
    expert_P, device_P, start_E, _, _ = copies
    first_P, last_P = ranges
    home_P, away_P = np.zeros(len(expert_P), np.int64), np.zeros(len(expert_P), np.int64)
    for e in range(load_GE.shape[1]):
        rest = load_GE[:, e].sum()
        p = start_E[e]
        while p < start_E[e + 1]:
            tokens = load_GE[node_of[device_P[p]], e]
            rest -= tokens
            for q in range(p, last_P[p]):
                home_P[q] = tokens // (last_P[p] - q)
                tokens -= home_P[q]
            p = last_P[p]
        for q in range(start_E[e], start_E[e + 1]):
            away_P[q] = rest // (start_E[e + 1] - q)
            rest -= away_P[q]
    return home_P, away_P


@jit
def device_loads(copies, home_P, away_P, N):
    """Tokens on each device, [N]."""
    load_N = np.zeros(N, np.int64)
    for p in range(len(home_P)):
        load_N[copies[1][p]] += home_P[p] + away_P[p]
    return load_N


@jit
def make_work(N, E, P):
    """Scratch arrays of ``push`` for one size: levels and current arcs of devices, home and away hubs; paths."""
    levels = np.empty(N, np.int64), np.empty(P, np.int64), np.empty(E, np.int64)
    arcs = np.empty(N, np.int64), np.empty(P, np.int64), np.empty(E, np.int64)
    return levels, arcs, np.empty(N, np.int64), np.empty((3, N + 1), np.int64)


@jit
def _levels(copies, ranges, home_P, away_P, load_N, cap_N, levels, queue):
    """Breadth-first levels from the devices above their share; True when a device below its share is reached."""
    expert_P, device_P, start_E, on_device, device_start = copies
    first_P, last_P = ranges
    level_N, level_home, level_away = levels
    level_N[:] = -1
    level_home[:] = -1
    level_away[:] = -1
    head = tail = 0
    for j in range(len(load_N)):
        if load_N[j] > cap_N[j]:
            level_N[j] = 0
            queue[tail] = j
            tail += 1
    found = -1
    while head < tail:
        j = queue[head]
        head += 1
        level = level_N[j]
        if found >= 0 and level >= found:
            break
        for k in range(device_start[j], device_start[j + 1]):
            p = on_device[k]
            e = expert_P[p]
            lo = hi = 0
            if away_P[p] > 0 and level_away[e] < 0:
                level_away[e] = level
                lo, hi = start_E[e], start_E[e + 1]
            elif home_P[p] > 0 and level_home[first_P[p]] < 0:
                lo, hi = first_P[p], last_P[p]
            if home_P[p] > 0 and level_home[first_P[p]] < 0:
                level_home[first_P[p]] = level
            for q in range(lo, hi):
                d = device_P[q]
                if level_N[d] < 0:
                    level_N[d] = level + 1
                    queue[tail] = d
                    tail += 1
                    if load_N[d] < cap_N[d]:
                        found = level + 1
    return found >= 0


@jit
def push(copies, ranges, home_P, away_P, load_N, cap_N, work):
    """Augment until no path leads from a device above its share to one below; changes home, away and load."""
    expert_P, device_P, start_E, on_device, device_start = copies
    first_P, last_P = ranges
    levels, arcs, queue, path = work
    level_N, level_home, level_away = levels
    arc_N, arc_home, arc_away = arcs
    path_p, path_q, path_away = path
    N = len(load_N)
    while _levels(copies, ranges, home_P, away_P, load_N, cap_N, levels, queue):
        arc_N[:] = 0
        arc_home[:] = first_P
        arc_away[:] = start_E[:-1]
        for source in range(N):
            if level_N[source] != 0:
                continue
            depth, j = 0, source
            while load_N[source] > cap_N[source]:
                if depth > 0 and load_N[j] < cap_N[j]:
                    amount = min(load_N[source] - cap_N[source], cap_N[j] - load_N[j])
                    for k in range(depth):
                        flow = away_P[path_p[k]] if path_away[k] else home_P[path_p[k]]
                        amount = min(amount, flow)
                    for k in range(depth):
                        flow_P = away_P if path_away[k] else home_P
                        flow_P[path_p[k]] -= amount
                        flow_P[path_q[k]] += amount
                    load_N[source] -= amount
                    load_N[j] += amount
                    depth, j = 0, source
                    continue
                found = False
                while arc_N[j] < 2 * (device_start[j + 1] - device_start[j]):
                    p = on_device[device_start[j] + arc_N[j] // 2]
                    away = arc_N[j] % 2
                    hub = expert_P[p] if away else first_P[p]
                    flow = away_P[p] if away else home_P[p]
                    level = level_away[hub] if away else level_home[hub]
                    if flow > 0 and level == level_N[j]:
                        arc_hub = arc_away if away else arc_home
                        last = start_E[hub + 1] if away else last_P[p]
                        while arc_hub[hub] < last and level_N[device_P[arc_hub[hub]]] != level + 1:
                            arc_hub[hub] += 1
                        if arc_hub[hub] < last:
                            path_p[depth], path_q[depth], path_away[depth] = p, arc_hub[hub], away
                            j = device_P[arc_hub[hub]]
                            depth += 1
                            found = True
                            break
                    arc_N[j] += 1
                if not found:
                    if depth == 0:
                        break
                    # A dead end: no other path needs to try this copy.
                    depth -= 1
                    p = path_p[depth]
                    if path_away[depth]:
                        arc_away[expert_P[p]] += 1
                    else:
                        arc_home[first_P[p]] += 1
                    j = device_P[p]


@jit
def balance(copies, ranges, weight_N, share, home_P, away_P, load_N, work):
    """Lower the load until every device is within ``share * weight``; raise the share where that can't be.

    Args:
        copies, ranges: ``Copies`` of the layout and its ``node_ranges``.
        weight_N: int64, the relative capacity of each device.
        share: int, tokens a unit of weight, to start from.
        home_P, away_P, load_N: int64, a whole flow (``start_flow``, ``device_loads``), changed in place. To let
            home tokens leave their node, call them away tokens (``release``).

    Returns:
        The smallest share not below the one given that the placement allows.
    """
    level_N = work[0][0]
    cap_N = share * weight_N
    while True:
        push(copies, ranges, home_P, away_P, load_N, cap_N, work)
        cut_load = cut_weight = excess = 0
        for j in range(len(load_N)):
            excess += max(0, load_N[j] - cap_N[j])
            if level_N[j] >= 0:
                cut_load += load_N[j]
                cut_weight += weight_N[j]
        if excess == 0:
            return share
        share = -(-cut_load // cut_weight)
        cap_N = share * weight_N


@jit
def release(home_P, away_P):
    """Let every token go to any copy of its expert, whatever its node."""
    away_P += home_P
    home_P[:] = 0
