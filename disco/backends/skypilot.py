"""Back end `skypilot`: a managed spot job a submodel, and for tuning where a card is named for it; packs go up as
file mounts, results come back by a bucket. The rest runs here.

Jobs outlive the launcher: the same command follows those that still run, and takes results that are there.
"""

import shlex
import shutil
import threading
from pathlib import Path

import yaml
from rich.console import Console

from disco.backends import away, local
from disco.backends.away import own_submodels, script_of
from disco.backends.crew import Progress, StepError, work_through
from disco.backends.plan import Step, what_of
from disco.config import ConfigError, Experiment
from disco.pack import name_of
from disco.stages import packed_file
from launch.scripts import SECRETS, script

START = local.START
SAVE_SECONDS = 120  # between copies of the state to the bucket
# Names of the hardware table to those of `sky show-gpus`.
ACCELERATORS = {
    "rtx3090": "RTX3090",
    "rtx4090": "RTX4090",
    "rtx5090": "RTX5090",
    "l40s": "L40S",
    "a6000": "RTXA6000",
    "v100": "V100-32GB",
    "v100-16": "V100",
    "a100": "A100-80GB",
    "a100-40": "A100",
    "h100": "H100",
    "h200": "H200",
}


def task(config: Experiment, step: Step, folder: Path) -> dict:
    """The SkyPilot task of a training. Its state is saved to the bucket; a recovered job goes on."""
    section, what = config.launch.skypilot, what_of(step)
    name = name_of(config, what)
    accelerator, asks = section.finetune, config.finetune
    if isinstance(what, int):
        accelerator, asks = section.accelerator or ACCELERATORS.get(config.hardware.train), config.train
    if accelerator is None:
        raise ConfigError(
            f"hardware.train is '{config.hardware.train}', whose name in the cloud is not known: "
            "set launch.skypilot.accelerator, such as RTX4090:1"
        )
    if ":" not in accelerator:
        accelerator = f"{accelerator}:{asks.processes}"
    note = packed_file(Path("runs") / config.name, what)
    made_from = f"{name}/experiment.yaml {name}/{note}"
    run = [
        "set -euo pipefail",
        f'key="$(tar -xOf /disco/pack.tar {made_from} | sha256sum | cut -c 1-16)"',
        f'state="/disco/bucket/{name}-$key.tar"',
        "mkdir -p ~/disco && cd ~/disco",
        'if [ -e "$state" ]; then tar -xf "$state"; else tar -xf /disco/pack.tar; fi',
        f'save() {{ tar -C ~/disco -cf ~/state.tar {name} && cp ~/state.tar "$state.new" &&',
        '  mv "$state.new" "$state"; }',
        f"( while sleep {SAVE_SECONDS}; do save || true; done ) & saver=$!",
        "trap 'kill $saver' EXIT",
        f"cd {name}",
        f"disco train experiment.yaml {shlex.join(step.options)}",
        f"cp {name}.result.tar /disco/bucket/",
    ]
    return {
        "name": name,
        "resources": {
            "accelerators": accelerator,
            "use_spot": section.spot,
            "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": config.launch.retries},
        },
        "file_mounts": {
            "/disco/pack.tar": str(folder / f"{name}.tar"),
            "/disco/bucket": {"source": section.bucket, "mode": "MOUNT"},
        },
        "setup": section.setup,
        "run": "\n".join(run) + "\n",
    }


class _Readable(yaml.SafeDumper):
    """Writes several lines of shell as several lines."""


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def scripts(config: Experiment, steps: list[Step], experiment: Path) -> dict[str, str]:
    """A task and a script a training, a script for each other step, and `run.sh`, which does it all."""
    if config.launch.skypilot.bucket is None:
        raise ConfigError(
            "launch.skypilot.bucket is not set: results come back by it: set it to s3://name or gs://name"
        )

    def training(step: Step) -> dict[str, str]:
        described = yaml.dump(task(config, step, experiment.parent), Dumper=_Readable, sort_keys=False)
        return {f"{step.name}.yaml": described, script_of(step): _follow(config, step, experiment)}

    own = own_submodels(steps)
    files = {name: text for step in own for name, text in training(step).items()}
    return files | away.scripts(
        config,
        steps,
        experiment,
        jobs=[f"bash {script_of(step)}" for step in own],
        tuning=training if config.launch.skypilot.finetune else None,
        about="The whole experiment, its trainings as jobs in the cloud. Started again, it follows jobs that run.",
    )


def _follow(config: Experiment, step: Step, experiment: Path) -> str:
    """Take a result that is there; else follow a job that runs; else pack, submit and follow."""
    bucket, folder = config.launch.skypilot.bucket, experiment.parent
    name, option = name_of(config, what_of(step)), shlex.join(step.options)
    disco, here, source = shlex.join(step.command("")[:3]), shlex.quote(str(folder)), shlex.quote(str(experiment))
    secrets = " ".join(f"${{{secret}:+--secret {secret}}}" for secret in SECRETS)
    copy = "aws s3 cp" if bucket.startswith("s3://") else "gsutil cp"
    lines = [
        "take() {",
        f"  {copy} {bucket}/{name}.result.tar {here}/ &&",
        f"  flock {here}/.collect {disco} collect {source} {here}/{name}.result.tar",
        "}",
        "if take; then exit; fi  # of an earlier launch",
        f"if sky jobs logs --name {name}; then if take; then exit; fi; fi  # of one that still runs",
        f"flock {here}/.collect {disco} pack {source} {option} --out {here}",
        f"sky jobs launch --yes --name {name} {secrets} {here}/{step.name}.yaml",
        "take",
    ]
    return script(lines, about=f"{step.about} In the cloud.", folder=Path.cwd())


def launch(config: Experiment, steps: list[Step], experiment: Path, console: Console) -> None:
    """Carry the plan out. Raises LaunchError naming what is missing at the end."""
    folder = experiment.parent
    for program in ("sky", "aws" if config.launch.skypilot.bucket.startswith("s3://") else "gsutil", "flock"):
        if shutil.which(program) is None:
            remedy = "pip install 'moe-disco[skypilot]'" if program == "sky" else "install it"
            raise ConfigError(f"--on skypilot: the command {program} is not there: {remedy}, or add --dry-run")
    (folder / "logs").mkdir(exist_ok=True)
    local.here(steps[0], folder, config.launch.retries)
    console.print(
        "jobs in the cloud outlive this launcher: sky jobs queue; sky jobs cancel --name NAME", markup=False
    )
    _train_away(config, own_submodels(steps), folder, console)
    tune = (lambda part: _train_away(config, [part], folder, console)) if config.launch.skypilot.finetune else None
    local.after_submodels(config, steps, folder, tune)


def _train_away(config: Experiment, steps: list[Step], folder: Path, console: Console) -> None:
    """Follow a job for each training that is not fresh, all at once. Raises LaunchError naming what is missing."""

    def make(step: Step, slot: str, progress: Progress, stop: threading.Event) -> None:
        log = folder / "logs" / f"{step.name}.log"
        with open(log, "ab") as output:
            code = local.execute(folder / script_of(step), {}, output, stop)
        if code and not stop.is_set():
            raise StepError(f"exit code {code}: {local.last_line(log)} (all of it: {log})", again=False)

    todo = local.not_fresh(config, steps)
    slots = [f"job {index}" for index in range(len(todo))]
    ended = work_through(todo, slots, make, retries=0, console=console)  # the jobs have their own
    local.complain(ended, "skypilot")
