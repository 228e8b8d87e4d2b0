"""Balanced assignment against independent solvers, brute force and its stated bound."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import linear_sum_assignment, linprog

from disco.balance import balanced_assignment, entropic_prices, even_cut, priced_assignment


def blobs(documents, clusters, seed=0, uneven=True):
    """Squared distances [D, K] of points around unevenly popular centres, and token counts [D]."""
    rng = np.random.default_rng(seed)
    centre_KS = rng.normal(size=(clusters, 16))
    popularity_K = rng.dirichlet(np.full(clusters, 0.7)) if uneven else np.full(clusters, 1 / clusters)
    x_DS = centre_KS[rng.choice(clusters, documents, p=popularity_K)] + 1.5 * rng.normal(size=(documents, 16))
    cost_DK = np.stack([((x_DS - centre_S) ** 2).sum(1) for centre_S in centre_KS], axis=1)
    return cost_DK, rng.lognormal(5, 1, documents).astype(np.int64) + 1


def total(cost_DK, weight_D, label_D):
    return float((weight_D * cost_DK[np.arange(len(label_D)), label_D]).sum())


def lp_optimum(cost_DK, weight_D):
    """The transport problem's optimum, set up apart from the module: equalities as two sparse blocks."""
    D, K = cost_DK.shape
    rows = sparse.vstack([sparse.kron(sparse.eye(D), np.ones((1, K))), sparse.kron(np.ones((1, D)), sparse.eye(K))])
    supply = np.concatenate([weight_D, np.full(K, weight_D.sum() / K)]) / weight_D.mean()
    result = linprog(cost_DK.ravel(), A_eq=rows.tocsr(), b_eq=supply, method="highs-ds")
    assert result.status == 0
    return result.fun * weight_D.mean()


def within_one_document(label_D, weight_D, clusters):
    load_K = np.bincount(label_D, weight_D, clusters)
    return np.abs(load_K - weight_D.sum() / clusters).max() <= weight_D.max() * (1 + 1e-9)


@pytest.mark.parametrize("contested", [0, 10**9])
def test_unit_weights_reach_the_optimum_of_the_assignment_problem(contested):
    cost_DK, _ = blobs(320, 8)
    label_D = balanced_assignment(cost_DK, np.ones(320), contested=contested)
    seats = np.tile(np.arange(8), 40)
    rows, columns = linear_sum_assignment(cost_DK[:, seats])
    assert np.bincount(label_D).tolist() == [40] * 8
    assert total(cost_DK, 1, label_D) == pytest.approx(total(cost_DK, 1, seats[columns[np.argsort(rows)]]))


def test_small_problem_equals_brute_force():
    cost_DK, _ = blobs(8, 2, seed=3)
    best = min(
        total(cost_DK, 1, np.array(labels)) for labels in itertools.product((0, 1), repeat=8) if sum(labels) == 4
    )
    assert total(cost_DK, 1, balanced_assignment(cost_DK, np.ones(8))) == pytest.approx(best)


@pytest.mark.parametrize(("documents", "clusters", "allowed"), [(1200, 4, 2e-3), (500, 12, 5e-3)])
def test_contested_documents_alone_give_the_cost_of_the_whole_programme(documents, clusters, allowed):
    cost_DK, weight_D = blobs(documents, clusters, seed=documents)
    optimum = lp_optimum(cost_DK, weight_D)
    for contested in (0, 300):
        label_D = balanced_assignment(cost_DK.astype(np.float32), weight_D, contested=contested)
        assert within_one_document(label_D, weight_D, clusters)
        # Only rounding the split documents, at most K - 1, comes on top.
        assert abs(total(cost_DK, weight_D, label_D) - optimum) < allowed * optimum


def test_large_problem_is_balanced_and_complementary():
    cost_DK, weight_D = blobs(100_000, 8, seed=5)
    label_D, price_K = priced_assignment(cost_DK, weight_D)
    assert within_one_document(label_D, weight_D, 8)
    # Optimality: all but the split documents are where cost plus price is least.
    elsewhere = (cost_DK + price_K).argmin(1) != label_D
    slack_D = (cost_DK + price_K)[np.arange(len(label_D)), label_D] - (cost_DK + price_K).min(1)
    assert (slack_D > 1e-6).sum() == 0, f"{elsewhere.sum()} documents off their best cluster"


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_cluster_is_within_the_largest_document_of_the_mean(data):
    documents, clusters = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    kind = data.draw(st.sampled_from(["smooth", "ties", "constant", "tiny", "huge"]))
    cost_DK = rng.random((documents, clusters)) * {"tiny": 1e-9, "huge": 1e9}.get(kind, 1.0)
    if kind == "ties":
        cost_DK = np.round(cost_DK * 3)
    if kind == "constant":
        cost_DK[:] = 0.25
    weight_D = rng.integers(0, data.draw(st.sampled_from([2, 5, 1000])), documents)
    if data.draw(st.booleans()):
        weight_D[rng.integers(documents)] = 10**6  # one document heavier than all others
    label_D = balanced_assignment(cost_DK, weight_D, contested=data.draw(st.sampled_from([0, 10**6])))
    assert label_D.shape == (documents,) and label_D.min() >= 0 and label_D.max() < clusters
    assert within_one_document(label_D, weight_D, clusters)
    assert len(set(label_D[weight_D > 0])) == min(clusters, (weight_D > 0).sum()) or not weight_D.any()


def test_ties_in_a_large_problem():
    weight_D = np.random.default_rng(0).integers(1, 50, 5000)
    for cost_DK in (np.zeros((5000, 4)), np.tile([0.0, 1.0, 1.0, 2.0], (5000, 1))):
        assert within_one_document(balanced_assignment(cost_DK, weight_D, contested=0), weight_D, 4)


def test_many_equal_documents_in_a_large_problem():
    """Half of the documents are one vector: no price tells them apart, yet no large programme is solved."""
    cost_DK, weight_D = blobs(60_000, 4, seed=2)
    cost_DK[:30_000] = cost_DK[0]
    label_D = balanced_assignment(cost_DK, weight_D)
    assert within_one_document(label_D, weight_D, 4)
    # Weak duality: any prices bound the optimum from below.
    capacity_K = np.full(4, weight_D.sum() / 4)
    price_K = entropic_prices(cost_DK, weight_D.astype(float), capacity_K)
    bound = float(weight_D @ (cost_DK + price_K).min(1) - capacity_K @ price_K)
    assert total(cost_DK, weight_D, label_D) < 1.01 * bound


def test_a_misleading_start_is_recovered_from():
    cost_DK, weight_D = blobs(20_000, 4)
    label_D, _ = priced_assignment(cost_DK, weight_D)
    again_D, _ = priced_assignment(cost_DK, weight_D, prices_K=np.array([1e3, -1e3, 0, 5e2]))
    assert total(cost_DK, weight_D, again_D) == pytest.approx(total(cost_DK, weight_D, label_D), rel=1e-6)


def test_a_warm_start_changes_nothing():
    cost_DK, weight_D = blobs(5000, 4)
    label_D, price_K = priced_assignment(cost_DK, weight_D)
    again_D, _ = priced_assignment(cost_DK, weight_D, prices_K=price_K)
    assert total(cost_DK, weight_D, again_D) == pytest.approx(total(cost_DK, weight_D, label_D), rel=1e-9)


def test_documents_without_weight_take_their_cheapest_cluster():
    cost_DK = np.array([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0], [9.0, 0.0]])
    assert balanced_assignment(cost_DK, [5, 5, 0, 0]).tolist() == [0, 1, 0, 1]
    assert balanced_assignment(cost_DK, [0, 0, 0, 0]).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("cost", "weight", "said"),
    [
        (np.zeros((0, 3)), np.zeros(0), "one at least"),
        (np.zeros((3, 0)), np.zeros(3), "one at least"),
        (np.zeros((3, 2)), np.zeros(2), "give one each"),
        (np.array([[0.0, 1.0], [np.nan, 1.0]]), np.ones(2), "document 1"),
        (np.zeros((2, 2)), np.array([1.0, -1.0]), "document 1 is -1"),
        (np.zeros((2, 2)), np.array([np.inf, 1.0]), "document 0 is inf"),
    ],
)
def test_refuses(cost, weight, said):
    with pytest.raises(ValueError, match=said):
        balanced_assignment(cost, weight)


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=80),
    clusters=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_even_cut_is_within_the_largest_document(weights, clusters, seed):
    weight_D = np.array(weights)
    order_D = np.random.default_rng(seed).permutation(len(weight_D))
    label_D = even_cut(order_D, weight_D, clusters)
    assert ((label_D >= 0) & (label_D < clusters)).all()
    if weight_D.any():
        assert within_one_document(label_D, weight_D, clusters)
        assert len(set(label_D[weight_D > 0])) == min(clusters, (weight_D > 0).sum())
    if weight_D.max() < weight_D.sum() / clusters:
        assert (np.diff(label_D[order_D]) >= 0).all()
