"""Curves: reading, laying end to end, and where joint training reaches a loss, against closed forms."""

import json
from pathlib import Path

import numpy as np
import pytest

from disco.curves import RANDOM, Curve, Used, bounds, equal_loss, path, reach, read_curves, together, total


def curve(loss, *, step=10.0, validation=None, price=2.0, speed=1.0) -> Curve:
    """A logged step every `step` tokens, at `speed` tokens a second and `price` dollars a second."""
    tokens = step * np.arange(1, len(loss) + 1)
    seen = np.full(len(loss), np.nan) if validation is None else np.array(validation, dtype=float)
    seconds = tokens / speed
    return Curve(tokens, 5 * tokens, seconds, price * seconds, np.array(loss, dtype=float), seen)


def write(run: Path, name: str, rows: list[dict]) -> None:
    (run / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def metric(phase, step, attempt=1, loss=3.0, **more):
    values = {"tokens": 10 * step, "flops": 50 * step, "seconds": 2.0 * step, "dollars": 0.1 * step}
    return {"phase": phase, "step": step, "attempt": attempt, "loss": loss} | values | more


def test_rows_after_a_resume_replace_those_before(tmp_path):
    rows = [metric("finetune", 1), metric("finetune", 2, loss=9.0), metric("finetune", 3, loss=9.0)]
    rows += [metric("finetune", 2, 2, loss=2.5, validation_loss=2.6), metric("start", 5)]
    write(tmp_path, "metrics", rows)
    read = read_curves(tmp_path)
    assert list(read) == ["finetune", "start"]
    assert read["finetune"].loss.tolist() == [3.0, 2.5]
    assert read["finetune"].validated().validation.tolist() == [2.6]
    assert read["finetune"].validated().tokens.tolist() == [20.0]


def test_a_stage_done_again_with_fewer_steps_keeps_nothing_of_the_first_run(tmp_path):
    write(tmp_path, "metrics", [metric("start", s) for s in (5, 10, 15)] + [metric("start", 4, 2, loss=1.0)])
    assert read_curves(tmp_path)["start"].loss.tolist() == [1.0]


def test_an_attempt_begun_anew_keeps_nothing_whatever_the_steps(tmp_path):
    """The second attempt logs later steps than the first: the ledger tells that it began at 0."""
    first = [metric("start", s, validation_loss=0.5) for s in (5, 10, 15)]
    write(tmp_path, "metrics", first + [metric("start", s, 2, loss=1.0) for s in (10, 20)])
    row = {"phase": "start", "stage": "start", "submodel": None, "devices": 1, "status": "startup"}
    write(tmp_path, "ledger", [row | {"attempt": 1, "step": 0}, row | {"attempt": 2, "step": 0}])
    assert read_curves(tmp_path)["start"].loss.tolist() == [1.0, 1.0]


def test_device_seconds_are_seconds_times_devices(tmp_path):
    write(tmp_path, "metrics", [metric("finetune", 5)])
    row = {"phase": "finetune", "stage": "finetune", "submodel": None, "devices": 4}
    write(tmp_path, "ledger", [row])
    assert read_curves(tmp_path)["finetune"].seconds.tolist() == [40.0]
    assert read_curves(tmp_path / "none") == {}


def test_submodels_together_add_up_what_they_use_and_average_their_losses():
    both = together([curve([4.0, 2.0]), curve([3.0, 3.0, 3.0, 3.0], step=10.0)])
    assert both.used() == Used(60, 300, 60, 120)
    assert both.loss[-1] == pytest.approx((20 * 2.0 + 40 * 3.0) / 60)
    np.testing.assert_allclose(both.tokens, [15, 30, 45, 60])
    assert not len(both.validated().loss)


def test_phases_laid_end_to_end():
    curves = {
        "start": curve([5.0, 4.0]),
        "train/0": curve([4.0]),
        "train/1": curve([4.0]),
        "finetune": curve([3.0]),
    }
    laid = path(curves)
    assert list(laid) == ["seed", "submodels", "fine-tuning"]
    assert laid["submodels"].tokens.tolist() == [40.0] and laid["fine-tuning"].tokens.tolist() == [50.0]
    assert total(laid) == Used(50, 250, 50, 100)
    other = path(curves | {f"{RANDOM}train/0": curve([4.0]), f"{RANDOM}finetune_router": curve([3.9])}, RANDOM)
    assert list(other) == ["seed", "submodels", "router"] and total(other).tokens == 40
    assert path({}) == {} and total({}) == Used()


def test_reach_interpolates_between_the_two_entries():
    down = curve([5.0, 4.0, 3.0])
    used, exact = reach(3.25, down, down.loss)
    assert exact and used.tokens == pytest.approx(27.5) and used.dollars == pytest.approx(55.0)
    assert reach(3.0, down, down.loss)[0].tokens == pytest.approx(30)
    assert reach(2.9, down, down.loss) is None
    assert reach(6.0, down, down.loss) == (down.used(0), False)


def test_reach_takes_the_first_crossing_of_a_curve_that_goes_up_again():
    wild = curve([5.0, 3.0, 4.0, 2.0])
    assert reach(3.5, wild, wild.loss)[0].tokens == pytest.approx(17.5)


def test_smoothing_is_a_running_mean_that_keeps_a_line():
    noisy = curve(np.arange(100.0))
    np.testing.assert_allclose(noisy.smooth()[10:90], np.arange(10.0, 90.0))
    assert curve([3.0, 1.0]).smooth().tolist() == [3.0, 1.0]


def test_equal_loss_by_validation_on_both_curves():
    nan = np.nan
    curves = {
        "start": curve([5.0]),
        "finetune": curve([4.0, 4.0], validation=[nan, 3.5]),
        "baselines/joint": curve([9.0] * 4, validation=[nan, 4.0, nan, 3.0]),
    }
    equal = equal_loss(curves, {"disco": 1.0, "joint": 1.0})
    assert equal.measure == "validation loss on the same rows" and equal.target == 3.5
    assert equal.joint.tokens == pytest.approx(30) and equal.disco.tokens == 30 and equal.joint_best == 3.0


def test_equal_loss_without_fine_tuning_shifts_joints_curve():
    curves = {"train/0": curve([4.0]), "baselines/joint": curve([9.0] * 2, validation=[4.0, 3.0])}
    equal = equal_loss(curves, {"disco": 4.0, "joint": 3.5})
    assert "shifted" in equal.measure and equal.joint.tokens == pytest.approx(15)


def test_equal_loss_falls_back_to_training_losses():
    curves = {"finetune": curve([4.0]), "baselines/joint": curve([5.0, 4.5])}
    equal = equal_loss(curves, {"disco": None, "joint": 4.2})
    assert "training loss" in equal.measure and equal.joint is None and equal.joint_best == 4.5
    assert equal_loss({"finetune": curve([4.0])}, {}) is None
    assert equal_loss({"baselines/joint": curve([4.0])}, {}) is None


def test_bounds_hold_the_lowest_loss_and_leave_out_the_first_fall():
    low, high = bounds([curve([9.0] + [4.0] * 29, validation=[np.nan] * 29 + [3.5])])
    assert low < 3.5 and 4.0 < high < 5.0
