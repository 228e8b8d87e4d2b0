import numpy as np
import pytest

from fsep import Forecaster, LoadTrace
from fsep.forecast import forecast_errors, relative_error


def run(kind, series, horizon=1):
    forecaster = Forecaster(kind, horizon)
    for load in series:
        forecaster.update(np.array([[load, 100.0]]))
    return forecaster


def test_each_kind_by_hand():
    assert run("last", [10, 20]).predict().tolist() == [[20, 100]]
    assert run("mean", [10, 20]).predict().tolist() == [[15, 100]]
    # The average moved by 5, of which a fifth counts, two steps ahead.
    assert run("trend", [10, 20], horizon=2).predict().tolist() == [[15 + 2 * 0.2 * 5, 100]]
    assert run("trend", [1000, 0, 0, 0], horizon=9).predict()[0, 0] == 0


def test_auto_follows_the_kind_with_the_least_error():
    rng = np.random.default_rng(0)
    jumps = run("auto", np.repeat(rng.uniform(100, 900, 20), 4))
    assert min(jumps.errors, key=jumps.errors.get) == "last"
    rising = run("auto", 50.0 * np.arange(40), horizon=3)
    assert min(rising.errors, key=rising.errors.get) == "trend"
    assert rising.predict()[0, 0] > 50 * 39
    noisy = run("auto", 500 + 30 * rng.standard_normal(80))
    assert min(noisy.errors, key=noisy.errors.get) == "mean"


def test_relative_error_is_the_share_of_misplaced_tokens():
    assert relative_error(np.array([[50, 50]]), np.array([[30, 70]])) == pytest.approx(0.2)
    assert relative_error(np.zeros((1, 2)), np.zeros((1, 2))) == 0


def test_errors_over_a_trace():
    tokens = np.zeros((12, 1, 2, 1, 2), int)
    tokens[..., 0, 0], tokens[..., 0, 1] = 30, 70
    assert set(forecast_errors(LoadTrace(tokens), 2).values()) == {0.0}
    assert np.isnan(forecast_errors(LoadTrace(tokens), 12)["last"])
    tokens[6:, ..., 0, 0], tokens[6:, ..., 0, 1] = 70, 30
    assert forecast_errors(LoadTrace(tokens))["last"] == pytest.approx(0.4 / 11)
    assert forecast_errors(LoadTrace(tokens), first_step=8)["last"] == 0


def test_refuses():
    with pytest.raises(ValueError, match="forecast is 'oracle'"):
        Forecaster("oracle")
    with pytest.raises(ValueError, match="horizon is 0"):
        Forecaster(horizon=0)
    with pytest.raises(ValueError, match="no load seen yet"):
        Forecaster().predict()
