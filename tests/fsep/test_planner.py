import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsep import Layout, Topology, cost, lower_bound, plan, route, synthesize
from fsep.baselines import PLANNERS
from fsep.planner import modelled_time


@st.composite
def problems(draw, most_devices=10, most_experts=12):
    """(load [N, E], topology, slots) of any shape, nodes even or not, just enough slots or more."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda s: sum(s) <= most_devices))
    devices, experts = sum(sizes), draw(st.integers(1, most_experts))
    slots = -(-experts // devices) + draw(st.integers(0, 3))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    load = rng.integers(0, draw(st.sampled_from([1, 3, 1000])) + 1, (devices, experts))
    load = load * rng.dirichlet(np.full(experts, draw(st.sampled_from([0.1, 1.0, 100.0])))) * experts
    load = np.rint(load * (rng.random((devices, experts)) < draw(st.sampled_from([0.2, 1.0])))).astype(int)
    topology = Topology(devices, sizes, inter_gbps=draw(st.sampled_from([5.0, 200.0, 2400.0])))
    return load, topology, slots


@settings(deadline=None, max_examples=150)
@given(problems())
def test_layout_is_legal_and_repeatable(problem):
    load, topology, slots = problem
    layout = plan(load, topology, slots)  # Layout itself refuses homeless experts and overfull devices
    assert layout.replicas.shape == load.T.shape
    assert layout.slots == slots
    assert plan(load.copy(), topology, slots) == layout
    assert plan(load.astype(float), topology, slots) == layout


@settings(deadline=None, max_examples=100)
@given(problems())
def test_never_worse_than_static(problem):
    load, topology, slots = problem
    static = modelled_time(load, PLANNERS["static"](load, topology, slots), topology)
    ours = modelled_time(load, plan(load, topology, slots, budget_ms=1), topology)
    assert ours <= static


@settings(deadline=None, max_examples=60)
@given(problems(most_devices=6, most_experts=6))
def test_never_below_the_bound(problem):
    load, topology, slots = problem
    price = cost(route(load, plan(load, topology, slots), topology), topology)
    assert price.total_s >= lower_bound(load, topology, slots) * (1 - 1e-6)


@settings(deadline=None, max_examples=60)
@given(problems(), st.randoms(use_true_random=False))
def test_renumbering_devices_inside_nodes_keeps_the_balance(problem, random):
    load, topology, slots = problem
    order = []
    for first, last in zip(topology.node_start[:-1], topology.node_start[1:], strict=True):
        members = list(range(first, last))
        random.shuffle(members)
        order += members
    # Devices of a node differ only in their own tokens: where links are free the plan depends on their sum alone.
    fast = Topology(topology.devices, topology.devices_per_node, intra_gbps=1e9, inter_gbps=1e9)
    before = cost(route(load, plan(load, fast, slots), fast), fast)
    after = cost(route(load[order], plan(load[order], fast, slots), fast), fast)
    assert before.compute_s == pytest.approx(after.compute_s)


@pytest.mark.parametrize(
    ("devices", "per_node", "experts", "slots"),
    [
        (8, 4, 32, 4),  # N * C = E
        (12, 6, 20, 3),
        (24, 12, 32, 4),
        (40, 20, 32, 3),
        (13, [6, 4, 3], 17, 3),
        (8, 4, 1, 1),
        (1, 8, 5, 5),
        (4, 2, 6, 6),  # C = E
        (4, 2, 3, 9),  # C > E
        (3, 1, 3, 1),
    ],
)
@pytest.mark.parametrize("kind", ["zipf", "one expert", "nothing"])
def test_sizes_that_break_others(devices, per_node, experts, slots, kind):
    load = synthesize("zipf", devices=devices, experts=experts, steps=1).tokens[0, 0, 0]
    if kind == "one expert":
        load[:, 1:] = 0
    elif kind == "nothing":
        load[:] = 0
    topology = Topology(devices, per_node)
    layout = plan(load, topology, slots)
    tokens = route(load, layout, topology)
    assert np.array_equal(tokens.sum(2), load)
    if slots >= experts:
        assert layout.replicas.all()
    if experts == 1 and kind != "nothing":
        assert cost(tokens, topology).imbalance < 1.001


def test_all_tokens_to_one_expert_spread_over_as_many_devices_as_slots_allow():
    topology = Topology(8, 4)
    load = np.zeros((8, 9), int)
    load[:, 3] = 840
    # 16 slots, of which the eight other experts take one each: device by device, all eight hold expert 3.
    assert cost(route(load, plan(load, topology, 2), topology), topology).imbalance == pytest.approx(1)


@pytest.mark.parametrize("slots", [4, 8])
@pytest.mark.parametrize("kind", ["dirichlet", "clustered", "zipf"])
def test_near_the_bound_at_two_nodes_of_eight(slots, kind):
    trace = synthesize(kind, devices=16, experts=32, steps=3, skew=1.5, seed=3)
    topology = Topology(16, 8)
    for step in range(trace.steps):
        load = trace.tokens[step, 0, 0]
        price = cost(route(load, plan(load, topology, slots), topology), topology)
        assert price.imbalance <= (1.01 if slots == 4 else 1.002)
        assert price.total_s <= 1.03 * lower_bound(load, topology, slots)


def test_exact_optimum_at_a_small_size():
    rng = np.random.default_rng(0)
    topology = Topology(4, 2)
    ratios = []
    for _ in range(5):
        load = np.rint(rng.dirichlet(np.ones(5), 4) * 3000).astype(int)
        price = cost(route(load, plan(load, topology, 2, budget_ms=2), topology), topology)
        ratios.append(price.total_s / lower_bound(load, topology, 2, exact=True))
    assert min(ratios) >= 1 - 1e-6
    assert np.mean(ratios) <= 1.02


def test_more_budget_is_never_worse_and_the_same_for_all():
    rng = np.random.default_rng(5)
    topology = Topology(10, [4, 3, 3])
    better = 0
    for _ in range(10):
        load = rng.integers(0, 1000, (10, 16)) * rng.integers(0, 5, 16)
        times = [
            modelled_time(load, plan(load, topology, 2, budget_ms=budget), topology) for budget in (0, 0.1, 0.5, 5)
        ]
        assert all(later <= earlier for earlier, later in zip(times[:-1], times[1:], strict=True))
        better += times[-1] < times[0]
    assert better >= 3


def test_previous_is_kept_on_a_tie_and_within_the_threshold():
    topology = Topology(16, 8)
    trace = synthesize("dirichlet", devices=16, experts=32, steps=12, seed=1)
    first = plan(trace.tokens[0, 0, 0], topology, 4)
    assert plan(trace.tokens[0, 0, 0], topology, 4, previous=first) == first
    nudged = trace.tokens[0, 0, 0].copy()
    nudged[0, 0] += 1
    assert plan(nudged, topology, 4, previous=first) == first


def test_previous_reduces_change_where_a_change_pays():
    topology = Topology(16, 8)
    loads = synthesize("hot-set", devices=16, experts=32, steps=1, skew=4, seed=1).tokens[0, 0, 0]
    old = plan(loads, topology, 4)
    moved = np.roll(loads, 5, axis=1)
    alone, settled = plan(moved, topology, 4), plan(moved, topology, 4, previous=old)
    assert settled != old
    kept = [(layout.replicas & old.replicas).sum() for layout in (alone, settled)]
    assert kept[1] >= kept[0]
    assert modelled_time(moved, settled, topology) <= modelled_time(moved, old, topology) * 0.998


def test_fractional_loads():
    topology = Topology(4, 2)
    load = np.random.default_rng(0).random((4, 6))
    layout = plan(load, topology, 3)
    assert plan(load * 1.0, topology, 3) == layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(slots=1), "slots is 1: 4 devices then hold 4 experts of 6; give at least 2"),
        (dict(slots=0), "slots is 0"),
        (dict(slots=2.0), "slots is 2.0"),
        (dict(load=np.full((4, 6), -1)), r"load\[0, 0\] is -1: give non-negative"),
        (dict(load=np.full((4, 6), np.nan)), r"load\[0, 0\] is nan: give finite"),
        (dict(load=np.full((4, 6), np.inf)), "give finite"),
        (dict(load=np.ones((3, 6))), r"load has shape \(3, 6\)"),
        (dict(load=np.ones((4, 0))), r"load has shape \(4, 0\)"),
        (dict(load=np.ones(4)), "load has shape"),
        (dict(load=np.ones((4, 6), bool)), "dtype bool"),
        (dict(load=np.ones((4, 6), complex)), "dtype complex"),
        (dict(load=np.full((4, 6), 10**9)), "at most 2147483648"),
        (dict(budget_ms=-1), "budget_ms is -1"),
        (dict(budget_ms=float("nan")), "budget_ms is nan"),
        (dict(previous=Layout(np.ones((6, 3)), 6)), "previous has 6 experts, 3 devices"),
        (dict(previous=Layout(np.ones((6, 4)), 6)), "and 6 slots"),
    ],
)
def test_refuses(change, message):
    arguments = dict(load=np.ones((4, 6)), topology=Topology(4, 2), slots=3) | change
    with pytest.raises(ValueError, match=message):
        plan(**arguments)
