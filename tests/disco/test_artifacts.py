"""Stage folders are whole or not there, and what is in them is what was written."""

import json
import multiprocessing

import pytest

from disco import artifacts
from disco.artifacts import ArtifactError


def make(folder, text="hello", seed=0, **options):
    with artifacts.stage_folder(
        folder, stage="a/b", inputs={"x": "1"}, section={"k": 2}, seed=seed, **options
    ) as out:
        (out / "deep").mkdir(exist_ok=True)
        (out / "deep" / "file.txt").write_text(text)


def test_a_whole_stage_verifies(tmp_path):
    make(tmp_path / "stage")
    artifacts.verify(tmp_path / "stage")
    recorded = artifacts.manifest(tmp_path / "stage")
    assert recorded["stage"] == "a/b"
    assert recorded["key"] == artifacts.stage_key({"x": "1"}, {"k": 2}, 0)
    assert set(recorded["files"]) == {"deep/file.txt"}
    assert not (tmp_path / "stage.partial").exists()


def test_a_failed_stage_leaves_the_old_one(tmp_path):
    make(tmp_path / "stage")
    before = artifacts.content(tmp_path / "stage")
    with (
        pytest.raises(RuntimeError),
        artifacts.stage_folder(tmp_path / "stage", stage="s", inputs={}, section=1, seed=0) as out,
    ):
        (out / "half").write_text("x")
        raise RuntimeError
    assert artifacts.content(tmp_path / "stage") == before


def test_the_fingerprint_is_of_content_alone(tmp_path):
    make(tmp_path / "one")
    make(tmp_path / "two", seed=5)
    make(tmp_path / "three", text="other")
    assert artifacts.content(tmp_path / "one") == artifacts.content(tmp_path / "two")
    assert artifacts.content(tmp_path / "one") != artifacts.content(tmp_path / "three")


def test_partial_folders_are_continued_only_by_the_same_stage(tmp_path):
    folder = tmp_path / "stage"
    for seed, survives in ((0, True), (1, False)):
        partial = tmp_path / "stage.partial"
        with (
            pytest.raises(RuntimeError),
            artifacts.stage_folder(folder, stage="s", inputs={}, section=1, seed=0, keep_partial=True) as out,
        ):
            (out / "checkpoint").write_text("x")
            raise RuntimeError
        with (
            pytest.raises(RuntimeError),
            artifacts.stage_folder(folder, stage="s", inputs={}, section=1, seed=seed, keep_partial=True),
        ):
            assert (partial / "checkpoint").exists() == survives
            raise RuntimeError


def test_a_kill_between_manifest_and_rename_loses_nothing(tmp_path, monkeypatch):
    """The folder is whole then: it is renamed, not made again, and scratch is no part of it."""
    folder = tmp_path / "stage"

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(artifacts, "finish", killed)
        with artifacts.stage_folder(folder, stage="s", inputs={}, section=1, seed=0, keep_partial=True) as out:
            (out / "work").mkdir()
            (out / "work" / "checkpoint").write_text("x")
            (out / "result").write_text("y")
    assert not artifacts.finish(folder, artifacts.stage_key({}, 2, 0))
    assert artifacts.finish(folder, artifacts.stage_key({}, 1, 0))
    artifacts.verify(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "result"]


@pytest.mark.parametrize("damage", ["truncate", "edit", "remove", "manifest", "no manifest", "not json"])
def test_damage_is_named(tmp_path, damage):
    folder = tmp_path / "stage"
    make(folder)
    file, note = folder / "deep" / "file.txt", folder / "manifest.json"
    if damage == "truncate":
        file.write_text("hell")
    elif damage == "edit":
        file.write_text("hallo")
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest":
        edited = json.loads(note.read_text())
        edited["files"]["deep/file.txt"]["sha256"] = "0" * 64
        note.write_text(json.dumps(edited))
    elif damage == "no manifest":
        note.unlink()
    else:
        note.write_text("{")
    named = "manifest.json" if damage in ("manifest", "no manifest", "not json") else "file.txt"
    with pytest.raises(ArtifactError, match=named):
        artifacts.verify(folder)


def _try_lock(folder, queue):
    try:
        with artifacts.lock(folder):
            queue.put("taken")
    except ArtifactError as error:
        queue.put(str(error))


def test_a_second_process_is_refused(tmp_path):
    queue = multiprocessing.get_context("spawn").Queue()
    with artifacts.lock(tmp_path):
        process = multiprocessing.get_context("spawn").Process(target=_try_lock, args=(tmp_path, queue))
        process.start()
        assert "another disco process (pid" in queue.get(timeout=60)
        process.join()
    with artifacts.lock(tmp_path):
        pass


def test_a_full_disk_is_refused_before_work(tmp_path):
    with pytest.raises(ArtifactError, match="free some space"):
        artifacts.need_disk(tmp_path / "not" / "there", 1 << 60, "a test")


def test_file_hashes_follow_the_content(tmp_path):
    file, cache = tmp_path / "file", tmp_path / "cache.json"
    file.write_text("one")
    first = artifacts.file_hashes([file], cache)
    assert artifacts.file_hashes([file], cache) == first == [artifacts.file_hash(file)]
    file.write_text("three")
    assert artifacts.file_hashes([file], cache) != first
