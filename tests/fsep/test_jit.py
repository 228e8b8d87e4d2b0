import os
import subprocess
import sys
from pathlib import Path

import pytest

import fsep
from fsep import jit

SCRIPT = """
import numpy as np
from fsep.jit import _cache_folder, jit

@jit
def double(x):
    return 2 * x

assert double(21) == 42
print(_cache_folder())
"""


def test_public_names_resolve():
    assert all(getattr(fsep, name) is not None for name in fsep.__all__)
    assert dir(fsep) == fsep.__all__
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        fsep.plam  # noqa: B018


def run(script_folder, **environment):
    """The cache folder printed by ``SCRIPT``; numba caches only functions that come from a file."""
    script = script_folder / "script.py"
    script.write_text(SCRIPT)
    search = str(Path(fsep.__file__).parents[1])
    variables = {**os.environ, "PYTHONPATH": search, **environment}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=variables)
    return Path(done.stdout.strip())


def test_cache_goes_where_the_user_says(tmp_path):
    folder = run(tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert folder.parent == tmp_path / "cache"
    assert list(folder.rglob("*.nbi"))


def test_no_place_to_write_compiles_all_the_same(tmp_path):
    (tmp_path / "file").write_text("")
    folder = run(tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "file"))
    assert not folder.exists()


def test_read_only_package_uses_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(jit.os, "access", lambda *_: False)
    monkeypatch.setattr(jit.numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jit._cache_folder.cache_clear()
    try:
        assert jit._cache_folder().parent == tmp_path / "fsep"
    finally:
        jit._cache_folder.cache_clear()
