"""Which expert serves which cluster: routers watched during a forward pass, and what their counts say.

Shape suffixes: N positions, K clusters, L MoE layers, E experts; one position counts once for each of its
top-k experts.
"""

import numpy as np
import torch
from torch import nn

from disco.family import moe_blocks, num_experts

DEAD = 0.01  # of an even share: an expert that gets less is called dead


class RouterCounts:
    """Counts the choices of every router of `model` while the block runs, by the cluster of each position.

    Call `add(clusters_N)` after each forward pass with the cluster of each position, -1 for those that do not
    count. `counts_LKE` is int64.
    """

    def __init__(self, model: nn.Module, clusters: int):
        self._routers = [block.router for block in moe_blocks(model)]
        experts = num_experts(model.config) if self._routers else 0
        self.counts_LKE = np.zeros((len(self._routers), clusters, experts), dtype=np.int64)
        self._chosen: dict[int, torch.Tensor] = {}

    def __enter__(self) -> "RouterCounts":
        self._hooks = [
            router.register_forward_hook(lambda module, args, output, layer=layer: self._keep(layer, output))
            for layer, router in enumerate(self._routers)
        ]
        return self

    def __exit__(self, *_) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, layer: int, output: tuple) -> None:
        self._chosen[layer] = output[2].detach()  # logits, weights, indices [N, top-k]

    def add(self, clusters_N: np.ndarray) -> None:
        layers, clusters, experts = self.counts_LKE.shape
        kept_N = clusters_N >= 0
        for layer, chosen in self._chosen.items():
            chosen_NT = chosen.reshape(len(clusters_N), -1).cpu().numpy()[kept_N]
            cells = clusters_N[kept_N, None] * experts + chosen_NT
            counts = np.bincount(cells.ravel(), minlength=clusters * experts)
            self.counts_LKE[layer] += counts.reshape(clusters, experts)
        self._chosen.clear()


def summary(counts_LKE: np.ndarray) -> dict[str, list]:
    """What the report shows of the counts, a value a layer.

    entropy: of the experts' shares, divided by ln E: 1 is an even load, 0 a single expert.
    specialisation: mutual information of cluster and expert over the smaller of ln K and ln E (0: every cluster
    uses the experts alike; 1: the cluster settles the expert, or the other way round).
    dead: experts that get less than 1 % of an even share.
    """
    layers, clusters, experts = counts_LKE.shape
    result = {"counts": counts_LKE.tolist(), "entropy": [], "specialisation": [], "dead": []}
    for counts_KE in counts_LKE:
        share_KE = counts_KE / max(counts_KE.sum(), 1)
        share_E, share_K = share_KE.sum(0), share_KE.sum(1)
        information = _entropy(share_E) + _entropy(share_K) - _entropy(share_KE)
        most = np.log(min(clusters, experts))
        result["entropy"].append(_entropy(share_E) / np.log(experts) if experts > 1 else 1.0)
        result["specialisation"].append(max(0.0, information / most) if most > 0 else 0.0)
        result["dead"].append(np.flatnonzero(share_E < DEAD / experts).tolist())
    return result


def _entropy(shares: np.ndarray) -> float:
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum())
