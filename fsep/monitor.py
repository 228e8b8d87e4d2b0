"""What a logger asks of a model with sharded experts.

Shapes: L layers, N ranks, E experts, P copies.
"""

from __future__ import annotations

import re

import numpy as np
from torch import nn

from fsep.sharding import sharded_layers


def stats(model: nn.Module) -> list[dict]:
    """How the last forward pass was balanced, one dictionary a MoE layer; equal on all ranks, and no collective.

    Args:
        model: an attached model, an engine or a wrapper around one.

    Returns:
        For each layer that has run: ``layer`` (its number in the model), ``load`` (tokens of each expert, [E]),
        ``imbalance`` (largest over mean tokens computed by a rank), ``expert_imbalance`` (the same of experts: what
        it would be with an expert a rank), ``inter_node_fraction`` (share of tokens computed on another node than
        their own), ``route_ms`` (wall-clock, this rank's), ``plan_ms`` (CPU time a layer of the last plan; None
        where the planner does not plan).

    Raises:
        ValueError: no sharded experts.
    """
    layers = sharded_layers(model)
    run = layers[0].runtime
    node_of, found = run.topology.node_of, []
    for layer in layers:
        if layer.index not in run.records:
            continue
        record = run.records[layer.index]
        copies, tokens_NP = record.layout.copies, record.tokens_NP
        device_N = np.bincount(copies.device, tokens_NP.sum(0), run.topology.devices)
        load_E = record.load_NE.sum(0)
        total = load_E.sum()
        crossing = tokens_NP[node_of[:, None] != node_of[copies.device]].sum()
        number = re.search(r"layers\.(\d+)\.", layer.name)
        found.append(
            {
                "layer": int(number[1]),
                "load": load_E.tolist(),
                "imbalance": _imbalance(device_N),
                "expert_imbalance": _imbalance(load_E),
                "inter_node_fraction": float(crossing / total) if total else 0.0,
                "route_ms": 1e3 * record.route_s,
                "plan_ms": getattr(run.planner, "plan_ms", None),
            }
        )
    return found


def _imbalance(load: np.ndarray) -> float:
    return float(load.max() / load.mean()) if load.any() else 1.0
