import sys
import types
import warnings
from types import SimpleNamespace

import pytest
import wandb

from launch.tracking import Silent, tracker


def section(mode="offline"):
    return SimpleNamespace(wandb=mode, project="test")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", "")  # so that it is put back
    monkeypatch.delenv("WANDB_CACHE_DIR")


def test_offline_needs_no_login_and_writes_below_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/proc/none")  # nothing can be written there
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        track = tracker(section(), tmp_path / "run", "run", "train/0#1", {"learning_rate": 1e-3})
        track.log({"loss": 2.5, "expert_share": [[0.5, 0.5]]}, 1)
        track.finish()
        track.finish()
    wandb.teardown()  # as at the end of a process: the file is whole only then
    written = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 1 and b"train/0#1" in written[0].read_bytes()


def test_disabled_and_missing_are_silent(tmp_path, monkeypatch):
    assert isinstance(tracker(section("disabled"), tmp_path, "g", "n", {}), Silent)
    monkeypatch.setitem(sys.modules, "wandb", None)
    track = tracker(section(), tmp_path, "g", "n", {})
    track.log({"loss": 1.0}, 1)
    track.finish()
    assert isinstance(track, Silent) and not any(tmp_path.iterdir())


def test_environment_can_disable(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert isinstance(tracker(section("online"), tmp_path, "g", "n", {}), Silent)


def fake_wandb(monkeypatch, init):
    module = types.ModuleType("wandb")
    module.init, module.Settings = init, lambda **kwargs: kwargs
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_failure_at_start_warns_once_and_goes_on(tmp_path, monkeypatch):
    def init(**kwargs):
        raise OSError("read-only file system")

    fake_wandb(monkeypatch, init)
    with pytest.warns(UserWarning, match="wandb does not work here .read-only file system"):
        track = tracker(section(), tmp_path, "g", "n", {})
    track.log({"loss": 1.0}, 1)


def test_failure_while_running_warns_once_and_goes_on(tmp_path, monkeypatch):
    class Run:
        def log(self, values, step):
            raise BrokenPipeError("service gone")

    given = {}

    def init(**kwargs):
        given.update(kwargs)
        return Run()

    fake_wandb(monkeypatch, init)
    track = tracker(section("online"), tmp_path, "pipeline", "train/1#2", {"a": 1})
    assert (given["group"], given["job_type"], given["mode"]) == ("pipeline", "train/1", "online")
    with pytest.warns(UserWarning, match="service gone"):
        track.log({"loss": 1.0}, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        track.log({"loss": 1.0}, 2)
        track.finish()


def test_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="training goes on without it"):
        assert isinstance(tracker(section(), tmp_path / "file" / "run", "g", "n", {}), Silent)
