import numpy as np
import pytest

from fsep import Layout


def test_table_copies_and_back():
    layout = Layout(np.array([[1, 0, 1], [0, 1, 1], [1, 0, 0]]), slots=3)
    assert layout.table.tolist() == [[0, 2, -1], [1, -1, -1], [0, 1, -1]]
    assert Layout.from_table(layout.table, 3) == layout
    copies = layout.copies
    assert copies.expert.tolist() == [0, 0, 1, 1, 2]
    assert copies.device.tolist() == [0, 2, 1, 2, 0]
    assert copies.start.tolist() == [0, 2, 4, 5]
    on_device = [
        copies.on_device[a:b].tolist()
        for a, b in zip(copies.device_start[:-1], copies.device_start[1:], strict=True)
    ]
    assert on_device == [[0, 4], [2], [1, 3]]


def test_digest_tells_layouts_apart():
    layouts = [
        Layout(np.eye(4, dtype=int), 1),
        Layout(np.eye(4, dtype=int), 2),
        Layout(np.eye(4, dtype=int)[::-1], 1),
        Layout(np.ones((2, 8), dtype=int), 2),
    ]
    assert len({layout.digest() for layout in layouts}) == 4
    assert Layout(np.eye(4), 1).digest() == layouts[0].digest()
    assert layouts[0] != layouts[1] and layouts[0] != "layout"


@pytest.mark.parametrize(
    ("replicas", "slots", "message"),
    [
        (np.ones(3), 1, "shape"),
        (np.full((2, 2), 2), 4, "other than 0 and 1"),
        (np.array([[1, 1], [0, 0]]), 1, "gives expert 1 no device"),
        (np.array([[1, 1], [0, 1]]), 1, "puts 2 experts on device 1 but slots is 1"),
    ],
)
def test_refuses(replicas, slots, message):
    with pytest.raises(ValueError, match=message):
        Layout(replicas, slots)


def test_replicas_are_read_only():
    with pytest.raises(ValueError):
        Layout(np.ones((1, 1)), 1).replicas[0, 0] = 0
