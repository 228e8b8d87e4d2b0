"""Section `launch` of the experiment file: where and how stages run. Nothing in it changes the weights."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from disco.schema import Positive, Section, Tokens


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line, without control characters")
    return text


OneLine = Annotated[str, AfterValidator(_one_line)]


class Host(Section):
    """A machine that `ssh` reaches; `gpu1` alone is short for `{name: gpu1}`."""

    name: str = Field(description="as after the command ssh: host, user@host, or a name of ~/.ssh/config")
    devices: Positive | None = Field(None, description="submodels at once; its GPUs if absent, 1 without a GPU")

    @field_validator("name")
    @classmethod
    def _plain(cls, name):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@%+:-]*", name):
            raise ValueError("is no host: letters, digits and . _ - @ : only, as after the command ssh")
        return name


class Ssh(Section):
    hosts: list[Host] = []
    finetune: Host | None = Field(
        None,
        description="host that fine-tunes, and trains the joint baseline, on finetune.processes devices; absent = "
        "this machine",
    )
    folder: OneLine = Field("disco-runs", description="folder on each host, from its home unless absolute")
    setup: OneLine = Field("", description="shell command before disco, such as: source ~/venv/bin/activate")
    options: list[OneLine] = Field([], description="more options for ssh, such as [-p, '2222']")
    poll_seconds: Annotated[float, Field(gt=0)] = 15.0
    patience_seconds: Annotated[float, Field(ge=0)] = Field(
        900.0, description="how long a host may be out of reach before its submodels are given up"
    )

    @field_validator("hosts", mode="before")
    @classmethod
    def _short(cls, hosts: Any) -> Any:
        return [{"name": host} if isinstance(host, str) else host for host in hosts or []]

    @field_validator("finetune", mode="before")
    @classmethod
    def _name(cls, host: Any) -> Any:
        return {"name": host} if isinstance(host, str) else host

    @field_validator("finetune")
    @classmethod
    def _one_job(cls, host):
        if host is not None and host.devices is not None:
            raise ValueError("takes no devices: finetune.processes says how many")
        return host

    @field_validator("hosts")
    @classmethod
    def _once(cls, hosts):
        names = [host.name for host in hosts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{twice[0]} is there twice: give it once, with devices: {names.count(twice[0])}")
        return hosts


class Slurm(Section):
    """Options are written as #SBATCH lines, such as --partition=cheap or --gres=gpu:1."""

    options: list[OneLine] = Field([], description="of every job")
    train: list[OneLine] = Field([], description="of the array of submodels")
    finetune: list[OneLine] = Field([], description="of fine-tuning and the joint baseline")
    setup: OneLine = Field("", description="shell command before disco, such as: module load cuda")

    @field_validator("options", "train", "finetune")
    @classmethod
    def _options(cls, options):
        for option in options:
            if not re.match(r"-[a-zA-Z]|--[a-z]", option):
                raise ValueError(f"'{option}' is no sbatch option: it must begin with - or --")
        return options


class Skypilot(Section):
    bucket: OneLine | None = Field(None, description="s3://name or gs://name: packs go there, results come back")
    accelerator: OneLine | None = Field(None, description="such as RTX4090:1; from hardware.train if absent")
    finetune: OneLine | None = Field(
        None,
        description="card that fine-tunes, and trains the joint baseline, such as A100-80GB; absent = this machine",
    )
    setup: OneLine = Field("pip install moe-disco", description="shell command that installs disco")
    spot: bool = True

    @field_validator("bucket")
    @classmethod
    def _store(cls, bucket):
        if bucket is not None and not re.fullmatch(r"(s3|gs)://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
            raise ValueError("must be s3://name or gs://name")
        return bucket


class Launch(Section):
    parallel: Positive = Field(1, description="submodels at once on this machine, where it has no GPU")
    threads: Positive | None = Field(None, description="CPU threads a process; the cores shared out if absent")
    retries: Tokens = Field(1, description="how often a failed submodel is started again from its checkpoint")
    nodes: Positive = Field(1, description="machines that share the processes of fine-tuning")
    node_command: list[OneLine] = Field(
        [], description="what starts a command on every one of them, such as [srun, --ntasks-per-node=1]"
    )
    rendezvous: OneLine | None = Field(
        None, description="host:port where they meet; a free port of this machine if absent"
    )
    ssh: Ssh = Ssh()
    slurm: Slurm = Slurm()
    skypilot: Skypilot = Skypilot()

    @field_validator("rendezvous")
    @classmethod
    def _endpoint(cls, endpoint):
        if endpoint is not None and not re.fullmatch(r"[^\s:]+:\d+", endpoint):
            raise ValueError("must be host:port")
        return endpoint

    @model_validator(mode="after")
    def _meet(self):
        for name, section in (("ssh", self.ssh), ("skypilot", self.skypilot)):
            if self.nodes > 1 and section.finetune:
                raise ValueError(f"{name}.finetune is one machine: it goes with nodes: 1")
        if self.nodes == 1 and self.node_command:
            raise ValueError("node_command goes with nodes of 2 or more")
        return self
