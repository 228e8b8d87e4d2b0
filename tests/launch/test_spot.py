import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from launch.spot import SpotError, best_interval, expected_seconds, spot


def simulate(work, interval, checkpoint, restart, per_hour, draw):
    """One run, event by event: memoryless interruptions, work since the last checkpoint is lost."""
    clock = done = 0.0
    strike = draw.expovariate(per_hour / 3600)
    while done < work:
        step = min(interval, work - done) + checkpoint
        if clock + step <= strike:
            clock, done = clock + step, done + step - checkpoint
            continue
        clock = strike
        strike = clock + draw.expovariate(per_hour / 3600)
        while clock + restart > strike:  # interrupted while it starts again
            clock = strike
            strike = clock + draw.expovariate(per_hour / 3600)
        clock += restart
    return clock


@pytest.mark.parametrize(
    "work, interval, checkpoint, restart, per_hour",
    [(7200, 600, 20, 180, 0.5), (3600, 900, 60, 300, 4), (1000, 400, 10, 0, 10)],
)
def test_the_formula_is_what_a_simulation_gives(work, interval, checkpoint, restart, per_hour):
    draw = random.Random(0)
    runs = [simulate(work, interval, checkpoint, restart, per_hour, draw) for _ in range(4000)]
    mean = sum(runs) / len(runs)
    deviation = math.sqrt(sum((run - mean) ** 2 for run in runs)) / len(runs)
    expected = expected_seconds(work, interval, checkpoint, restart, per_hour)
    assert abs(mean - expected) < 4 * deviation
    assert deviation < 0.01 * expected


def test_simulated_runs_are_fastest_near_the_best_interval():
    checkpoint, per_hour = 60.0, 2.0
    best = best_interval(checkpoint, per_hour)
    times = []
    for factor in (0.3, 1.0, 4.0):
        draw = random.Random(1)
        times.append(sum(simulate(20_000, best * factor, checkpoint, 120, per_hour, draw) for _ in range(400)))
    assert times[1] < times[0] and times[1] < times[2]


@settings(deadline=None, max_examples=60)
@given(checkpoint=st.floats(0.1, 2000), per_hour=st.floats(1e-3, 20))
def test_the_interval_is_the_minimum_found_by_search(checkpoint, per_hour):
    mean = 3600 / per_hour

    def cost(log_interval):
        return math.log(math.expm1((math.exp(log_interval) + checkpoint) / mean)) - log_interval

    bounds = (math.log(1e-6 * mean), math.log(5 * mean))
    found = minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": 1e-9})
    best = best_interval(checkpoint, per_hour)
    assert best == pytest.approx(math.exp(found.x), rel=0.02)  # flat there
    assert cost(math.log(best)) <= found.fun + 1e-9


def test_young_and_daly_are_its_first_terms():
    checkpoint, per_hour = 10.0, 0.01
    mean = 3600 / per_hour
    young = math.sqrt(2 * checkpoint * mean)
    ratio = checkpoint / (2 * mean)
    daly = young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint
    assert best_interval(checkpoint, per_hour) == pytest.approx(young, rel=0.005)
    assert best_interval(checkpoint, per_hour) == pytest.approx(daly, rel=1e-6)
    assert best_interval(1e-9, per_hour) == pytest.approx(math.sqrt(2e-9 * mean))


def test_without_interruptions_nothing_is_added_but_the_checkpoint():
    assert math.isinf(best_interval(30, 0))
    assert expected_seconds(1000, math.inf, 5, 60, 0) == 1005
    assert expected_seconds(1000, 250, 5, 60, 0) == 1020
    assert expected_seconds(1000, 300, 5, 60, 0) == 1020  # the last segment is shorter
    found = spot(1000, checkpoint=5, restart=60, per_hour=0)
    assert (found.interval, found.expected, found.interruptions) == (1000, 1005, 0)
    assert spot(0, checkpoint=5, restart=60, per_hour=1).expected == 0


def test_a_short_job_needs_no_checkpoint_in_the_middle():
    found = spot(100, checkpoint=30, restart=60, per_hour=0.05)
    assert found.interval == 100 and found.expected == pytest.approx(130.5, abs=0.5)


def test_expected_cost_grows_with_the_rate():
    times = [spot(36_000, checkpoint=30, restart=120, per_hour=rate).expected for rate in (0, 0.05, 0.5, 5)]
    assert times == sorted(times) and times[0] == 36_030


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf])
def test_bad_times_and_rates_are_refused(bad):
    for name in ("checkpoint", "restart", "per_hour"):
        with pytest.raises(SpotError, match=f"{name} is"):
            spot(100, **({"checkpoint": 1, "restart": 1, "per_hour": 1} | {name: bad}))
    with pytest.raises(SpotError, match="work is"):
        spot(-1, checkpoint=1, restart=1, per_hour=1)
    with pytest.raises(SpotError, match="interval is 0"):
        expected_seconds(100, 0, 1, 1, 1)
    with pytest.raises(SpotError, match="leave no chance"):
        expected_seconds(1e6, 1e6, 1, 1, 100)
