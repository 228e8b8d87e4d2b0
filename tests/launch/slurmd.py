"""A real SLURM cluster of one machine (munged, slurmctld, slurmd from the distribution), run by the tests."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.sshd import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The folder of the cluster, with SLURM_CONF set in the environment."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    for program in PROGRAMS:
        if shutil.which(program, path=path) is None:
            pytest.skip(f"{program} is not installed (apt install slurm-wlm munge)")
    if not Path("/proc/self").exists():
        pytest.skip("slurmd needs /proc")
    folder, user, host = (
        Path(tmp_path_factory.mktemp("slurm")),
        getpass.getuser(),
        socket.gethostname().split(".")[0],
    )
    folder.chmod(0o755)
    for parent in list(folder.parents)[:3]:  # munged wants its socket to be reachable
        if parent.owner() == user and parent != Path("/tmp"):
            parent.chmod(0o755)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    socket_path = folder / "munge.socket"
    cores = os.cpu_count()
    (folder / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={socket_path}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
    )
    environment = os.environ | {"PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons = [
        ["munged", "-F", "--force", "-S", socket_path, "--key-file", folder / "key", "--seed-file", folder / "seed"]
        + ["--pid-file", folder / "munge.pid", "--log-file", folder / "munge.log"],
        ["slurmctld", "-D", "-c", "-f", folder / "slurm.conf"],
        ["slurmd", "-D", "-f", folder / "slurm.conf"],
    ]
    running = []

    def end():
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    for command in daemons:
        with open(folder / "daemons.log", "ab") as log:
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        time.sleep(1)
    deadline, ready = time.time() + 60, False
    while not ready and time.time() < deadline and all(process.poll() is None for process in running):
        done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
        ready = done.stdout.split() == ["idle"]
        time.sleep(0.3)
    if not ready:
        end()
        said = (folder / "daemons.log").read_text()[-800:]
        pytest.skip(f"SLURM does not start here: {done.stdout if running else ''} {said}")
    patch = pytest.MonkeyPatch()
    patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    patch.setenv("PATH", path)
    yield folder
    subprocess.run(["scancel", "--user", user], env=environment)
    time.sleep(1)
    end()
    patch.undo()
