import sys
import types
import warnings
from types import SimpleNamespace

import pytest
import wandb

from launch.tracking import OF_A_TRIAL, Silent, Tracker, need, report_trial, tracker, trial


def section(mode="offline", tensorboard=False):
    return SimpleNamespace(wandb=mode, project="test", tensorboard=tensorboard)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", *OF_A_TRIAL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", "")  # so that it is put back
    monkeypatch.delenv("WANDB_CACHE_DIR")


def test_offline_needs_no_login_and_writes_below_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/proc/none")  # nothing can be written there
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        track = tracker(section(), tmp_path / "run", "run", "train/0#1", {"learning_rate": 1e-3})
        track.log({"loss": 2.5, "dollars": 0.125, "expert_share": [[0.5, 0.5]]}, 1)
        track.finish()
        track.finish()
    wandb.teardown()  # as at the end of a process: the file is whole only then
    written = list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(written) == 1 and b"train/0#1" in written[0].read_bytes()
    assert b"dollars_to_best_loss" in written[0].read_bytes()


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


class Kept:
    """A writer that keeps what it is given."""

    name = "kept"

    def __init__(self, breaks=False):
        self.rows, self.summary, self.breaks = [], None, breaks

    def log(self, values, step):
        if self.breaks:
            raise OSError("disk full")
        self.rows.append((step, values))

    def finish(self, summary):
        self.summary = summary


def test_the_summary_says_what_the_best_loss_took():
    kept = Kept()
    track = Tracker([kept])
    for step, loss in enumerate((3.0, 2.0, 2.5), start=1):
        track.log({"loss": loss, "dollars": step * 0.1, "tokens": step * 100}, step)
    track.finish()
    assert kept.summary == {
        "best_loss": 2.0,
        "best_loss_is": "training",
        "best_loss_step": 2,
        "dollars_to_best_loss": 0.2,
        "tokens_to_best_loss": 200,
    }
    track.log({"loss": 1.0}, 4)  # after the end
    assert len(kept.rows) == 3


def test_validation_losses_count_where_there_are_any():
    kept = Kept()
    track = Tracker([kept])
    for step, values in enumerate(({"loss": 1.0}, {"loss": 1.1, "validation_loss": 3.0}, {"loss": 0.5}), start=1):
        track.log(values | {"dollars": float(step)}, step)
    track.finish()
    assert (kept.summary["best_loss"], kept.summary["best_loss_is"]) == (3.0, "validation")
    assert kept.summary["dollars_to_best_loss"] == 2.0


def test_one_writer_that_breaks_does_not_stop_the_other():
    broken, kept = Kept(breaks=True), Kept()
    track = Tracker([broken, kept])
    with pytest.warns(UserWarning, match="kept does not work here .disk full"):
        track.log({"loss": 1.0}, 1)
    track.log({"loss": 0.5}, 2)
    assert [step for step, _ in kept.rows] == [1, 2]


def test_attempts_are_runs_of_their_own_even_below_an_agent(tmp_path, monkeypatch):
    """Two offline attempts have two ids, neither of them the trial's: syncing both overlaps nothing."""
    monkeypatch.setenv("WANDB_RUN_ID", "trial123")
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    for attempt in (1, 2):
        track = tracker(section(), tmp_path / "run", "run", f"train/0#{attempt}", {})
        track.log({"loss": 1.0}, 1)
        track.finish()
    folders = [path.name for path in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    ids = {name.rpartition("-")[2] for name in folders}
    assert len(folders) == len(ids) == 2 and "trial123" not in ids


def test_a_trial_reports_under_the_id_of_its_sweep(tmp_path, monkeypatch):
    assert trial() is None
    monkeypatch.setenv("WANDB_RUN_ID", "trial123")
    assert trial() is None  # a run id without a sweep is somebody else's
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert trial() == "trial123"
    report_trial("test", tmp_path, {"validation_loss": 4.5})
    wandb.teardown()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert folder.name.endswith("-trial123")
    assert b"validation_loss" in next(folder.glob("*.wandb")).read_bytes()


def test_a_trial_that_cannot_be_reported_is_kept(tmp_path, monkeypatch):
    fake_wandb(monkeypatch, lambda **kwargs: 1 / 0)
    with pytest.warns(UserWarning, match="the sweep could not be told"):
        report_trial("test", tmp_path, {"validation_loss": 4.5})


def test_tensorboard_is_asked_for_by_name_where_it_is_missing(tmp_path, monkeypatch):
    need(section())
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tracking.tensorboard is true.*pip install 'moe-disco.tensorboard"):
        tracker(section("disabled", tensorboard=True), tmp_path, "g", "train/0#1", {})


def test_tensorboard_writes_scalars_and_summary(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'moe-disco[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track = tracker(section("disabled", tensorboard=True), tmp_path, "g", "train/0#1", {"lr": 0.1})
    track.log({"loss": 2.0, "dollars": 0.5, "text": "x"}, 1)
    track.log({"loss": 1.5, "dollars": 1.0}, 2)
    track.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "train" / "0#1")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.5)]
    assert events.Scalars("summary/dollars_to_best_loss")[0].value == 1.0
