"""K-means of documents, plain and balanced by tokens, on features that may lie in a file.

Shape suffixes: D documents, B a block of documents, S feature dimensions, K clusters.
"""

from collections.abc import Callable

import numpy as np
from scipy import sparse
from sklearn.cluster import KMeans, MiniBatchKMeans

from disco.balance import priced_assignment
from disco.progress import tracked

SAMPLE = 50_000  # documents that the first centroids of a stream come from
BLOCK = 16_384


def kmeans(x_DS: np.ndarray, k: int, *, n_init: int, minibatch_above: int, seed: int) -> np.ndarray:
    """Centroids [K, S] float32: Lloyd's algorithm, the best of `n_init` starts.

    Beyond `minibatch_above` documents it runs on a sample, and mini-batches of all documents in random order then
    move its centroids (Sculley, Web-scale k-means clustering, 2010), so that only a batch is held.
    """
    rng = np.random.default_rng([seed, 3])
    streams = len(x_DS) > minibatch_above
    rows = slice(None)
    if streams:
        rows = np.sort(rng.choice(len(x_DS), max(k, min(SAMPLE, minibatch_above)), replace=False))
    fitted = KMeans(k, n_init=n_init, random_state=seed).fit(x_DS[rows])
    if streams:
        moving = MiniBatchKMeans(k, init=fitted.cluster_centers_, n_init=1, reassignment_ratio=0, random_state=seed)
        order_D = rng.permutation(len(x_DS))
        for start in range(0, len(order_D), BLOCK):
            batch = np.sort(order_D[start : start + BLOCK])
            if len(batch) >= k:  # scikit-learn wants that many
                moving.partial_fit(x_DS[batch])
        fitted = moving
    return np.ascontiguousarray(fitted.cluster_centers_, np.float32)


def balanced_kmeans(
    x_DS: np.ndarray,
    centroids_KS: np.ndarray,
    tokens_D: np.ndarray,
    *,
    rounds: int = 10,
    gain: float = 1e-3,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Labels [D] of equal tokens a cluster and centroids [K, S]: assignment and token-weighted means in turn.

    Ends after `rounds`, or when a round lowers the token-weighted squared distance by less than a share `gain`.
    """
    weight_D = np.asarray(tokens_D, np.float64)
    best, best_cost, prices_K = None, np.inf, None
    for _ in tracked(range(rounds), "balanced assignment", progress, total=rounds, unit="rounds at most"):
        squared_DK = squared_distances(x_DS, centroids_KS)
        label_D, prices_K = priced_assignment(squared_DK, weight_D, prices_K=prices_K)
        cost = float(weight_D @ squared_DK[np.arange(len(label_D)), label_D])
        if cost < best_cost:
            best, improved = (label_D, centroids_KS), best_cost - cost > gain * cost
            best_cost = cost
        if not improved:
            break
        centroids_KS = _means(x_DS, label_D, weight_D, centroids_KS)
    return best


def _means(x_DS: np.ndarray, label_D: np.ndarray, weight_D: np.ndarray, old_KS: np.ndarray) -> np.ndarray:
    """Weighted mean of each cluster's rows [K, S] float32; a cluster without weight keeps its old centroid."""
    k = len(old_KS)
    sums_KS, weight_K = np.zeros(old_KS.shape), np.bincount(label_D, weight_D, k)
    for start in range(0, len(x_DS), BLOCK):
        labels, weights = label_D[start : start + BLOCK], weight_D[start : start + BLOCK]
        member_KB = sparse.csr_matrix((weights, (labels, np.arange(len(labels)))), shape=(k, len(labels)))
        sums_KS += member_KB @ x_DS[start : start + BLOCK]
    means_KS = sums_KS / np.where(weight_K > 0, weight_K, 1)[:, None]
    return np.where(weight_K[:, None] > 0, means_KS, old_KS).astype(np.float32)


def squared_distances(x_DS: np.ndarray, centroids_KS: np.ndarray) -> np.ndarray:
    """Squared Euclidean distances [D, K] float32, by differences: a row's value depends on that row alone."""
    squared_DK = np.empty((len(x_DS), len(centroids_KS)), np.float32)
    for start in range(0, len(x_DS), BLOCK):
        block_BS = np.asarray(x_DS[start : start + BLOCK])
        for cluster_, centroid_S in enumerate(centroids_KS):
            difference_BS = block_BS - centroid_S
            squared_DK[start : start + BLOCK, cluster_] = np.square(difference_BS, out=difference_BS).sum(1)
    return squared_DK
