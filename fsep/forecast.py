"""Forecasts of the next load from past ones.

Shapes: N devices, E experts.
"""

from __future__ import annotations

import numpy as np

from fsep.traces import LoadTrace

KINDS = ("last", "mean", "trend")
# Weights of the newest load in the moving average, the newest change in the trend, the newest error in the score.
# Chosen for the early and the late steps of a trace alike: the average should neither lag nor follow noise.
NEW = 0.5
NEW_CHANGE = 0.2
NEW_ERROR = 0.1


class Forecaster:
    """Predicts the load ``horizon`` steps ahead, as floats [N, E].

    - ``last``: the newest load;
    - ``mean``: an exponential moving average;
    - ``trend``: the average plus ``horizon`` times an exponential average of its changes, at least zero;
    - ``auto``: whichever has had the least error lately, each measured against the loads that came.

    Everything follows from the loads seen, so ranks that see equal loads predict equally.

    Raises:
        ValueError: an unknown kind or a horizon below 1.
    """

    def __init__(self, kind: str = "auto", horizon: int = 1) -> None:
        if kind not in (*KINDS, "auto"):
            raise ValueError(f"forecast is {kind!r}: choose one of {', '.join(KINDS)}, auto")
        if horizon < 1:
            raise ValueError(f"horizon is {horizon}: give at least 1")
        self.kind, self.horizon = kind, horizon
        self.errors = dict.fromkeys(KINDS, 0.0)
        self._mean: np.ndarray | None = None
        self._change = None
        self._last = None
        self._pending: list[dict[str, np.ndarray]] = []

    def update(self, load_NE: np.ndarray) -> None:
        """Take in the newest load [N, E]."""
        load_NE = np.asarray(load_NE, float)
        if self._mean is None:
            self._mean, self._change = load_NE, np.zeros_like(load_NE)
        else:
            mean = (1 - NEW) * self._mean + NEW * load_NE
            self._change = (1 - NEW_CHANGE) * self._change + NEW_CHANGE * (mean - self._mean)
            self._mean = mean
        self._last = load_NE
        if len(self._pending) == self.horizon:
            for kind, forecast in self._pending.pop(0).items():
                error = relative_error(forecast, load_NE)
                self.errors[kind] = (1 - NEW_ERROR) * self.errors[kind] + NEW_ERROR * error
        self._pending.append({kind: self._forecast(kind) for kind in KINDS})

    def predict(self) -> np.ndarray:
        """The load expected ``horizon`` steps after the newest.

        Raises:
            ValueError: no load was seen yet.
        """
        if self._mean is None:
            raise ValueError("no load seen yet: call update first")
        # Ties go to the first kind, so that every rank picks the same.
        return self._forecast(min(KINDS, key=self.errors.get) if self.kind == "auto" else self.kind)

    def _forecast(self, kind: str) -> np.ndarray:
        if kind == "last":
            return self._last
        if kind == "mean":
            return self._mean
        return np.maximum(self._mean + self.horizon * self._change, 0)


def relative_error(forecast_NE: np.ndarray, load_NE: np.ndarray) -> float:
    """Share of an expert's tokens forecast for the wrong expert: half the L1 distance of the experts' shares."""
    forecast_E, load_E = forecast_NE.sum(0), load_NE.sum(0)
    return float(np.abs(forecast_E / max(forecast_E.sum(), 1) - load_E / max(load_E.sum(), 1)).sum() / 2)


def forecast_errors(trace: LoadTrace, horizon: int = 1, *, first_step: int = 0) -> dict[str, float]:
    """Mean ``relative_error`` of every kind over layers and steps from ``first_step``, micro-batches summed."""
    found: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "auto")}
    for layer in range(trace.layers):
        loads = trace.tokens[:, layer].sum(1, dtype=np.int64)
        forecasters = {kind: Forecaster(kind, horizon) for kind in found}
        for step in range(trace.steps - horizon):
            for kind, forecaster in forecasters.items():
                forecaster.update(loads[step])
                if step >= first_step:
                    found[kind].append(relative_error(forecaster.predict(), loads[step + horizon]))
    return {kind: float(np.mean(errors)) if errors else float("nan") for kind, errors in found.items()}
