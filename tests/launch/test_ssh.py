"""Jobs over a real sshd on loopback: quoting, copies, detached jobs, what goes wrong."""

import os
import shlex
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from launch import ssh
from launch.ssh import Remote, SshError
from tests.launch.sshd import free_port, ssh_options  # noqa: F401  (a fixture)

AWKWARD = "a b'c\"d $(touch pwned) `touch pwned`;&|*"
SECRET = "0123456789-a-key-of-nobody"


@pytest.fixture
def host(ssh_options) -> Remote:  # noqa: F811
    return Remote("localhost", tuple(ssh_options))


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / AWKWARD
    made.mkdir()
    return made


def until(host: Remote, folder: Path, state: str) -> ssh.State:
    deadline = time.time() + 60
    while (found := ssh.look(host, str(folder), "watched")).state != state:
        assert time.time() < deadline, found
        time.sleep(0.1)
    return found


def test_words_and_files_arrive_as_they_are(host, folder, tmp_path):
    assert host.run(f"cat; printf '%s' {shlex.quote(AWKWARD)}", said="said ") == "said " + AWKWARD
    (folder / "here").write_bytes(b"\0 anything")
    host.push(folder / "here", f"{folder}/there")
    host.pull(f"{folder}/there", folder / "back")
    assert (folder / "back").read_bytes() == b"\0 anything"
    assert not list(tmp_path.rglob("pwned"))
    assert not list(Path.home().glob("pwned"))


def test_a_job_outlives_its_connection_and_is_told_apart_by_its_state(host, folder):
    assert ssh.look(host, str(folder / "nowhere"), "watched").state == "absent"
    lines = ["echo begun", 'echo "row 1" >> watched', "while [ ! -e go ]; do sleep 0.05; done", "(exit 7)"]
    (folder / "run.sh").write_text(ssh.job_script(lines))
    (folder / "key").write_text("the key\n")
    assert ssh.look(host, str(folder), "watched").state == "gone"
    ssh.start(host, str(folder), {})
    found = until(host, folder, "running")
    assert found.key == "the key"
    ssh.start(host, str(folder), {})  # a second start leaves it alone
    (folder / "go").touch()
    found = until(host, folder, "ended")
    assert (found.code, found.last, found.log) == (7, "row 1", "begun")
    assert (folder / "watched").read_text() == "row 1\n"


def test_stop_ends_a_job_with_its_children_and_a_killed_one_is_gone(host, folder):
    lines = ["sleep 1234 & echo $! > child; wait"]
    (folder / "run.sh").write_text(ssh.job_script(lines))
    for how in ("stop", "kill"):
        ssh.start(host, str(folder), {})
        until(host, folder, "running")
        if how == "stop":
            ssh.stop(host, str(folder))
        else:
            while not (folder / "child").exists():
                time.sleep(0.05)
            os.killpg(int((folder / "pid").read_text()), 9)
        until(host, folder, "gone")
        (folder / "child").unlink()
    ssh.stop(host, str(folder))  # nothing is there to stop
    ssh.stop(host, str(folder / "nowhere"))


def test_secrets_reach_the_job_and_lie_nowhere(host, folder, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    handed = ssh.handed_on(["WANDB_API_KEY", "HF_TOKEN"])
    assert handed == {"WANDB_API_KEY": SECRET}
    (folder / "run.sh").write_text(ssh.job_script(["sleep 0.5", 'echo "${#WANDB_API_KEY} $CUDA_VISIBLE_DEVICES"']))
    ssh.start(host, str(folder), handed | {"CUDA_VISIBLE_DEVICES": "1"})
    commands = subprocess.run(["ps", "-ef"], capture_output=True, text=True).stdout if shutil.which("ps") else ""
    found = until(host, folder, "ended")
    assert found.log == f"{len(SECRET)} 1"
    assert SECRET not in commands
    for file in folder.rglob("*"):
        assert SECRET not in file.read_text()


def test_what_goes_wrong_is_told_in_a_line(host, folder, monkeypatch):
    with pytest.raises(SshError, match=r"^localhost: .*No such file") as caught:
        host.run("cat /nonexistent")
    assert not caught.value.lost
    nobody = Remote("localhost", ("-p", str(free_port())))
    with pytest.raises(SshError, match=r"^localhost: .*refused") as caught:
        nobody.run("true")
    assert caught.value.lost
    with pytest.raises(SshError, match="no answer to ssh in 1 s") as caught:
        host.run("sleep 100", seconds=1)
    assert caught.value.lost
    with pytest.raises(SshError, match=r"^localhost: "):
        host.push(folder / "absent", f"{folder}/x")
    stop = threading.Event()
    stop.set()
    with pytest.raises(SshError, match="stopped") as caught:
        Remote(host.name, host.options, stop).run("sleep 100")
    assert not caught.value.lost
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SshError, match="ssh is not installed on this machine"):
        host.run("true")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(host, folder):
    with pytest.raises(SshError, match="No space left on device"):
        host.run("echo x > /dev/full; echo done >&2; false")


def test_a_probe_tells_what_a_host_has_and_lacks(host, folder):
    place = folder / "new one"
    found = ssh.probe(host, str(place), "export PATH=$PATH:/nowhere", ["rsync", "no-such-program"])
    assert found.lacks == ("no-such-program",)
    assert found.free_bytes == pytest.approx(shutil.disk_usage(place).free, rel=0.05, abs=1e9)
