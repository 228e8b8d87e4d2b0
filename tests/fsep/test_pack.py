import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsep.pack import pack


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=24),
    st.integers(1, 9),
    st.integers(0, 10),
    st.booleans(),
)
def test_pieces_add_up_and_fit(sizes, bins, spare, spaced):
    sizes = np.array(sizes)
    slots = np.full(bins, -(-len(sizes) // bins))
    slots[: spare % bins] += 1
    slots += spare // bins
    amount, held = pack(sizes, np.ones(bins, int), slots, spaced)
    assert np.array_equal(amount.sum(0), sizes)
    assert held.any(0).all()
    assert (held.sum(1) <= slots).all()
    assert not amount[~held].any()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=24), st.integers(1, 9), st.booleans())
def test_exact_with_one_spare_slot_a_cut(sizes, bins, spaced):
    sizes = np.array(sizes)
    slots = np.full(bins, -(-(len(sizes) + bins - 1) // bins))
    amount, _ = pack(sizes, np.ones(bins, int), slots, spaced)
    assert np.ptp(amount.sum(1)) <= bins  # whole tokens: each bin rounds its share down


def test_unequal_bins():
    amount, _ = pack(np.array([50, 30, 20, 20]), np.array([3, 1, 2]), np.array([3, 2, 2]), False)
    assert amount.sum(1).tolist() == [60, 20, 40]


@pytest.mark.parametrize("seed", range(5))
def test_whole_items_without_spare_slots_come_close(seed):
    sizes = np.random.default_rng(seed).integers(160, 400, 32)
    amount, held = pack(sizes, np.ones(8, int), np.full(8, 4), False)
    assert (held.sum(1) == 4).all()
    assert amount.sum(1).max() <= 1.02 * sizes.sum() / 8
