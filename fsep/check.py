"""Validation of loads and slots, in one place."""

from __future__ import annotations

import numpy as np

from fsep.topology import Topology

# Sums of loads and their products with cumulative shares stay below 2^63.
MOST_TOKENS = 1 << 31


def check_load(load: np.ndarray, topology: Topology, *, experts: int | None = None, whole: bool) -> np.ndarray:
    """A load as int64 [N, E].

    With ``whole=False`` fractional loads (forecasts) are allowed and are rounded, after scaling small ones up so
    that a unit is at most a millionth of the total.

    Raises:
        ValueError: the wrong shape, a negative, non-finite or (``whole``) fractional entry, or more than 2^31
            tokens in all.
    """
    load = np.asarray(load)
    shape = (topology.devices, experts if experts is not None else "experts")
    if load.ndim != 2 or load.shape[0] != topology.devices or load.shape[1] == 0:
        raise ValueError(f"load has shape {load.shape}: give [devices, experts] = {shape}")
    if experts is not None and load.shape[1] != experts:
        raise ValueError(f"load has {load.shape[1]} experts but the layout has {experts}: make them agree")
    if load.dtype == bool or not np.issubdtype(load.dtype, np.number) or np.iscomplexobj(load):
        raise ValueError(f"load has dtype {load.dtype}: give integers or floats")
    if np.issubdtype(load.dtype, np.floating):
        _refuse(load, ~np.isfinite(load), "finite")
    _refuse(load, load < 0, "non-negative")
    total = float(load.sum(dtype=np.float64))
    if total > MOST_TOKENS:
        raise ValueError(f"load sums to {total:.3g} tokens: at most {MOST_TOKENS} are planned for at once")
    if np.issubdtype(load.dtype, np.floating):
        rounded = np.rint(load)
        fraction = rounded != load
        if fraction.any():
            if whole:
                _refuse(load, fraction, "whole")
            scale = max(1.0, 1e6 / total)
            rounded = np.rint(load * scale)
        load = rounded
    return np.ascontiguousarray(load, dtype=np.int64)


def check_slots(slots: int, devices: int, experts: int) -> int:
    """The slots a device, as an int.

    Raises:
        ValueError: not a whole number of at least 1, or too few for every expert to have a copy.
    """
    if isinstance(slots, bool) or not isinstance(slots, (int, np.integer)) or slots < 1:
        raise ValueError(f"slots is {slots!r}: give a whole number of at least 1")
    if devices * slots < experts:
        raise ValueError(
            f"slots is {slots}: {devices} devices then hold {devices * slots} experts of {experts}; "
            f"give at least {-(-experts // devices)}"
        )
    return int(slots)


def _refuse(load: np.ndarray, bad: np.ndarray, wanted: str) -> None:
    if bad.any():
        device, expert = np.argwhere(bad)[0]
        raise ValueError(f"load[{device}, {expert}] is {load[device, expert]}: give {wanted} token counts")
