"""The modelled time of one MoE layer's step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsep.topology import Topology


@dataclass(frozen=True)
class Cost:
    """What ``cost`` returns. ``imbalance`` is largest over mean device load (1 without tokens);
    ``inter_node_fraction`` is the share of tokens computed on another node than their own."""

    compute_s: float
    comm_s: float
    total_s: float
    imbalance: float
    inter_node_fraction: float


def cost(tokens: np.ndarray, topology: Topology) -> Cost:
    """Price a routing ``tokens`` [N, E, N] (source device, expert, computing device).

    ``compute_s = 3 * max_j load_j / tokens_per_second``: the slowest device, forward once and backward twice.
    ``comm_s = 4 * bytes_per_token * max(intra / intra_bytes_per_s, inter / inter_bytes_per_s)``: dispatch and
    combine, forward and backward, each move the same tokens; ``intra`` is the most tokens any one device sends or
    receives inside its node (to another device), ``inter`` the same across nodes; the two kinds of link work at the
    same time. ``total_s = compute_s + comm_s``.

    Raises:
        ValueError: a shape that is not [N, E, N].
    """
    tokens = np.asarray(tokens)
    N = topology.devices
    if tokens.ndim != 3 or (tokens.shape[0], tokens.shape[2]) != (N, N):
        raise ValueError(f"tokens has shape {tokens.shape}: give [devices, experts, devices] with {N} devices")
    return cost_of_pairs(tokens.sum(1, dtype=np.int64), topology)


def cost_of_pairs(sent_NN: np.ndarray, topology: Topology) -> Cost:
    """As ``cost``, from tokens sent from device i to device j, [N, N]."""
    node = topology.node_of
    same_node = node[:, None] == node[None, :]
    cross_NN = np.where(same_node, 0, sent_NN)
    local_NN = np.where(same_node, sent_NN, 0)
    np.fill_diagonal(local_NN, 0)
    intra = max(local_NN.sum(0).max(), local_NN.sum(1).max())
    inter = max(cross_NN.sum(0).max(), cross_NN.sum(1).max())
    load_N, total = sent_NN.sum(0), sent_NN.sum()
    compute, intra_s, inter_s = np.array([load_N.max(), intra, inter]) * topology.seconds
    comm = max(intra_s, inter_s)
    return Cost(
        compute_s=float(compute),
        comm_s=float(comm),
        total_s=float(compute + comm),
        imbalance=float(load_N.max() * topology.devices / total) if total else 1.0,
        inter_node_fraction=float(cross_NN.sum() / total) if total else 0.0,
    )
