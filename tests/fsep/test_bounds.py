from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsep import Layout, Topology, layout_bound, lower_bound

FREE = dict(intra_gbps=1e12, inter_gbps=1e12)


def best_of_all_layouts(load, topology, slots):
    """Brute force: the least ``layout_bound`` over every placement with every slot in use."""
    N, E = load.shape
    options = [row for row in product((0, 1), repeat=E) if sum(row) == min(slots, E)]
    best = np.inf
    for rows in product(options, repeat=N):
        replicas = np.array(rows).T
        if replicas.sum(1).min() > 0:
            best = min(best, layout_bound(load, Layout(replicas, slots), topology))
    return best


@pytest.mark.parametrize("inter_gbps", [20.0, 200.0])
def test_exact_is_the_best_of_all_layouts(inter_gbps):
    rng = np.random.default_rng(1)
    topology = Topology(3, [2, 1], inter_gbps=inter_gbps)
    for _ in range(2):
        load = rng.integers(0, 1000, (3, 3))
        exact = lower_bound(load, topology, 2, exact=True)
        assert exact == pytest.approx(best_of_all_layouts(load, topology, 2), rel=1e-4)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2), st.integers(0, 2**32 - 1))
def test_relaxation_is_below_exact_and_above_the_mean(N, E, extra, seed):
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 1000, (N, E))
    topology = Topology(N, 2, inter_gbps=50)
    slots = -(-E // N) + extra
    relaxed, exact = lower_bound(load, topology, slots), lower_bound(load, topology, slots, exact=True)
    assert load.sum() / N * topology.seconds[0] <= relaxed * (1 + 1e-6)
    assert relaxed <= exact * (1 + 1e-6)


def test_by_hand():
    # One expert on one of two devices: its device computes all, 100 tokens arrive over the inter-node link.
    topology = Topology(2, 1, intra_gbps=80, inter_gbps=8, tokens_per_second=1e6, bytes_per_token=1000)
    layout = Layout(np.array([[1, 0]]), 1)
    bound = layout_bound(np.array([[300], [100]]), layout, topology)
    assert bound == pytest.approx(3 * 400 / 1e6 + 4 * 100 * 8000 / 8e9)
    # Free to hold it on both: half of the load each, and it is never worth crossing more than 100.
    assert lower_bound(np.array([[300], [100]]), Topology(2, 1, **FREE), 1) == pytest.approx(
        200 * Topology(2).seconds[0]
    )


def test_without_tokens():
    assert lower_bound(np.zeros((4, 3)), Topology(4, 2), 1) == 0


def test_time_limit_still_gives_a_bound():
    load = np.random.default_rng(0).integers(0, 1000, (6, 8))
    topology = Topology(6, 3)
    quick = lower_bound(load, topology, 2, exact=True, time_limit=1.0)
    assert lower_bound(load, topology, 2) <= quick * (1 + 1e-6)


def test_no_bound_in_no_time():
    load = np.random.default_rng(0).integers(0, 1000, (8, 24))
    with pytest.raises(RuntimeError, match="HiGHS found no bound"):
        lower_bound(load, Topology(8, 4), 4, exact=True, time_limit=0.0)


def test_refuses():
    with pytest.raises(ValueError, match="slots is 1"):
        lower_bound(np.ones((2, 3)), Topology(2, 2), 1)
