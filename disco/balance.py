"""Balanced assignment: documents to clusters of equal token totals at the least total distance.

The assignment is the transport problem

    minimise  sum_dk x_DK[d, k] * cost_DK[d, k]   with  sum_k x = weight_D[d],  sum_d x = sum(weight_D) / K.

Its dual has one price a cluster: given the best prices p_K, every document sits where `cost + p` is least, and
only documents at a tie (at most K - 1 of them in a vertex solution) are split. So a large problem is cut down
to its contested documents: prices come from Newton's method on the entropic dual, whose temperature is lowered
step by step; documents with a clear margin are fixed; the linear programme (HiGHS) settles the rest. Its own
dual prices then prove the fixed documents right, or name those that must join the programme. The split
documents are rounded along the tree that they form with the clusters, which keeps every cluster within the
largest document of the mean (see `_round`).

Shape suffixes: D documents, K clusters, B a block of documents.
"""

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

CONTESTED = 2_000  # closest calls that the linear programme settles
BLOCK = 65_536


def balanced_assignment(
    distances_DK: np.ndarray, weights_D: np.ndarray, *, contested: int = CONTESTED
) -> np.ndarray:
    """Labels [D] int64 that minimise `sum(weights * distances[label])` under equal weight a cluster.

    distances_DK: [D, K] cost of a unit of weight (squared distance to each centroid, say), finite.
    weights_D:    [D] tokens a document, >= 0.
    contested:    documents that enter the linear programme at first; with D or more it is solved whole.

    Every cluster's total lies within max(weights) of the mean. Raises ValueError on shapes that do not match,
    values that are not finite, negative weights, no cluster or no document.
    """
    return priced_assignment(distances_DK, weights_D, contested=contested)[0]


def priced_assignment(
    distances_DK: np.ndarray,
    weights_D: np.ndarray,
    *,
    contested: int = CONTESTED,
    prices_K: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`balanced_assignment` and the clusters' prices [K]; the prices of a similar problem may start it."""
    cost_DK, weight_D = _checked(distances_DK, weights_D)
    D, K = cost_DK.shape
    if K == 1 or not weight_D.any():
        return cost_DK.argmin(1), np.zeros(K)
    capacity_K = np.full(K, weight_D.sum() / K)
    least = max(contested, 16 * K)
    open_D = np.ones(D, bool)
    label_D = np.zeros(D, np.int64)
    if D > least:
        cost_DK, label_D, margin_D, open_D = _contested(cost_DK, weight_D, capacity_K, least, prices_K)
    open_D &= weight_D > 0
    while True:
        fixed_K = np.bincount(label_D[~open_D], weight_D[~open_D], K)
        part_BK, prices_K = _transport(cost_DK[open_D], weight_D[open_D], capacity_K - fixed_K)
        cheapest_D, gain_D = _cheapest(cost_DK, prices_K)
        wrong = (cheapest_D != label_D) & (gain_D > 1e-9 * np.ptp(cost_DK)) & ~open_D & (weight_D > 0)
        if not wrong.any():
            break
        # Poor prices call many documents wrong: let in the closest calls first, doubling at most.
        wrong = np.flatnonzero(wrong)
        open_D[wrong[np.argsort(margin_D[wrong], kind="stable")][: open_D.sum()]] = True
    label_D[open_D] = _round(part_BK, weight_D[open_D])
    label_D[weight_D == 0] = cost_DK[weight_D == 0].argmin(1)
    return _fill_empty(label_D, weight_D, cost_DK), prices_K


def _contested(
    cost_DK: np.ndarray, weight_D: np.ndarray, capacity_K: np.ndarray, least: int, start_K: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Costs [D, K], cheapest clusters [D] under good prices, margins [D], and the mask [D] of closest calls.

    Where many documents tie (equal vectors, say), no price tells them apart and all would be contested: then
    the costs come back with seeded noise of a hundredth of their spread, which does.
    """
    # Prices must be good enough for the contested documents to make up for what is left uneven.
    tolerance = min(1e-2, 0.1 * least / len(cost_DK))
    starts = (None,) if start_K is None else (start_K, None)
    for attempt, start in enumerate((*starts, None)):
        if attempt == len(starts):
            noise_DK = np.random.default_rng(0).random(cost_DK.shape)
            cost_DK = cost_DK + 0.01 * (_spread(cost_DK) or 1.0) * noise_DK
        prices_K = entropic_prices(cost_DK, weight_D, capacity_K, start, tolerance=tolerance)
        label_D, margin_D = _cheapest(cost_DK, prices_K)
        open_D = _closest_calls(label_D, margin_D, weight_D, capacity_K, least)
        if open_D.sum() <= 4 * least:
            break
    return cost_DK, label_D, margin_D, open_D


def _spread(cost_DK: np.ndarray) -> float:
    """How much dearer the mean cluster is than the cheapest, over documents."""
    return float(np.mean(cost_DK.mean(1) - cost_DK.min(1)))


def even_cut(order_D: np.ndarray, weights_D: np.ndarray, clusters: int) -> np.ndarray:
    """Labels [D] int64 that cut documents, taken in the given order, into runs of equal weight.

    A document belongs to the run that its middle falls in, so every run lies within max(weights) of the mean.
    With a random order this is a balanced random split.
    """
    weight_D = np.asarray(weights_D, np.float64)[order_D]
    total = weight_D.sum()
    if not total:
        weight_D, total = np.ones_like(weight_D), float(len(weight_D))
    middle_D = np.cumsum(weight_D) - weight_D / 2
    label_D = np.empty(len(weight_D), np.int64)
    label_D[order_D] = np.minimum((middle_D * (clusters / total)).astype(np.int64), clusters - 1)
    return _fill_empty(label_D, np.asarray(weights_D), np.zeros((1, clusters)))


def _fill_empty(label_D: np.ndarray, weight_D: np.ndarray, cost_DK: np.ndarray) -> np.ndarray:
    """Give each cluster without weight the cheapest document that another can spare, if there is one.

    Only documents about as heavy as a whole cluster leave one empty: the largest then outweighs the mean, so
    that taking a document from a cluster of several keeps every cluster within the largest of the mean.
    """
    holding_K = np.bincount(label_D[weight_D > 0], minlength=cost_DK.shape[1])
    for empty in np.flatnonzero(holding_K == 0):
        spare = np.flatnonzero((weight_D > 0) & (holding_K[label_D] > 1))
        if not len(spare):
            break
        rows = spare if len(cost_DK) > 1 else np.zeros(len(spare), np.int64)
        rise = weight_D[spare] * (cost_DK[rows, empty] - cost_DK[rows, label_D[spare]])
        moved = spare[np.argmin(rise)]
        holding_K[[label_D[moved], empty]] += (-1, 1)
        label_D[moved] = empty
    return label_D


def _checked(distances_DK: np.ndarray, weights_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cost_DK, weight_D = np.asarray(distances_DK), np.asarray(weights_D, np.float64)
    if cost_DK.ndim != 2 or not cost_DK.size:
        raise ValueError(f"distances have shape {cost_DK.shape}: give documents x clusters, one at least of each")
    if weight_D.shape != cost_DK.shape[:1]:
        raise ValueError(f"weights have shape {weight_D.shape} for {len(cost_DK)} documents: give one each")
    if not np.isfinite(cost_DK).all():
        row = int(np.flatnonzero(~np.isfinite(cost_DK).all(1))[0])
        raise ValueError(f"distances of document {row} are {cost_DK[row]}: they must be finite")
    if not (np.isfinite(weight_D) & (weight_D >= 0)).all():
        row = int(np.flatnonzero(~(np.isfinite(weight_D) & (weight_D >= 0)))[0])
        raise ValueError(f"weight of document {row} is {weight_D[row]}: it must be finite and not negative")
    return cost_DK, weight_D


def entropic_prices(
    cost_DK: np.ndarray,
    weight_D: np.ndarray,
    capacity_K: np.ndarray,
    start_K: np.ndarray | None = None,
    *,
    tolerance: float = 1e-3,
) -> np.ndarray:
    """Prices [K] that bring every cluster near its capacity when documents choose `argmin(cost + price)`.

    Maximises `sum_d w_d * softmin_t(cost_d + p) - capacity . p` over p by damped Newton steps at falling
    temperature t (the dual of entropic optimal transport: Peyre and Cuturi, Computational Optimal Transport,
    2019, section 4.4). Each step reads all costs once; only a block is held beside them.
    """
    spread = _spread(cost_DK) or 1.0
    K = cost_DK.shape[1]
    price_K = np.zeros(K) if start_K is None else start_K - start_K.mean()
    for level in range(0 if start_K is None else 3, 8):
        temperature = spread * 3.0**-level
        value, load_K, hessian_KK = _softmin(cost_DK, weight_D, capacity_K, price_K, temperature)
        for _ in range(20):
            gradient_K = load_K - capacity_K
            if np.abs(gradient_K).max() < tolerance * capacity_K.min():
                break
            ridge = 1e-9 * np.trace(hessian_KK) + 1e-300
            step_K = np.linalg.solve(hessian_KK + ridge * np.eye(K) + ridge, gradient_K)
            step_K -= step_K.mean()
            # A price that moves by many temperatures has left the region where the quadratic model holds.
            step_K *= min(1.0, 3 * temperature / max(np.abs(step_K).max(), 1e-300))
            for _ in range(30):
                trial = _softmin(cost_DK, weight_D, capacity_K, price_K + step_K, temperature)
                if trial[0] >= value - 1e-12 * abs(value):
                    break
                step_K /= 2
            else:
                break
            price_K = price_K + step_K
            value, load_K, hessian_KK = trial
    return price_K


def _softmin(
    cost_DK: np.ndarray, weight_D: np.ndarray, capacity_K: np.ndarray, price_K: np.ndarray, temperature: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """The entropic dual's value, the load [K] of each cluster and the negated Hessian [K, K]."""
    K = len(price_K)
    value, load_K, second_KK = -float(capacity_K @ price_K), np.zeros(K), np.zeros((K, K))
    for start in range(0, len(cost_DK), BLOCK):
        share_BK = cost_DK[start : start + BLOCK] + price_K
        weight_B = weight_D[start : start + BLOCK]
        least_B = share_BK.min(1)
        share_BK = np.exp((least_B[:, None] - share_BK) / temperature)
        total_B = share_BK.sum(1)
        value += float(weight_B @ (least_B - temperature * np.log(total_B)))
        share_BK /= total_B[:, None]
        weighted_BK = share_BK * weight_B[:, None]
        load_K += weighted_BK.sum(0)
        second_KK += weighted_BK.T @ share_BK
    return value, load_K, (np.diag(load_K) - second_KK) / temperature


def _cheapest(cost_DK: np.ndarray, price_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each document's cheapest cluster [D] at these prices, and by how much it beats the second [D]."""
    label_D, margin_D = np.empty(len(cost_DK), np.int64), np.empty(len(cost_DK))
    for start in range(0, len(cost_DK), BLOCK):
        priced_BK = cost_DK[start : start + BLOCK] + price_K
        two_B2 = np.partition(priced_BK, 1, axis=1)[:, :2]
        label_D[start : start + BLOCK] = priced_BK.argmin(1)
        margin_D[start : start + BLOCK] = two_B2[:, 1] - two_B2[:, 0]
    return label_D, margin_D


def _closest_calls(
    label_D: np.ndarray, margin_D: np.ndarray, weight_D: np.ndarray, capacity_K: np.ndarray, least: int
) -> np.ndarray:
    """Mask [D] of the closest calls: `least` or more, until the others fit into every cluster."""
    order_D = np.argsort(margin_D, kind="stable")
    count = min(least, len(order_D))
    while True:
        mask_D = np.zeros(len(order_D), bool)
        mask_D[order_D[:count]] = True
        fixed_K = np.bincount(label_D[~mask_D], weight_D[~mask_D], len(capacity_K))
        if count == len(order_D) or (fixed_K <= capacity_K).all():
            return mask_D
        count = min(2 * count, len(order_D))


def _transport(cost_BK: np.ndarray, weight_B: np.ndarray, capacity_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vertex solution [B, K] of the transport problem, and the prices [K] of its clusters."""
    B, K = cost_BK.shape
    # In units of the mean document and the mean cost the solver's absolute tolerances fit.
    unit, cost_unit = weight_B.mean(), float(np.abs(cost_BK).mean()) or 1.0
    rows = np.concatenate([np.repeat(np.arange(B), K), B + np.tile(np.arange(K), B)])
    columns = np.tile(np.arange(B * K), 2)
    # The last cluster's capacity follows from the others and is left out.
    keep = rows < B + K - 1
    matrix = sparse.csr_matrix((np.ones(keep.sum()), (rows[keep], columns[keep])), shape=(B + K - 1, B * K))
    supply = np.concatenate([weight_B, capacity_K[:-1]]) / unit
    result = linprog((cost_BK / cost_unit).ravel(), A_eq=matrix, b_eq=supply, method="highs-ds")
    if result.status != 0:
        raise RuntimeError(f"transport problem of {B} documents and {K} clusters: {result.message}")
    prices_K = -np.append(result.eqlin.marginals[B:], 0.0) * cost_unit
    return result.x.reshape(B, K) * unit, prices_K


def _round(part_BK: np.ndarray, weight_B: np.ndarray) -> np.ndarray:
    """Labels [B] of a vertex solution whose split documents each go whole to one of their clusters.

    Split documents and clusters form a forest. Walking it from a root cluster, each split document below a
    cluster joins it while the cluster is not above its capacity, and goes on to the document's next cluster
    otherwise: the running difference of every cluster stays within the largest document.
    """
    label_B = part_BK.argmax(1)
    held_BK = part_BK > 1e-6 * weight_B[:, None]
    split = np.flatnonzero(held_BK.sum(1) > 1)
    clusters_of = {int(document): np.flatnonzero(held_BK[document]) for document in split}
    difference_K = np.zeros(part_BK.shape[1])
    seen_clusters: set[int] = set()
    for root in range(part_BK.shape[1]):
        stack = [] if root in seen_clusters else [root]
        while stack:
            cluster = stack.pop()
            seen_clusters.add(cluster)
            below = [document for document, clusters in clusters_of.items() if cluster in clusters]
            for document in below:
                clusters = clusters_of.pop(document)
                following = [int(other) for other in clusters if other != cluster]
                joins = difference_K[cluster] <= 0
                label_B[document] = cluster if joins else following[part_BK[document, following].argmax()]
                difference_K[clusters] -= part_BK[document, clusters]
                difference_K[label_B[document]] += weight_B[document]
                stack += following
    return label_B
