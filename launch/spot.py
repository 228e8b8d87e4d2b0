"""Training on devices that can be taken away: expected time and cost, and how often to write a checkpoint.

The model is Daly's (A higher order estimate of the optimum checkpoint interval for restart dumps, 2006): work is
cut into segments of `interval` seconds, each followed by a checkpoint of C seconds; interruptions come at random
with a mean of M seconds between them, at any moment, restarts included; each costs what was done since the last
checkpoint and a restart of R seconds. A segment of s = interval + C seconds then takes, on average,

    E(s) = M exp(R / M) (exp(s / M) - 1),

since an undisturbed stretch of s seconds takes M (exp(s / M) - 1) and each of the exp(s / M) - 1 interruptions
before it costs M (exp(R / M) - 1). The interval that minimises E(interval + C) / interval is

    M (1 + W(-exp(-1 - C / M))),        W = Lambert's function,

of which Young's sqrt(2 C M) (1974) is the first term for C much smaller than M.
"""

import math
from dataclasses import dataclass

from scipy.special import lambertw


class SpotError(ValueError):
    """A time or a rate that cannot be; the message names value and remedy."""


@dataclass(frozen=True, kw_only=True)
class Spot:
    """What a job with interruptions comes to; seconds of wall time."""

    interval: float  # between checkpoints, work alone
    expected: float
    interruptions: float  # expected number


def best_interval(checkpoint: float, per_hour: float) -> float:
    """Seconds of work between checkpoints of `checkpoint` seconds that minimise the expected time.

    Infinite without interruptions, and 0 where checkpoints cost nothing.
    """
    _check(checkpoint=checkpoint, per_hour=per_hour)
    if per_hour == 0:
        return math.inf
    mean = 3600 / per_hour
    if checkpoint / mean < 1e-9:  # where W loses its digits
        return math.sqrt(2 * checkpoint * mean)
    return mean * (1 + float(lambertw(-math.exp(-1 - checkpoint / mean)).real))


def expected_seconds(work: float, interval: float, checkpoint: float, restart: float, per_hour: float) -> float:
    """Expected wall time of `work` seconds with a checkpoint after every `interval` of them and at the end.

    `per_hour` is the rate of interruptions of the whole job: that of a device times its devices.
    """
    _check(work=work, checkpoint=checkpoint, restart=restart, per_hour=per_hour)
    if not interval > 0:
        raise SpotError(f"the checkpoint interval is {interval}: it must be above 0 seconds")
    whole, rest = (0, work) if math.isinf(interval) else divmod(work, interval)
    if rest < 1e-9 * work:
        rest = 0.0
    return whole * _segment(interval + checkpoint, restart, per_hour, count=whole) + (
        _segment(rest + checkpoint, restart, per_hour) if rest else 0.0
    )


def _segment(length: float, restart: float, per_hour: float, count: float = 1) -> float:
    if not count:
        return 0.0
    if per_hour == 0:
        return length
    mean = 3600 / per_hour
    if (restart + length) / mean > 500:
        raise SpotError(
            f"{per_hour:g} interruptions an hour leave no chance to finish {length:.0f} seconds between two "
            "checkpoints: write them faster, or rent on demand"
        )
    return mean * math.exp(restart / mean) * math.expm1(length / mean)


def spot(work: float, *, checkpoint: float, restart: float, per_hour: float) -> Spot:
    """The best interval for `work` seconds and what it leads to. Raises SpotError for times below 0."""
    if work <= 0:
        _check(work=work)
        return Spot(interval=math.inf, expected=0.0, interruptions=0.0)
    interval = min(work, max(best_interval(checkpoint, per_hour), 1.0))
    interval = work / max(1, round(work / interval))  # equal segments
    expected = expected_seconds(work, interval, checkpoint, restart, per_hour)
    return Spot(interval=interval, expected=expected, interruptions=expected * per_hour / 3600)


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise SpotError(f"{name} is {value}: it must be a number, 0 or more")
