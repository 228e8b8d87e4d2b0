"""A real sshd on loopback, run by whoever runs the tests, with keys and a port of its own."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def ssh_options(tmp_path_factory) -> list[str]:
    """Options with which `ssh localhost` reaches it."""
    for program in ("ssh", "ssh-keygen", "rsync", "flock"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (apt install openssh-client rsync util-linux)")
    if SSHD is None:
        pytest.skip("sshd is not installed (apt install openssh-server)")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)  # sshd insists on it for root
    folder, port = tmp_path_factory.mktemp("sshd"), free_port()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "MaxStartups": "100",
    }
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    log = folder / "log"
    server = subprocess.Popen([SSHD, "-D", "-f", folder / "config", "-E", log])
    options = ["-p", str(port), "-i", str(folder / "user"), "-o", f"UserKnownHostsFile={folder / 'known'}"]
    options += ["-o", "StrictHostKeyChecking=accept-new", "-o", "IdentitiesOnly=yes"]
    deadline = time.time() + 30
    while subprocess.run(["ssh", *options, "localhost", "true"], capture_output=True).returncode:
        if server.poll() is not None or time.time() > deadline:
            server.terminate()
            pytest.skip(f"sshd does not serve here: {log.read_text()[-500:] if log.exists() else 'no log'}")
        time.sleep(0.2)
    yield options
    server.terminate()
    server.wait()
