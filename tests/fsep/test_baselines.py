import numpy as np
import pytest
from hypothesis import given, settings
from test_planner import problems

from fsep import Layout, Topology
from fsep.baselines import PLANNERS, ROUTINGS, eplb, least_loaded


@settings(deadline=None, max_examples=60)
@given(problems())
def test_layouts_are_legal_and_routings_conserve(problem):
    load, topology, slots = problem
    for planner in PLANNERS.values():
        layout = planner(load, topology, slots)
        for routing in ROUTINGS.values():
            tokens_NP = routing(load, layout, topology)
            assert tokens_NP.min() >= 0
            assert np.array_equal(np.add.reduceat(tokens_NP, layout.copies.start[:-1], axis=1), load)


def test_static_by_hand():
    layout = PLANNERS["static"](np.ones((4, 4)), Topology(4, 2), 2)
    assert layout.table.tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_eplb_gives_copies_to_the_most_load_a_copy():
    load = np.array([[90, 40, 20, 10]] * 2 + [[0, 0, 0, 0]] * 2)
    # 8 slots: the four spare go 90 -> 45, 45 -> 30, 40 -> 20, 30 -> 22.5 a copy.
    assert eplb(load, Topology(4, 2), 2).replicas.sum(1).tolist() == [4, 2, 1, 1]


def test_eplb_hierarchical_keeps_groups_on_one_node():
    load = np.random.default_rng(0).integers(1, 100, (4, 8))
    topology = Topology(4, 2)
    layout = eplb(load, topology, 3, groups=4)
    on_node = np.stack([layout.replicas[:, :2].any(1), layout.replicas[:, 2:].any(1)])
    assert (on_node.sum(0) == 1).all()
    assert all(np.array_equal(on_node[:, e], on_node[:, e + 1]) for e in range(0, 8, 2))


@pytest.mark.parametrize(
    ("topology", "groups"), [(Topology(4, 2), 3), (Topology(4, [3, 1]), 2), (Topology(4, 2), 2)]
)
def test_eplb_falls_back_to_global(topology, groups):
    load = np.random.default_rng(0).integers(1, 100, (4, 8))
    slots = 2 if groups != 2 or topology.node_sizes[0] == 3 else 3
    fallback = eplb(load, topology, slots, groups=groups) == eplb(load, topology, slots)
    assert fallback == (groups == 3 or topology.node_sizes[0] == 3)


def test_eplb_refuses_no_groups():
    with pytest.raises(ValueError, match="groups is 0"):
        eplb(np.ones((2, 2)), Topology(2, 2), 1, groups=0)


def test_laer_puts_a_copy_on_every_node():
    load = np.random.default_rng(0).integers(1, 100, (4, 4))
    layout = PLANNERS["laer"](load, Topology(4, 2), 3)
    assert layout.replicas[:, :2].any(1).all() and layout.replicas[:, 2:].any(1).all()


def test_smartmoe_is_longest_processing_time_first():
    load = np.array([[7, 6, 5, 4], [0, 0, 0, 0]])
    assert PLANNERS["smartmoe"](load, Topology(2, 2), 2).table.tolist() == [[0, 3], [1, 2]]


def test_least_loaded_spills_only_above_the_threshold():
    topology = Topology(2, 2)
    calm = least_loaded(np.array([[60, 50], [0, 0]]), topology, 2)
    assert calm.replicas.tolist() == [[1, 0], [0, 1]]
    hot = least_loaded(np.array([[4000, 100], [0, 0]]), topology, 2)
    assert hot.replicas.tolist() == [[1, 1], [0, 1]]


def test_even_and_lite_by_hand():
    topology = Topology(4, 2)
    layout = Layout(np.array([[1, 1, 1, 0], [0, 0, 0, 1]]), 1)
    load = np.zeros((4, 2), int)
    load[0, 0], load[2, 0], load[0, 1] = 9, 9, 5
    even, lite = (ROUTINGS[name](load, layout, topology) for name in ("even", "lite"))
    assert even[0].tolist() == [3, 3, 3, 5] and even[2].tolist() == [3, 3, 3, 0]
    # Device 0 has two copies on its node, device 2 one; expert 1 lives elsewhere.
    assert sorted(lite[0, :2].tolist()) == [4, 5] and lite[0, 2:].tolist() == [0, 5]
    assert lite[2].tolist() == [0, 0, 9, 0]


def test_lp_balances():
    layout = Layout(np.array([[1, 1, 0], [0, 1, 1], [1, 0, 0]]), 2)
    load = np.array([[30, 90, 0], [0, 0, 0], [0, 0, 60]])
    tokens = ROUTINGS["lp"](load, layout, Topology(3, 3))
    assert np.bincount(layout.copies.device, tokens.sum(0)).tolist() == [60, 60, 60]
