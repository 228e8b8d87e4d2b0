"""The flow kernel against brute force over device subsets (the cut formula of the linear program)."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fsep import Layout
from fsep.flow import balance, device_loads, make_work, node_ranges, release, start_flow


def least_share(load_E, replicas_EN, weight_N):
    """max over device sets S of (load of experts held only inside S) / (weight of S), rounded up."""
    N = len(weight_N)
    best = 0
    for size in range(1, N + 1):
        for chosen in combinations(range(N), size):
            outside = np.delete(replicas_EN, chosen, axis=1).any(1)
            best = max(best, -(-load_E[~outside].sum() // weight_N[list(chosen)].sum()))
    return best


@settings(deadline=None, max_examples=120)
@given(st.integers(1, 6), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_share_is_the_cut_bound(N, E, seed):
    rng = np.random.default_rng(seed)
    replicas = (rng.random((E, N)) < 0.4).astype(np.uint8)
    replicas[np.arange(E), rng.integers(0, N, E)] = 1
    load_GE = rng.integers(0, 50, (2, E))
    weight_N = rng.integers(1, 4, N)
    node_of = np.sort(rng.integers(0, 2, N))
    copies = Layout(replicas, E).copies
    ranges = node_ranges(copies, node_of)
    home, away = start_flow(load_GE, copies, node_of, ranges)
    work = make_work(N, E, len(copies.expert))
    load_N = device_loads(copies, home, away, N)
    assert load_N.sum() == load_GE.sum()

    local = balance(copies, ranges, weight_N, 0, home, away, load_N, work)
    assert np.array_equal(load_N, device_loads(copies, home, away, N))
    assert (load_N <= local * weight_N).all()
    release(home, away)
    share = balance(copies, ranges, weight_N, 0, home, away, load_N, work)
    assert min(home.min(), away.min()) >= 0
    assert np.array_equal(np.bincount(copies.expert, away, E), load_GE.sum(0))
    assert share == least_share(load_GE.sum(0), replicas, weight_N) <= local
