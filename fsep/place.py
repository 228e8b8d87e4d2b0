"""Greedy placement of whole copies: how many an expert gets, and on which device each goes.

The building blocks of the published planners, and candidates for ours where its own construction has too few slots.

Shapes: N devices, E experts.
"""

from __future__ import annotations

import numpy as np

from fsep.jit import jit


@jit
def apportion(total_E, count_E, most, limit):
    """Hand out copies up to ``most`` in all, each to the expert with the most load a copy, ``limit`` an expert."""
    count_E = count_E.copy()
    for _ in range(most - count_E.sum()):
        best = -1
        for e in range(len(total_E)):
            if count_E[e] < limit and (best < 0 or total_E[e] * count_E[best] > total_E[best] * count_E[e]):
                best = e
        if best < 0:
            break
        count_E[best] += 1
    return count_E


@jit
def place(total_E, count_E, experts, devices, slots, replicas_EN):
    """Copies of ``experts`` on ``devices``, most load a copy first, each on the least loaded that can take it."""
    load_N = np.zeros(replicas_EN.shape[1])
    free_N = np.full(replicas_EN.shape[1], slots)
    share_E = total_E / np.maximum(count_E, 1)
    for k in np.argsort(-share_E[experts], kind="mergesort"):
        e = experts[k]
        for _ in range(count_E[e]):
            best = -1
            for j in devices:
                if free_N[j] > 0 and not replicas_EN[e, j] and (best < 0 or load_N[j] < load_N[best]):
                    best = j
            if best < 0:
                break
            replicas_EN[e, best] = 1
            load_N[best] += share_E[e]
            free_N[best] -= 1


@jit
def place_over_nodes(total_E, count_E, node_of, slots, replicas_EN):
    """As ``place``, each copy on one of the nodes with the fewest copies of its expert."""
    N = len(node_of)
    load_N = np.zeros(N)
    free_N = np.full(N, slots)
    share_E = total_E / np.maximum(count_E, 1)
    on_node = np.zeros((len(total_E), node_of[-1] + 1), np.int64)
    for e in np.argsort(-share_E, kind="mergesort"):
        for _ in range(count_E[e]):
            best = -1
            for j in range(N):
                if free_N[j] == 0 or replicas_EN[e, j]:
                    continue
                rarer = on_node[e, node_of[j]] - on_node[e, node_of[best]] if best >= 0 else -1
                if rarer < 0 or (rarer == 0 and load_N[j] < load_N[best]):
                    best = j
            if best < 0:
                break
            replicas_EN[e, best] = 1
            on_node[e, node_of[best]] += 1
            load_N[best] += share_E[e]
            free_N[best] -= 1


@jit
def even_counts(total_E, most, limit):
    """``most`` copies split evenly over the experts, what is left over to the most loaded, ``limit`` an expert."""
    E = len(total_E)
    count_E = np.full(E, most // E)
    for e in np.argsort(-total_E, kind="mergesort")[: most % E]:
        count_E[e] += 1
    return np.minimum(count_E, limit)
