"""Who makes a stage: told by a note that is true while its maker lives or is heard of."""

import json
import os
import subprocess
import sys
import time

import pytest

from disco import artifacts, running


def test_a_note_is_there_while_the_stage_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "BEAT_SECONDS", 0.02)
    with running.making(tmp_path, "train/0"):
        note = running.note_of(tmp_path, "train/0")
        os.utime(note, (1, 1))
        deadline = time.time() + 20
        while note.stat().st_mtime < 2 and time.time() < deadline:
            time.sleep(0.01)
        found = running.running(tmp_path, "train/0")
        assert found.sure
        assert time.time() - found.seen < 20  # it was touched
        assert running.running(tmp_path, "train/1") is None
    assert running.running(tmp_path, "train/0") is None
    with pytest.raises(KeyError), running.making(tmp_path, "train/0"):
        raise KeyError
    assert running.running(tmp_path, "train/0") is None


def test_the_note_of_a_killed_process_is_not_believed(tmp_path):
    code = (
        "import os, sys, pathlib, disco.running\n"
        "with disco.running.making(pathlib.Path(sys.argv[1]), 'merge'): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path])
    assert running.note_of(tmp_path, "merge").exists()
    assert running.running(tmp_path, "merge") is None


def test_another_machine_is_believed_while_it_is_heard_of(tmp_path):
    running.write_note(tmp_path, "train/0", "gpu7", os.getpid())
    note = running.note_of(tmp_path, "train/0")
    note.write_text(json.dumps(json.loads(note.read_text()) | {"machine": "gpu7", "started": 1}))
    assert running.running(tmp_path, "train/0").host == "gpu7"
    silent = time.time() - 2 * running.SILENT_SECONDS
    os.utime(note, (silent, silent))
    assert running.running(tmp_path, "train/0") is None
    running.write_note(tmp_path, "train/1", "gpu8")  # kept by a back end: the host may go on unheard
    os.utime(running.note_of(tmp_path, "train/1"), (silent, silent))
    found = running.running(tmp_path, "train/1")
    assert (found.host, found.sure) == ("gpu8", False)


def test_a_damaged_note_says_nothing(tmp_path):
    running.write_note(tmp_path, "train/0", "gpu8")
    running.note_of(tmp_path, "train/0").write_text("{")
    assert running.running(tmp_path, "train/0") is None


def test_submodels_share_the_run_folder_and_nobody_else_does(tmp_path):
    with artifacts.lock(tmp_path, shared=True), artifacts.lock(tmp_path, shared=True):
        with pytest.raises(artifacts.ArtifactError, match="another disco process"), artifacts.lock(tmp_path):
            pass
        with artifacts.lock(tmp_path, name="launch/running/train/0.lock"):
            again = artifacts.lock(tmp_path, name="launch/running/train/0.lock")
            with (
                pytest.raises(artifacts.ArtifactError, match=r"running/train/0: another disco process \(pid"),
                again,
            ):
                pass
            with artifacts.lock(tmp_path, name="launch/running/train/1.lock"):
                pass
    with artifacts.lock(tmp_path), pytest.raises(artifacts.ArtifactError), artifacts.lock(tmp_path, shared=True):
        pass
