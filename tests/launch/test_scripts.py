"""Scripts: what is ours is code, every other word is quoted."""

import shlex
import subprocess

import pytest

from launch import scripts

AWKWARD = "a b'c\"d$(touch pwned)`touch pwned`;&|*\\e"


def test_folders_and_words_reach_the_command_as_they_are(tmp_path):
    folder = tmp_path / AWKWARD.replace("/", "")
    folder.mkdir()
    text = scripts.script([shlex.join(["printf", "%s", AWKWARD])], about="two\nlines", folder=folder, setup="x=1")
    [path] = scripts.write(tmp_path / "out", {"say.sh": text})
    done = subprocess.run([path], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.returncode) == (AWKWARD, 0), done.stderr
    assert not list(tmp_path.rglob("pwned"))
    assert "# two\n# lines\n" in text
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["say.sh"]


def test_a_script_stops_at_the_first_error(tmp_path):
    [path] = scripts.write(tmp_path, {"stop.sh": scripts.script(["false", "echo on"], about="")})
    done = subprocess.run([path], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 1)


@pytest.mark.parametrize(
    ("codes", "retries", "runs", "expected"),
    [([0], 2, 1, 0), ([3, 0], 1, 2, 0), ([3, 3, 3], 1, 2, 3), ([2, 0], 5, 1, 2), ([3], 0, 1, 3), ([3, 2], 5, 2, 2)],
)
def test_only_failed_training_is_tried_again(tmp_path, codes, retries, runs, expected):
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
    fake = "bash -c 'code=$(head -n 1 codes); sed -i 1d codes; echo ran >> log; exit $code'"
    text = scripts.script(scripts.retrying(fake, retries), about="", folder=tmp_path)
    [path] = scripts.write(tmp_path, {"try.sh": text})
    assert subprocess.run([path]).returncode == expected
    assert (tmp_path / "log").read_text().count("ran") == runs
