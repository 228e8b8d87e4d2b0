"""Exact load balance over a given placement, by maximum flow.

Tokens of node g for expert e form a hub (g, e); the hub feeds the copies of e. The flow through hub and copy says
how many of these tokens the copy computes. Devices above their share push tokens back through a hub to another
copy, along shortest augmenting paths (Dinic), first inside nodes only, then across. When no path is left, the
devices reached form a cut: their load over their weight is the least share that can work, and becomes the next
share tried (Newton's method on the parametric cut; it ends at the optimum of the linear program, in integers).

Shapes: G nodes, E experts, N devices, P copies.
"""

from __future__ import annotations

import numpy as np

from fsep.jit import jit


@jit
def start_flow(load_GE, copies, node_of, flow_PG, load_N):
    """Split every hub evenly over its copies, those of its own node where there are any; fills the last two."""
    expert_P, device_P, start_E, _, _ = copies
    flow_PG[:] = 0
    load_N[:] = 0
    G, E = load_GE.shape
    for e in range(E):
        lo, hi = start_E[e], start_E[e + 1]
        for g in range(G):
            tokens = load_GE[g, e]
            if tokens == 0:
                continue
            at_home = 0
            for p in range(lo, hi):
                at_home += node_of[device_P[p]] == g
            left = at_home if at_home > 0 else hi - lo
            for p in range(lo, hi):
                if at_home > 0 and node_of[device_P[p]] != g:
                    continue
                share = tokens // left
                flow_PG[p, g] = share
                load_N[device_P[p]] += share
                tokens -= share
                left -= 1


@jit
def _levels(copies, node_of, flow_PG, load_N, cap_N, hosted_GE, across, level_N, level_GE, queue):
    """Breadth-first levels from the devices above their share; True when a device below its share is reached."""
    expert_P, device_P, start_E, on_device, device_start = copies
    G = flow_PG.shape[1]
    level_N[:] = -1
    level_GE[:] = -1
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
            for g in range(G):
                if flow_PG[p, g] == 0 or level_GE[g, e] >= 0:
                    continue
                level_GE[g, e] = level
                inside = hosted_GE[g, e] and not across
                for q in range(start_E[e], start_E[e + 1]):
                    d = device_P[q]
                    if level_N[d] < 0 and not (inside and node_of[d] != g):
                        level_N[d] = level + 1
                        queue[tail] = d
                        tail += 1
                        if load_N[d] < cap_N[d]:
                            found = level + 1
    return found >= 0


@jit
def push(copies, node_of, flow_PG, load_N, cap_N, hosted_GE, across, work):
    """Augment until no path from a device above its share to one below it is left."""
    expert_P, device_P, start_E, on_device, device_start = copies
    level_N, level_GE, queue, arc_N, arc_GE, path_p, path_q, path_g = work
    N, G = len(load_N), flow_PG.shape[1]
    while _levels(copies, node_of, flow_PG, load_N, cap_N, hosted_GE, across, level_N, level_GE, queue):
        arc_N[:] = 0
        for e in range(hosted_GE.shape[1]):
            arc_GE[:, e] = start_E[e]
        for source in range(N):
            if level_N[source] != 0:
                continue
            depth, j = 0, source
            while load_N[source] > cap_N[source]:
                if depth > 0 and load_N[j] < cap_N[j]:
                    amount = min(load_N[source] - cap_N[source], cap_N[j] - load_N[j])
                    for k in range(depth):
                        amount = min(amount, flow_PG[path_p[k], path_g[k]])
                    for k in range(depth):
                        flow_PG[path_p[k], path_g[k]] -= amount
                        flow_PG[path_q[k], path_g[k]] += amount
                    load_N[source] -= amount
                    load_N[j] += amount
                    depth, j = 0, source
                    continue
                step = False
                arcs = (device_start[j + 1] - device_start[j]) * G
                while arc_N[j] < arcs:
                    p = on_device[device_start[j] + arc_N[j] // G]
                    g = arc_N[j] % G
                    e = expert_P[p]
                    if flow_PG[p, g] > 0 and level_GE[g, e] == level_N[j]:
                        inside = hosted_GE[g, e] and not across
                        while arc_GE[g, e] < start_E[e + 1]:
                            q = arc_GE[g, e]
                            d = device_P[q]
                            if level_N[d] == level_N[j] + 1 and not (inside and node_of[d] != g):
                                path_p[depth], path_q[depth], path_g[depth] = p, q, g
                                depth += 1
                                j = d
                                step = True
                                break
                            arc_GE[g, e] += 1
                    if step:
                        break
                    arc_N[j] += 1
                if not step:
                    if depth == 0:
                        break
                    depth -= 1
                    g = path_g[depth]
                    arc_GE[g, expert_P[path_p[depth]]] += 1
                    j = device_P[path_p[depth]]


@jit
def make_work(N, G, E):
    """Scratch arrays of ``balance`` for one size."""
    return (
        np.empty(N, np.int64),
        np.empty((G, E), np.int64),
        np.empty(N, np.int64),
        np.empty(N, np.int64),
        np.empty((G, E), np.int64),
        np.empty(N + 1, np.int64),
        np.empty(N + 1, np.int64),
        np.empty(N + 1, np.int64),
    )


@jit
def hosts(copies, node_of, G, E):
    """[G, E] bool: whether a node holds a copy of an expert."""
    hosted_GE = np.zeros((G, E), np.bool_)
    for p in range(len(copies[0])):
        hosted_GE[node_of[copies[1][p]], copies[0][p]] = True
    return hosted_GE


@jit
def balance(copies, node_of, weight_N, hosted_GE, across, share, flow_PG, load_N, work):
    """Lower the load until every device is within ``share * weight``; raise the share where that can't be.

    Args:
        copies: ``Copies`` of the layout.
        weight_N: int64, the relative capacity of each device.
        hosted_GE: see ``hosts``. Without ``across``, tokens whose node holds their expert stay in their node.
        share: int, tokens a unit of weight, to start from.
        flow_PG, load_N: int64, a whole flow (``start_flow``), changed in place.

    Returns:
        The smallest share not below the one given that the placement allows.
    """
    level_N = work[0]
    cap_N = share * weight_N
    while True:
        push(copies, node_of, flow_PG, load_N, cap_N, hosted_GE, across, work)
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
