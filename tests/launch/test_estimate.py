import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.estimate import (
    break_even,
    cards_held,
    communication_seconds,
    compute_seconds,
    disco_dollars,
    makespan,
    measured_utilization,
    transfer_seconds,
)
from launch.hardware import load

# MoE-DisCo, arXiv 2601.06857: joint hours and dollars; hours of the longest submodel and of fine-tuning; dollars.
PAPER = {
    "Qwen1.5-MoE, C4": (9.87, 22.50, 2.09, 1.73, 6.87),
    "Qwen1.5-MoE, WikiText-2": (3.04, 6.93, 1.28, 0.68, 3.34),
    "Qwen1.5-MoE, OpenWebText": (13.12, 29.91, 3.12, 2.87, 10.91),
    "LLaMA-MoE, C4": (5.64, 12.86, 1.54, 2.01, 6.74),
    "LLaMA-MoE, WikiText-2": (7.45, 16.99, 1.46, 2.67, 8.13),
    "LLaMA-MoE, OpenWebText": (14.09, 32.13, 3.01, 4.79, 15.14),
}


@pytest.mark.parametrize("row", PAPER)
def test_the_papers_dollars_to_the_cent(row):
    joint, joint_dollars, longest, tuning, disco = PAPER[row]
    devices = load()
    prices = {"train_price": devices["rtx4090"].price, "tune_price": devices["a100"].price}
    submodels, tuned = disco_dollars(longest, tuning, experts=4, **prices)
    assert devices["a100"].dollars(3600 * joint) == pytest.approx(joint_dollars, abs=0.0051)
    assert submodels == pytest.approx(4 * longest * 0.35) and tuned == pytest.approx(tuning * 2.28)
    assert submodels + tuned == pytest.approx(disco, abs=0.0051)


def test_priced_alike_the_papers_saving_is_gone():
    assert sum(disco_dollars(2.09, 1.73, experts=4, train_price=2.28, tune_price=2.28)) == pytest.approx(
        23.0, abs=0.01
    )
    ratio = break_even(9.87, 1.73, 4 * 2.09)
    assert ratio == pytest.approx(0.974, abs=0.001)
    same = disco_dollars(2.09, 1.73, experts=4, train_price=ratio * 2.28, tune_price=2.28)
    assert sum(same) == pytest.approx(9.87 * 2.28)


def test_break_even_has_no_answer_where_tuning_alone_takes_longer():
    assert break_even(1.0, 1.5, 3.0) is None and break_even(1.0, 0.5, 0.0) is None


def test_makespan_takes_jobs_in_order_on_the_next_free_card():
    assert makespan([3, 1, 1, 1], 2) == 3
    assert makespan([1, 1, 1, 3], 2) == 4  # the long one came last
    assert makespan([2, 2, 2], 8) == 2 and makespan([], 3) == 0
    with pytest.raises(ValueError, match="cards is 0"):
        makespan([1], 0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 7))
def test_makespan_between_its_bounds_and_at_most_twice_the_best(durations, cards):
    found = makespan(durations, cards)
    assert max(max(durations), sum(durations) / cards) <= found
    best = min(
        max(sum(d for d, c in zip(durations, on, strict=True) if c == card) for card in range(cards))
        for on in itertools.product(range(min(cards, 3)), repeat=len(durations))
    )
    if cards <= 3:  # Graham's bound
        assert found <= (2 - 1 / cards) * best + 1e-9
    assert sum(durations) <= cards_held(durations, cards) <= cards * found


def test_cards_are_paid_until_the_last_job_is_in():
    assert cards_held([2.0, 2.09, 1.9, 1.8], 4) == pytest.approx(4 * 2.09)
    assert cards_held([2.0, 2.09, 1.9, 1.8], 1) == pytest.approx(7.79)
    assert cards_held([1.0, 1.0, 1.0], 2) == 4.0


def test_seconds_of_compute_and_of_links():
    a100, cpu = load()["a100"], load()["cpu"]
    assert compute_seconds(312e12, a100, "bf16", devices=2, utilization=0.5) == pytest.approx(1.0)
    weights, gradients = 28e9, 28e9
    links = communication_seconds
    assert links(weights, gradients, a100, devices=1, zero_stage=3) == 0
    assert links(weights, gradients, cpu, devices=4, zero_stage=3) == 0  # links not known
    assert links(weights, gradients, a100, devices=8, zero_stage=3) == pytest.approx(7 / 8 * 84 / 300)
    assert links(weights, gradients, a100, devices=8, zero_stage=3, accumulation=4) == pytest.approx(
        7 / 8 * 336 / 300
    )
    assert links(weights, gradients, a100, devices=4, zero_stage=0, accumulation=4) == pytest.approx(
        3 / 4 * 56 / 300
    )
    assert links(weights, gradients, a100, devices=4, zero_stage=2, accumulation=4) == pytest.approx(
        3 / 4 * 140 / 300
    )
    assert links(weights, gradients, a100, devices=16, zero_stage=1) == pytest.approx(15 / 16 * 56 / 25)


def test_transfers():
    assert transfer_seconds(1e9, 1.0) == 8.0
    with pytest.raises(ValueError, match="bandwidth is 0"):
        transfer_seconds(1, 0)


def test_utilization_is_read_from_what_ran_on_the_device():
    a100 = load()["a100"]

    def row(status="held", seconds=10.0, flops=312e12, **more):
        base = {"stage": "train", "submodel": 0, "attempt": 1, "status": status, "seconds": seconds, "devices": 2}
        return base | {"flops": flops, "precision": "bf16", "ran_on": "a100", "step": 5} | more

    rows = [row("startup", 100.0, 0, step=0), row(step=1), row("done", step=2)]
    assert measured_utilization(rows, a100) == pytest.approx(1 / 20)
    assert measured_utilization([row(ran_on="cpu"), row(ran_on=None), row(precision=None)], a100) is None
    lost = [
        row("startup", 1.0, 0, step=0),
        row(seconds=1000.0),
        row("startup", 1.0, 0, attempt=2, step=0),
        row(attempt=2),
    ]
    assert measured_utilization(lost, a100) == pytest.approx(1 / 20)
