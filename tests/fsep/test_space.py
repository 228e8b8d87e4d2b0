import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsep.space import ExpertSpace, Interval

sizes = st.integers(1, 7)


@settings(deadline=None)
@given(sizes, sizes, st.integers(1, 9))
def test_slices_cover_every_coordinate_once(hidden, width, ranks):
    space = ExpertSpace(hidden=hidden, width=width)
    owned = [space.owned(rank, ranks) for rank in range(ranks)]
    assert [c for interval in owned for c in range(*interval)] == list(range(3 * hidden * width))
    assert max(interval.size for interval in owned) <= space.slice_size(ranks)
    assert space.slice_size(ranks) * ranks < space.size + ranks


@settings(deadline=None)
@given(sizes, sizes, st.data())
def test_rows_hold_the_interval(hidden, width, data):
    space = ExpertSpace(hidden=hidden, width=width)
    start = data.draw(st.integers(0, space.size))
    interval = Interval(start, data.draw(st.integers(start, space.size)))
    flat = torch.arange(space.size)
    matrices = [
        part.view(shape)
        for part, shape in zip(flat.split([r * c for r, c in space.matrices]), space.matrices, strict=True)
    ]
    found = [
        matrices[rows.matrix][rows.first : rows.last].flatten()[rows.skip : rows.skip + rows.into.size]
        for rows in space.rows(interval)
    ]
    assert torch.cat([*found, flat[:0]]).tolist() == list(range(*interval))
    for rows in space.rows(interval):  # no row is read in vain
        assert (rows.last - rows.first) * space.matrices[rows.matrix][1] < rows.into.size + 2 * space.matrices[
            rows.matrix
        ][1]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_intersection(a, b, c, d):
    first, second = Interval(min(a, b), max(a, b)), Interval(min(c, d), max(c, d))
    assert set(range(*(first & second))) == set(range(*first)) & set(range(*second))
