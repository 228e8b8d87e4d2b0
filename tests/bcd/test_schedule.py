import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcd.schedule import ORDERS, BlockSchedule, learning_rate


def run(schedule, updates, norm=lambda blocks: 1.0):
    """Active set at each of `updates` applied updates."""
    visits = []
    for _ in range(updates):
        visits.append(schedule.blocks)
        schedule.record(norm(schedule.blocks))
        if schedule.done:
            schedule.advance()
    return visits


@settings(deadline=None)
@given(
    count=st.integers(1, 9),
    order=st.sampled_from([order for order in ORDERS if order != "ends"]),
    k=st.integers(1, 5),
    active=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_every_block_gets_exactly_k_updates_a_cycle(count, order, k, active, seed):
    active = min(active, count)
    schedule = BlockSchedule(count, order, k, active=active, seed=seed)
    a_cycle = k * math.ceil(count / active)
    visits = run(schedule, 3 * a_cycle, norm=lambda blocks: 1.0 + sum(blocks))
    for cycle in range(3):
        seen = Counter(b for blocks in visits[cycle * a_cycle : (cycle + 1) * a_cycle] for b in blocks)
        assert seen == dict.fromkeys(range(count), k)
    assert schedule.cycle == 3 and schedule.position == 0


def test_orders():
    assert [v for (v,) in run(BlockSchedule(4, "ascending", 1), 4)] == [0, 1, 2, 3]
    assert [v for (v,) in run(BlockSchedule(4, "descending", 1), 4)] == [3, 2, 1, 0]
    first, again = (run(BlockSchedule(9, "shuffled", 1, seed=1), 18) for _ in range(2))
    assert first == again != run(BlockSchedule(9, "shuffled", 1, seed=2), 18)
    assert first[:9] != first[9:]


def test_importance_visits_blocks_of_large_gradients_earlier():
    earliest = Counter()
    for seed in range(200):
        schedule = BlockSchedule(3, "importance", 1, seed=seed)
        run(schedule, 3, norm=lambda blocks: (1.0, 2.0, 5.0)[blocks[0]])
        earliest[schedule.blocks[0]] += 1
    # Probabilities 1/8, 2/8, 5/8: within four standard deviations.
    for block, p in enumerate((1 / 8, 2 / 8, 5 / 8)):
        assert abs(earliest[block] / 200 - p) < 4 * math.sqrt(p * (1 - p) / 200)


def test_importance_survives_a_zero_norm():
    schedule = BlockSchedule(3, "importance", 1)
    run(schedule, 6, norm=lambda blocks: float(blocks[0]))
    assert schedule.current_order[-1] == 0


@pytest.mark.parametrize("order", ORDERS)
def test_state_goes_on_where_it_was(order):
    whole, head, tail = (BlockSchedule(5, order, 3, active=2, seed=4) for _ in range(3))
    norm = lambda blocks: 1.0 + blocks[0]  # noqa: E731
    visits = run(whole, 40, norm)
    before = run(head, 17, norm)
    tail.load_state_dict(head.state_dict())
    assert before + run(tail, 23, norm) == visits


@pytest.mark.parametrize(
    ("other", "key"),
    [(dict(order="descending"), "order"), (dict(seed=1), "seed"), (dict(steps_per_block=4), "steps")],
)
def test_state_of_another_schedule_is_refused(other, key):
    state = BlockSchedule(5, **{"steps_per_block": 3, **other}).state_dict()
    with pytest.raises(ValueError, match=key):
        BlockSchedule(5, steps_per_block=3).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(count=0), "no block"),
        (dict(count=2, steps_per_block=0), "steps_per_block is 0"),
        (dict(count=2, order="random"), "order is 'random'"),
        (dict(count=2, active=3), "active_blocks is 3 but there are 2"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        BlockSchedule(**arguments)


def test_learning_rate_matches_closed_forms():
    rates = [learning_rate(s, 99, peak=2.0, warmup_steps=4) for s in range(6)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    linear = dict(peak=1.0, schedule="linear", warmup_steps=2, total_steps=12, min_ratio=0.1)
    assert learning_rate(7, 0, **linear) == pytest.approx(0.55)
    assert learning_rate(12, 0, **linear) == learning_rate(50, 0, **linear) == pytest.approx(0.1)
    cosine = dict(peak=1.0, schedule="cosine", total_steps=10)
    assert learning_rate(5, 0, **cosine) == pytest.approx(0.5)
    assert learning_rate(10, 0, **cosine) == pytest.approx(0.0)


def test_warm_up_after_a_switch():
    rates = [learning_rate(100, inner, peak=1.0, switch_warmup=3) for inner in range(5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_ends_by_depth():
    schedule = BlockSchedule(5, "ends", 2, depths=[1, 0, 0, 3, 3])
    assert [v for (v,) in run(schedule, 20)[::2]] == [1, 2, 3, 4, 3, 4, 1, 2, 3, 4]
    assert (schedule.cycle, schedule.position) == (1, 4)
    assert [v for (v,) in run(BlockSchedule(1, "ends", 1), 2)] == [0, 0]
