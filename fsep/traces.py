"""Load traces: how many tokens each device sends to each expert, step by step.

Shapes: S steps, L layers, M micro-batches, N devices, E experts.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

KINDS = ("zipf", "dirichlet", "hot-set", "rotating", "burst", "clustered")


@dataclass(frozen=True, eq=False)
class LoadTrace:
    """Recorded or synthesized loads.

    Args:
        tokens: [S, L, M, N, E] whole numbers: tokens that device n's router sent to expert e.
        iteration: [S], the training iteration of each step; 0, 1, 2, ... when not given.
        layer: [L], the number of each layer in its model; 0, 1, 2, ... when not given.

    Raises:
        ValueError: another shape, or counts that are negative or not whole.
    """

    tokens: np.ndarray
    iteration: np.ndarray | None = None
    layer: np.ndarray | None = None

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens)
        if tokens.ndim != 5 or 0 in tokens.shape:
            raise ValueError(
                f"trace.tokens has shape {tokens.shape}: give [step, layer, micro-batch, device, expert]"
            )
        if not np.issubdtype(tokens.dtype, np.number) or np.iscomplexobj(tokens):
            raise ValueError(f"trace.tokens has dtype {tokens.dtype}: give whole numbers")
        if not np.issubdtype(tokens.dtype, np.integer):
            if not (np.isfinite(tokens).all() and (tokens == np.rint(tokens)).all()):
                raise ValueError("trace.tokens holds fractions or non-finite values: give whole numbers")
            tokens = tokens.astype(np.int64)
        if tokens.min() < 0:
            raise ValueError(f"trace.tokens holds {tokens.min()}: give counts of at least 0")
        object.__setattr__(self, "tokens", tokens)
        for name, length in (("iteration", tokens.shape[0]), ("layer", tokens.shape[1])):
            value = getattr(self, name)
            value = np.arange(length) if value is None else np.asarray(value)
            if value.shape != (length,) or not np.issubdtype(value.dtype, np.integer):
                raise ValueError(f"trace.{name} has shape {value.shape}, {value.dtype}: give {length} integers")
            object.__setattr__(self, name, value.astype(np.int64))

    @property
    def steps(self) -> int:
        return self.tokens.shape[0]

    @property
    def layers(self) -> int:
        return self.tokens.shape[1]

    @property
    def microbatches(self) -> int:
        return self.tokens.shape[2]

    @property
    def devices(self) -> int:
        return self.tokens.shape[3]

    @property
    def experts(self) -> int:
        return self.tokens.shape[4]

    def save(self, path: str | os.PathLike) -> None:
        """Write an ``.npz``, whole or not at all; counts take the smallest integer type that holds them."""
        path = Path(path)
        dtype = next(t for t in (np.int16, np.int32, np.int64) if self.tokens.max() <= np.iinfo(t).max)
        partial = path.with_name(path.name + ".partial")
        with open(partial, "wb") as file:
            np.savez_compressed(file, tokens=self.tokens.astype(dtype), iteration=self.iteration, layer=self.layer)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> LoadTrace:
        """Read an ``.npz``; ``iteration`` and ``layer`` may be missing from it.

        Raises:
            ValueError: no such file, not an ``.npz``, no ``tokens`` in it, or bad contents.
        """
        try:
            arrays = np.load(path, allow_pickle=False)
            # Arrays are read, and can fail to be, only here.
            found = {name: arrays[name] for name in arrays.files} if hasattr(arrays, "files") else None
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist: give a trace file") from None
        # numpy raises ValueError for what it takes to be a pickle.
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} can't be read as .npz ({error}): give a load trace") from None
        if found is None:
            raise ValueError(f"{path} holds a bare array: give an .npz with an array `tokens`")
        arrays.close()
        if "tokens" not in found:
            raise ValueError(f"{path} has no array `tokens`, only {sorted(found)}: give a load trace")
        return cls(found["tokens"], found.get("iteration"), found.get("layer"))


def synthesize(
    kind: str,
    *,
    devices: int,
    experts: int,
    steps: int = 20,
    layers: int = 1,
    microbatches: int = 1,
    tokens_per_device: int = 4096,
    skew: float = 1.0,
    device_spread: float = 0.02,
    seed: int = 0,
) -> LoadTrace:
    """A made-up trace; equal arguments give equal traces.

    Each layer has a popularity over experts that depends on ``kind``:

    - ``zipf``: rank^-skew in a random order, redrawn slowly (a swap of two ranks a step);
    - ``dirichlet``: one draw with concentration 1 / skew, and a small random walk over steps;
    - ``hot-set``: a tenth of the experts (at least one) takes skew / (1 + skew) of the tokens;
    - ``rotating``: a hot spot of that share moves to the next expert every step;
    - ``burst``: uniform, but at random steps (one in five) one expert takes that share;
    - ``clustered``: hot experts are neighbours: a bump over expert numbers whose width shrinks with skew, drifting.

    Args:
        skew: at least 0; 0 is uniform.
        device_spread: how far a device's mix departs from the layer's, as relative noise (log-normal sigma).

    Raises:
        ValueError: an unknown kind, a size below 1, a negative or non-finite skew or spread.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}: choose one of {', '.join(KINDS)}")
    sizes = dict(devices=devices, experts=experts, steps=steps, layers=layers, microbatches=microbatches)
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: give at least 1")
    for name, value in dict(tokens_per_device=tokens_per_device, skew=skew, device_spread=device_spread).items():
        if not (np.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value}: give a finite number of at least 0")
    rng = np.random.default_rng(seed)
    tokens = np.empty((steps, layers, microbatches, devices, experts), np.int64)
    for layer in range(layers):
        popularity_SE = _popularity(kind, rng, steps, experts, skew)
        for step in range(steps):
            mix = popularity_SE[step] * np.exp(
                device_spread * rng.standard_normal((microbatches, devices, experts))
            )
            mix /= mix.sum(-1, keepdims=True)
            tokens[step, layer] = rng.multinomial(tokens_per_device, mix)
    return LoadTrace(tokens)


def _popularity(kind: str, rng: np.random.Generator, steps: int, experts: int, skew: float) -> np.ndarray:
    """[S, E], rows sum to 1."""
    share = skew / (1 + skew)
    out = np.full((steps, experts), 1 / experts)
    if kind == "zipf":
        weight = (1 + np.arange(experts, dtype=float)) ** -skew
        order = rng.permutation(experts)
        for step in range(steps):
            out[step, order] = weight
            a, b = rng.integers(experts, size=2)
            order[[a, b]] = order[[b, a]]
    elif kind == "dirichlet" and skew > 0:
        logits = np.log(rng.dirichlet(np.full(experts, 1 / skew)) + 1e-6)
        for step in range(steps):
            out[step] = np.exp(logits)
            logits = logits + 0.05 * rng.standard_normal(experts)
    elif kind == "hot-set":
        hot = rng.permutation(experts)[: max(1, experts // 10)]
        out *= 1 - share
        out[:, hot] += share / len(hot)
    elif kind == "rotating":
        first = rng.integers(experts)
        out *= 1 - share
        out[np.arange(steps), (first + np.arange(steps)) % experts] += share
    elif kind == "burst":
        for step in np.flatnonzero(rng.random(steps) < 0.2):
            out[step] *= 1 - share
            out[step, rng.integers(experts)] += share
    elif kind == "clustered":
        centre, drift = rng.uniform(0, experts), rng.uniform(-0.2, 0.2)
        for step in range(steps):
            away = np.abs(np.arange(experts) - (centre + drift * step) % experts)
            away = np.minimum(away, experts - away) / experts
            out[step] = np.exp(-0.5 * (away * 8 * skew) ** 2) + 1e-4
    return out / out.sum(-1, keepdims=True)
