"""Which copy computes which tokens.

Shapes: N devices, E experts, G nodes, P copies.
"""

from __future__ import annotations

import numpy as np

from fsep.check import check_load
from fsep.flow import balance, hosts, make_work, push, start_flow
from fsep.jit import jit
from fsep.layout import Layout
from fsep.topology import Topology


def route(load: np.ndarray, layout: Layout, topology: Topology) -> np.ndarray:
    """Send every token to a copy of its expert, in the least modelled time.

    Devices are balanced by maximum flow, so the largest load is the integer optimum for the layout, or is larger
    only where tokens would have to cross between nodes at a higher price than the balance is worth (see ``cost``).
    Deterministic: equal arguments give equal tokens on every rank.

    Args:
        load: [N, E] whole numbers, tokens that device i has for expert e.

    Returns:
        tokens [N, E, N] int32: of device i for expert e sent to device j; sums over j equal ``load``. Memory is
        touched only where tokens flow; ``route_copies`` gives the compact form.

    Raises:
        ValueError: a load of another shape, negative, not finite or not whole; a layout of other sizes.
    """
    tokens_NP = route_copies(load, layout, topology)
    copies = layout.copies
    tokens = np.zeros((layout.devices, layout.experts, layout.devices), np.int32)
    _scatter(tokens_NP, copies.expert, copies.device, tokens)
    return tokens


def route_copies(load: np.ndarray, layout: Layout, topology: Topology) -> np.ndarray:
    """As ``route``, compact: [N, P] int64, tokens of device i sent to copy p of ``layout.copies``."""
    load_NE = check_load(load, topology, experts=layout.experts, whole=True)
    if layout.devices != topology.devices:
        raise ValueError(
            f"layout has {layout.devices} devices but topology.devices is {topology.devices}: make them agree"
        )
    return solve(load_NE, layout.copies, topology.node_of, topology.node_start, topology.seconds)[0]


@jit
def _scatter(tokens_NP, expert_P, device_P, tokens_NEN):
    for i in range(tokens_NP.shape[0]):
        for p in range(tokens_NP.shape[1]):
            if tokens_NP[i, p] > 0:
                tokens_NEN[i, expert_P[p], device_P[p]] = tokens_NP[i, p]


@jit
def by_node(load_NE, node_start):
    """[G, E]: the load summed over the devices of each node."""
    G = len(node_start) - 1
    load_GE = np.zeros((G, load_NE.shape[1]), np.int64)
    for g in range(G):
        for i in range(node_start[g], node_start[g + 1]):
            for e in range(load_NE.shape[1]):
                load_GE[g, e] += load_NE[i, e]
    return load_GE


@jit
def spread(load_NE, copies, node_of, node_start, flow_PG):
    """Share each hub's flow among the node's devices: own copies first, the rest in proportion. [N, P] int64."""
    expert_P, device_P, start_E, _, _ = copies
    N, E = load_NE.shape
    tokens_NP = np.zeros((N, len(expert_P)), np.int64)
    left_N = np.empty(N, np.int64)
    for e in range(E):
        lo, hi = start_E[e], start_E[e + 1]
        for g in range(len(node_start) - 1):
            first, last = node_start[g], node_start[g + 1]
            total = 0
            for i in range(first, last):
                left_N[i] = load_NE[i, e]
                total += left_N[i]
            if total == 0:
                continue
            for p in range(lo, hi):
                i = device_P[p]
                if node_of[i] == g:
                    own = min(left_N[i], flow_PG[p, g])
                    tokens_NP[i, p] = own
                    left_N[i] -= own
                    total -= own
            for p in range(lo, hi):
                rest = flow_PG[p, g]
                if node_of[device_P[p]] == g:
                    rest -= tokens_NP[device_P[p], p]
                if rest == 0:
                    continue
                # Running totals, rounded down: the parts are whole, add up, and never exceed what is left.
                seen = given = 0
                for i in range(first, last):
                    seen += left_N[i]
                    part = seen * rest // total - given
                    given += part
                    left_N[i] -= part
                    tokens_NP[i, p] += part
                total -= rest
    return tokens_NP


@jit
def traffic(tokens_NP, device_P, node_of):
    """Largest load of a device, largest in or out over intra-node and over inter-node links, crossing tokens."""
    N = tokens_NP.shape[0]
    sums = np.zeros((5, N), np.int64)
    load_N, intra_in, intra_out, inter_in, inter_out = sums
    for i in range(N):
        for p in range(len(device_P)):
            amount = tokens_NP[i, p]
            if amount == 0:
                continue
            j = device_P[p]
            load_N[j] += amount
            if node_of[i] != node_of[j]:
                inter_out[i] += amount
                inter_in[j] += amount
            elif i != j:
                intra_out[i] += amount
                intra_in[j] += amount
    intra = max(intra_in.max(), intra_out.max())
    inter = max(inter_in.max(), inter_out.max())
    return load_N.max(), intra, inter, inter_out.sum()


@jit
def modelled_seconds(peaks, seconds):
    """The total of ``cost`` from the peaks of ``traffic``."""
    return peaks[0] * seconds[0] + max(peaks[1] * seconds[1], peaks[2] * seconds[2])


@jit
def solve(load_NE, copies, node_of, node_start, seconds):
    """The routing of least modelled time found, with that time: (tokens [N, P], seconds).

    Between the balance that local tokens reach alone and the best of all, modelled time is convex in the share
    each device is allowed; its ends and a few shares between are tried.
    """
    N, E = load_NE.shape
    G = len(node_start) - 1
    load_GE = by_node(load_NE, node_start)
    hosted_GE = hosts(copies, node_of, G, E)
    weight_N = np.ones(N, np.int64)
    flow_PG = np.zeros((len(copies[0]), G), np.int64)
    load_N = np.zeros(N, np.int64)
    work = make_work(N, G, E)
    mean = -(-load_NE.sum() // N)

    start_flow(load_GE, copies, node_of, flow_PG, load_N)
    local = balance(copies, node_of, weight_N, hosted_GE, False, mean, flow_PG, load_N, work)
    best_NP = spread(load_NE, copies, node_of, node_start, flow_PG)
    best = modelled_seconds(traffic(best_NP, copies[1], node_of), seconds)
    if local == mean:
        return best_NP, best
    least = balance(copies, node_of, weight_N, hosted_GE, True, mean, flow_PG, load_N, work)
    low, high = least, local
    tries = 4 if N * len(copies[0]) <= 1 << 14 else 1
    for k in range(tries):
        share = low + (high - low) * k // 4
        if share >= local:
            break
        start_flow(load_GE, copies, node_of, flow_PG, load_N)
        push(copies, node_of, flow_PG, load_N, share * weight_N, hosted_GE, False, work)
        balance(copies, node_of, weight_N, hosted_GE, True, share, flow_PG, load_N, work)
        tokens_NP = spread(load_NE, copies, node_of, node_start, flow_PG)
        took = modelled_seconds(traffic(tokens_NP, copies[1], node_of), seconds)
        if took < best:
            best, best_NP = took, tokens_NP
    return best_NP, best
