"""One decorator for every compiled function of the planner."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numba


def jit(function: Callable) -> Callable:
    """Compile ``function`` with numba, without the interpreter lock, cached on disk for the next start.

    numba notices a change in a function's own file but not in the functions that it calls, so the cache folder
    carries a digest of all files with compiled functions. Where no folder can be written, each process compiles
    afresh.
    """
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_cache_folder())
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)
    finally:
        numba.config.CACHE_DIR = before


@cache
def _cache_folder() -> Path:
    """``NUMBA_CACHE_DIR`` if set, else beside the sources, else the user's cache folder; then the digest."""
    package = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(package.glob("*.py")):
        text = source.read_bytes()
        if b"fsep.jit" in text:
            digest.update(text)
    if numba.config.CACHE_DIR:
        base = Path(numba.config.CACHE_DIR)
    elif os.access(package, os.W_OK):
        base = package / "__pycache__"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fsep"
    return base / f"numba-{digest.hexdigest()}"
