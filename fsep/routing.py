"""Which copy computes which tokens.

Shapes: N devices, E experts, G nodes, P copies, R shipments (source device, copy, tokens).
"""

from __future__ import annotations

import numpy as np

from fsep.check import check_load
from fsep.flow import balance, device_loads, make_work, node_ranges, push, release, start_flow
from fsep.jit import jit
from fsep.layout import Layout
from fsep.topology import Topology

# Devices times copies up to which routing tries more than two balances.
SMALL = 1 << 14


def route(load: np.ndarray, layout: Layout, topology: Topology) -> np.ndarray:
    """Send every token to a copy of its expert, in little modelled time.

    Devices are balanced by maximum flow, so the largest load is the integer optimum for the layout, or is larger
    only where tokens would have to cross between nodes at a higher price than the balance is worth (see ``cost``).
    Deterministic: equal arguments give equal tokens on every rank.

    Args:
        load: [N, E] whole numbers, tokens that device i has for expert e.

    Returns:
        tokens [N, E, N] int32: of device i for expert e sent to device j; sums over j equal ``load``. At a thousand
        devices this array takes a gigabyte: ``route_copies`` gives the same compactly.

    Raises:
        ValueError: a load of another shape, negative, not finite or not whole; a layout of other sizes.
    """
    source_R, copy_R, tokens_R = _routed(load, layout, topology)
    copies = layout.copies
    tokens = np.zeros((layout.devices, layout.experts, layout.devices), np.int32)
    _scatter(source_R, copies.expert[copy_R], copies.device[copy_R], tokens_R, tokens)
    return tokens


def route_copies(load: np.ndarray, layout: Layout, topology: Topology) -> np.ndarray:
    """As ``route``, compact: [N, P] int64, tokens of device i sent to copy p of ``layout.copies``."""
    source_R, copy_R, tokens_R = _routed(load, layout, topology)
    tokens_NP = np.zeros((layout.devices, len(layout.copies.expert)), np.int64)
    _scatter_copies(source_R, copy_R, tokens_R, tokens_NP)
    return tokens_NP


def _routed(load: np.ndarray, layout: Layout, topology: Topology) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    load_NE = check_load(load, topology, experts=layout.experts, whole=True)
    if layout.devices != topology.devices:
        raise ValueError(
            f"layout has {layout.devices} devices but topology.devices is {topology.devices}: make them agree"
        )
    return solve(load_NE, layout.copies, topology.node_of, topology.node_start, topology.seconds)[0]


@jit
def _scatter(source_R, expert_R, device_R, tokens_R, tokens_NEN):
    for r in range(len(source_R)):
        tokens_NEN[source_R[r], expert_R[r], device_R[r]] += tokens_R[r]


@jit
def _scatter_copies(source_R, copy_R, tokens_R, tokens_NP):
    for r in range(len(source_R)):
        tokens_NP[source_R[r], copy_R[r]] += tokens_R[r]


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
def spread(load_NE, copies, ranges, node_of, node_start, home_P, away_P):
    """Who sends what, when copies compute ``home_P + away_P`` tokens: shipments (source [R], copy [R], tokens [R]).

    A device serves itself first, then its node, and what a node can't take crosses. Crossing tokens are drawn from
    a node's devices in proportion; they land on the copies with ``away_P`` or, where home tokens were released, on
    the node's copies in proportion.
    """
    expert_P, device_P, start_E, _, _ = copies
    _, last_P = ranges
    N, E = load_NE.shape
    G, P = len(node_start) - 1, len(expert_P)
    most = N * E + 3 * P + G * E
    source_R, copy_R, tokens_R = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    R = 0
    room_P = home_P + away_P
    left_N = np.empty(N, np.int64)
    for e in range(E):
        left_N[:] = load_NE[:, e]
        p = start_E[e]
        while p < start_E[e + 1]:
            lo, hi = p, last_P[p]
            p = hi
            g = node_of[device_P[lo]]
            first, last = node_start[g], node_start[g + 1]
            tokens, room = left_N[first:last].sum(), room_P[lo:hi].sum()
            kept = min(tokens, room)
            if kept == 0:
                continue
            stay = _part(left_N[first:last], tokens, kept)
            take = home_P[lo:hi].copy() if home_P[lo:hi].sum() == kept else _part(room_P[lo:hi], room, kept)
            left_N[first:last] -= stay
            room_P[lo:hi] -= take
            for q in range(lo, hi):
                own = min(stay[device_P[q] - first], take[q - lo])
                if own > 0:
                    source_R[R], copy_R[R], tokens_R[R] = device_P[q], q, own
                    R += 1
                    stay[device_P[q] - first] -= own
                    take[q - lo] -= own
            i = 0
            for q in range(lo, hi):
                while take[q - lo] > 0:
                    while stay[i] == 0:
                        i += 1
                    part = min(stay[i], take[q - lo])
                    source_R[R], copy_R[R], tokens_R[R] = first + i, q, part
                    R += 1
                    stay[i] -= part
                    take[q - lo] -= part
        q = start_E[e]
        for i in range(N):
            while left_N[i] > 0:
                while room_P[q] == 0:
                    q += 1
                part = min(left_N[i], room_P[q])
                source_R[R], copy_R[R], tokens_R[R] = i, q, part
                R += 1
                left_N[i] -= part
                room_P[q] -= part
    return source_R[:R], copy_R[:R], tokens_R[:R]


@jit
def _part(whole, total, wanted):
    """``wanted`` of ``total = sum(whole)`` in proportion: running totals rounded down, so the parts are whole."""
    part = np.empty(len(whole), np.int64)
    seen = given = 0
    for k in range(len(whole)):
        seen += whole[k]
        part[k] = seen * wanted // total - given
        given += part[k]
    return part


@jit
def traffic(shipments, device_P, node_of):
    """Largest load of a device, largest in or out over intra-node and over inter-node links, crossing tokens."""
    source_R, copy_R, tokens_R = shipments
    load_N, intra_in, intra_out, inter_in, inter_out = np.zeros((5, len(node_of)), np.int64)
    for r in range(len(source_R)):
        i, j, tokens = source_R[r], device_P[copy_R[r]], tokens_R[r]
        load_N[j] += tokens
        if node_of[i] != node_of[j]:
            inter_out[i] += tokens
            inter_in[j] += tokens
        elif i != j:
            intra_out[i] += tokens
            intra_in[j] += tokens
    intra = max(intra_in.max(), intra_out.max())
    inter = max(inter_in.max(), inter_out.max())
    return load_N.max(), intra, inter, inter_out.sum()


@jit
def modelled_seconds(peaks, seconds):
    """The total of ``cost`` from the peaks of ``traffic``."""
    return peaks[0] * seconds[0] + max(peaks[1] * seconds[1], peaks[2] * seconds[2])


@jit
def solve(load_NE, copies, node_of, node_start, seconds):
    """The routing of least modelled time found, with that time: (shipments, seconds).

    Tried are the best balance with tokens at home and the best of all; at small sizes also the least traffic
    between nodes and then the best balance, and three balances in between: modelled time is convex in the load.
    """
    N, E = load_NE.shape
    load_GE = by_node(load_NE, node_start)
    ranges = node_ranges(copies, node_of)
    weight_N = np.ones(N, np.int64)
    work = make_work(N, E, len(copies[0]))
    mean = -(-load_NE.sum() // N)
    small = N * len(copies[0]) <= SMALL

    home_P, away_P = start_flow(load_GE, copies, node_of, ranges)
    load_N = device_loads(copies, home_P, away_P, N)
    local = balance(copies, ranges, weight_N, mean, home_P, away_P, load_N, work)
    best_R = spread(load_NE, copies, ranges, node_of, node_start, home_P, away_P)
    peaks = traffic(best_R, copies[1], node_of)
    best = modelled_seconds(peaks, seconds)
    if len(node_start) == 2:
        return best_R, best
    if small and peaks[2] * seconds[2] > peaks[1] * seconds[1]:
        # Links between nodes decide: even out what arrives over them, then what stays at home around it.
        nothing_P = np.zeros_like(home_P)
        even_P = away_P.copy()
        arrive_N = device_loads(copies, nothing_P, even_P, N)
        balance(copies, ranges, weight_N, -(-even_P.sum() // N), nothing_P, even_P, arrive_N, work)
        around_P = home_P.copy()
        around_N = device_loads(copies, around_P, even_P, N)
        balance(copies, ranges, weight_N, mean, around_P, nothing_P, around_N, work)
        best, best_R = _better(
            load_NE, copies, ranges, node_of, node_start, seconds, around_P, even_P, best, best_R
        )
    if local == mean:
        return best_R, best
    release(home_P, away_P)
    least = balance(copies, ranges, weight_N, mean, home_P, away_P, load_N, work)
    for k in range(4 if small else 1):
        share = least + (local - least) * k // 4
        if share >= local:
            break
        if k > 0:
            home_P, away_P = start_flow(load_GE, copies, node_of, ranges)
            load_N = device_loads(copies, home_P, away_P, N)
            push(copies, ranges, home_P, away_P, load_N, share * weight_N, work)
            release(home_P, away_P)
            balance(copies, ranges, weight_N, share, home_P, away_P, load_N, work)
        best, best_R = _better(load_NE, copies, ranges, node_of, node_start, seconds, home_P, away_P, best, best_R)
    return best_R, best


@jit
def _better(load_NE, copies, ranges, node_of, node_start, seconds, home_P, away_P, best, best_R):
    """The quicker of a routing known and of one given by its flow: (seconds, shipments)."""
    shipments = spread(load_NE, copies, ranges, node_of, node_start, home_P, away_P)
    took = modelled_seconds(traffic(shipments, copies[1], node_of), seconds)
    return (took, shipments) if took < best else (best, best_R)
