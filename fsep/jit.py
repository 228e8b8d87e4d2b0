"""One decorator for every compiled function of the planner."""

from __future__ import annotations

from collections.abc import Callable

import numba


def jit(function: Callable) -> Callable:
    """Compile ``function`` with numba, cached on disk so that the second start is quick.

    numba keeps the cache beside the source, or in the user's cache folder where the source is read-only. Where
    neither can be written it raises; then the function is compiled afresh in each process.
    """
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)
