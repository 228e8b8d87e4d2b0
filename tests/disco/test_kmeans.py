"""K-means of documents: against scikit-learn, against plain differences, and better with every round."""

import numpy as np
import pytest
from sklearn.cluster import KMeans

from disco.kmeans import balanced_kmeans, kmeans, squared_distances


@pytest.mark.parametrize("minibatch_above", [10**6, 1000])
def test_kmeans_whole_and_streamed(minibatch_above):
    rng = np.random.default_rng(0)
    centre_KS = 4 * rng.normal(size=(5, 8))
    x_DS = (centre_KS[np.arange(20_000) % 5] + rng.normal(size=(20_000, 8))).astype(np.float32)
    found_KS = kmeans(x_DS, 5, n_init=3, minibatch_above=minibatch_above, seed=0)
    inertia = squared_distances(x_DS, found_KS).min(1).sum()
    assert inertia < 1.01 * KMeans(5, n_init=5, random_state=1).fit(x_DS).inertia_


def test_squared_distances():
    rng = np.random.default_rng(0)
    x_DS, centroids_KS = rng.normal(size=(40, 7)), rng.normal(size=(3, 7))
    expected = np.linalg.norm(x_DS[:, None] - centroids_KS, axis=2) ** 2
    np.testing.assert_allclose(squared_distances(x_DS, centroids_KS), expected, rtol=1e-6)


def test_balanced_kmeans_improves_on_one_assignment():
    rng = np.random.default_rng(0)
    x_DS = np.concatenate([rng.normal(size=(900, 6)), rng.normal(size=(100, 6)) + 3]).astype(np.float32)
    weight_D = rng.integers(1, 9, 1000)
    start_KS = KMeans(4, n_init=3, random_state=0).fit(x_DS).cluster_centers_.astype(np.float32)
    costs = []
    for rounds in (1, 10):
        label_D, centroids_KS = balanced_kmeans(x_DS, start_KS, weight_D, rounds=rounds)
        cost_D = squared_distances(x_DS, centroids_KS)[np.arange(1000), label_D]
        costs.append(float(weight_D @ cost_D))
        load_K = np.bincount(label_D, weight_D)
        assert np.abs(load_K - weight_D.sum() / 4).max() <= 8
    assert costs[1] < 0.999 * costs[0]
