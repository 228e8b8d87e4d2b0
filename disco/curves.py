"""Loss curves of a run: read from metrics.jsonl, laid end to end, compared at equal loss.

Everything here counts training steps alone: start-up and lost work are in the ledger (see costs.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from launch.ledger import phase_of, read

SEED, ROUTER, FINETUNE, JOINT, RANDOM = (
    "start",
    "finetune_router",
    "finetune",
    "baselines/joint",
    "baselines/random_split/",
)


class Used(NamedTuple):
    """What it took to get somewhere; `seconds` are device-seconds."""

    tokens: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    dollars: float = 0.0


@dataclass(frozen=True)
class Curve:
    """Float arrays [n], one entry a logged step: what was used until then, training loss, and validation loss
    (NaN where it was not taken)."""

    tokens: np.ndarray
    flops: np.ndarray
    seconds: np.ndarray
    dollars: np.ndarray
    loss: np.ndarray
    validation: np.ndarray

    def used(self, at: int = -1) -> Used:
        return Used(*(float(getattr(self, name)[at]) for name in Used._fields))

    def after(self, before: Used) -> "Curve":
        """The same curve, begun when `before` had been used."""
        return replace(self, **{name: getattr(self, name) + value for name, value in before._asdict().items()})

    def smooth(self) -> np.ndarray:
        """Training loss as a running mean over a tenth of the entries."""
        n = len(self.loss)
        half = n // 20
        total = np.concatenate([[0.0], np.cumsum(self.loss)])
        low, high = np.maximum(np.arange(n) - half, 0), np.minimum(np.arange(n) + half + 1, n)
        return (total[high] - total[low]) / (high - low)

    def validated(self) -> "Curve":
        """Only the entries that have a validation loss."""
        kept = np.isfinite(self.validation)
        return Curve(**{field.name: getattr(self, field.name)[kept] for field in fields(self)})


def read_curves(run: Path) -> dict[str, Curve]:
    """The curve of each phase in `run`/metrics.jsonl.

    A later attempt replaces the rows of earlier ones from the step at which it went on, which its first ledger
    row tells.
    """
    ledger = read(run / "ledger.jsonl")
    devices = {phase_of(row): row["devices"] for row in ledger}
    starts = [row for row in ledger if row.get("status") == "startup"]
    began = {(phase_of(row), row["attempt"]): row.get("step", 0) for row in starts}
    rows_of: dict[str, list[dict]] = {}
    for row in read(run / "metrics.jsonl"):
        kept = rows_of.setdefault(row["phase"], [])
        attempt = row.get("attempt")
        if kept and kept[-1].get("attempt") != attempt:
            last = began.get((row["phase"], attempt), row["step"] - 1)
            kept[:] = [earlier for earlier in kept if earlier["step"] <= last]
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return {
        phase: Curve(
            seconds=_column(rows, "seconds") * devices.get(phase, 1),
            validation=_column(rows, "validation_loss"),
            **{name: _column(rows, name) for name in ("tokens", "flops", "dollars", "loss")},
        )
        for phase, rows in rows_of.items()
    }


def _column(rows: list[dict], name: str) -> np.ndarray:
    return np.array([row.get(name, np.nan) for row in rows], dtype=np.float64)


def together(curves: list[Curve]) -> Curve:
    """Submodels as one curve: at equal progress, what all used, and the mean loss weighted by tokens."""
    progress = np.linspace(0, 1, max(len(curve.loss) for curve in curves) + 1)[1:]
    weights = np.array([curve.tokens[-1] for curve in curves])

    def along(curve: Curve, values: np.ndarray, start: float) -> np.ndarray:
        share = np.concatenate([[0.0], curve.tokens / curve.tokens[-1]])
        return np.interp(progress, share, np.concatenate([[start], values]))

    used = {name: sum(along(curve, getattr(curve, name), 0.0) for curve in curves) for name in Used._fields}
    losses = [along(curve, curve.loss, curve.loss[0]) for curve in curves]
    return Curve(
        **used, loss=np.average(losses, axis=0, weights=weights), validation=np.full(len(progress), np.nan)
    )


def submodel_curves(curves: dict[str, Curve], prefix: str = "") -> list[Curve]:
    return [curve for phase, curve in curves.items() if phase.startswith(f"{prefix}train/")]


def path(curves: dict[str, Curve], prefix: str = "") -> dict[str, Curve]:
    """The phases of a pipeline laid end to end, as {seed, submodels, router, fine-tuning}; those that ran.

    `prefix` is "" for DisCo, RANDOM for the random split, which shares the seed phase.
    """
    phases = {"seed": curves.get(SEED)}
    apart = submodel_curves(curves, prefix)
    phases["submodels"] = together(apart) if apart else None
    phases["router"] = curves.get(f"{prefix}{ROUTER}")
    phases["fine-tuning"] = curves.get(f"{prefix}{FINETUNE}")
    laid, before = {}, Used()
    for name, curve in phases.items():
        if curve is not None:
            laid[name] = curve.after(before)
            before = laid[name].used()
    return laid


def total(laid: dict[str, Curve]) -> Used:
    """What a path used in all."""
    return list(laid.values())[-1].used() if laid else Used()


def reach(target: float, curve: Curve, losses: np.ndarray) -> tuple[Used, bool] | None:
    """What `curve` had used when `losses` [n] first came down to `target`, between entries by interpolation.

    The flag is False where the first entry is below the target already, so that the answer is an upper bound.
    None if it never gets there.
    """
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    at = int(below[0])
    if at == 0:
        return curve.used(0), False
    share = (losses[at - 1] - target) / (losses[at - 1] - losses[at])
    pairs = zip(curve.used(at - 1), curve.used(at), strict=True)
    return Used(*(a + share * (b - a) for a, b in pairs)), True


@dataclass(frozen=True)
class EqualLoss:
    """DisCo's final loss, and what DisCo and joint training used to get there."""

    measure: str  # which loss was compared
    target: float
    disco: Used
    joint: Used | None  # None: joint training did not get there
    exact: bool  # False: joint was there at its first measurement, `joint` is an upper bound
    joint_best: float


def equal_loss(curves: dict[str, Curve], full: dict[str, float | None]) -> EqualLoss | None:
    """Where joint training reaches DisCo's final loss; None without a joint curve and a DisCo path.

    Compared are, in this order: validation losses on the same rows along both curves; DisCo's final loss on the
    whole validation split (`full` = {"disco": ..., "joint": ...}) with joint's curve, shifted by what its last
    point differs from joint's own loss on the whole split; smoothed training losses.
    """
    laid, joint = path(curves), curves.get(JOINT)
    if joint is None or not laid:
        return None
    last, seen = list(laid.values())[-1].validated(), joint.validated()
    if len(last.loss) and len(seen.loss):
        measure, target, losses = "validation loss on the same rows", float(last.validation[-1]), seen.validation
    elif len(seen.loss) and full.get("disco") is not None and full.get("joint") is not None:
        measure = "validation loss, joint's curve shifted to the whole validation split"
        target, losses = full["disco"], seen.validation + (full["joint"] - seen.validation[-1])
    else:
        seen, measure = joint, "smoothed training loss, for want of validation losses along the curves"
        target, losses = float(list(laid.values())[-1].smooth()[-1]), joint.smooth()
    found = reach(target, seen, losses)
    used, exact = found if found else (None, True)
    return EqualLoss(measure, target, total(laid), used, exact, float(np.min(losses)))


def bounds(curves: Iterable[Curve]) -> tuple[float, float]:
    """A range of losses to draw: from the lowest, to where curves are once their first sixth is over."""
    low, high = np.inf, -np.inf
    for curve in curves:
        smooth = curve.smooth()
        seen = curve.validation[np.isfinite(curve.validation)]
        low = min([low, smooth.min(), *seen])
        high = max(high, smooth[len(smooth) // 6])
    margin = 0.05 * max(high - low, 0.1)
    return float(low - margin), float(high + margin)
