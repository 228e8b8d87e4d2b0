"""Other ways than the weighted average to make one shared part of several.

theta_k are the submodels' tensors, tau_k = theta_k - base, w_k the weights of the submodels, which sum to one.

- `task_arithmetic` (arXiv 2212.04089): base + scale * sum_k tau_k.
- `ties` (arXiv 2306.01708): of each tau_k only the largest `density` of its elements is kept; each element's sign
  is that of sum_k w_k tau_k; base + scale * the weighted mean of those tau_k that have it.
- `keep`: the shared part of one submodel.

Weights can differ by layer. Everything is streamed; the threshold of `ties` comes from a first pass, a histogram of
magnitudes whose bins are 1/128 of a power of two wide: at least the wanted share is kept, and little more.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from disco.config import ConfigError
from disco.tensor_files import FLOATS, as_bytes, as_tensor

DENSITY = 0.2
SCALE = {"task_arithmetic": 0.4, "ties": 1.0}


class Shared(NamedTuple):
    """How the shared part is made. `layers`: beginnings of tensor names to weights, one a submodel; the longest
    that fits a tensor counts."""

    method: str = "average"
    scale: float | None = None
    density: float = DENSITY
    keep: int | None = None
    layers: dict[str, list[float]] = {}

    def weights(self, key: str) -> list[float] | None:
        """The weights given for a tensor, if any."""
        fitting = [name for name in self.layers if f"{key}.".startswith(f"{name}.")]
        return self.layers[max(fitting, key=len)] if fitting else None

    def check(self, keys: Iterable[str], submodels: int) -> None:
        """Raise ConfigError for a submodel that does not exist, and for layers that fit no tensor."""
        if (self.method == "keep") != (self.keep is not None):
            raise ConfigError(f"merge.shared is {self.method} and merge.keep {self.keep}: they go together")
        if self.keep is not None and not 0 <= self.keep < submodels:
            raise ConfigError(f"merge.keep is {self.keep} but there are {submodels} submodels, counted from 0")
        keys = list(keys)
        for name in self.layers:
            if not any(f"{key}.".startswith(f"{name}.") for key in keys):
                raise ConfigError(f"merge.layer_weights: no shared tensor's name begins with '{name}'")


def task_arithmetic(base: bytearray, thetas: list[bytearray], scale: float, dtype: str) -> memoryview:
    """Raw values of `dtype` in and out; computed in float64, cast once."""
    anchor = as_tensor(base, dtype).double()
    total = torch.zeros_like(anchor)
    for theta in thetas:
        total += as_tensor(theta, dtype).double() - anchor
    return as_bytes((anchor + scale * total).to(FLOATS[dtype]))


def ties(
    base: bytearray,
    thetas: list[bytearray],
    weights: list[float],
    thresholds: list[float],
    scale: float,
    dtype: str,
) -> memoryview:
    """Raw values of `dtype` in and out; `thresholds`: magnitudes from which elements of each tau are kept."""
    anchor = as_tensor(base, dtype).double()
    trimmed = []
    for theta, threshold in zip(thetas, thresholds, strict=True):
        tau = as_tensor(theta, dtype).double() - anchor
        trimmed.append(torch.where(tau.abs() >= threshold, tau, 0.0))
    elected = sum(weight * tau for weight, tau in zip(weights, trimmed, strict=True)).sign()
    total, mass = torch.zeros_like(anchor), torch.zeros_like(anchor)
    for weight, tau in zip(weights, trimmed, strict=True):
        agrees = weight * ((tau.sign() == elected) & (tau != 0))
        total += agrees * tau
        mass += agrees
    mean = torch.where(mass > 0, total / mass.clamp_min(1e-300), 0.0)
    return as_bytes((anchor + scale * mean).to(FLOATS[dtype]))


def threshold(pairs: Iterable[tuple[bytearray, bytearray]], density: float, dtype: str) -> float:
    """The magnitude that about `density` of the elements of theta - base reach; `pairs` are chunks of both."""
    counts = torch.zeros(1 << 15, dtype=torch.int64)
    for base, theta in pairs:
        tau = (as_tensor(theta, dtype).double() - as_tensor(base, dtype).double()).float().abs()
        counts += torch.bincount(tau.view(torch.int32) >> 16, minlength=1 << 15)
    reached = counts.flip(0).cumsum(0).flip(0)  # how many are at least in a bin
    bins = (reached >= density * counts.sum()).nonzero()
    lowest = torch.tensor([int(bins.max()) << 16], dtype=torch.int32).view(torch.float32)
    return float(lowest)
