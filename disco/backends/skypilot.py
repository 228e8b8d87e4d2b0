"""Back end `skypilot`: a managed spot job a submodel; packs go up as file mounts, results come back by a bucket."""

import shlex
import shutil
import subprocess
from pathlib import Path

import yaml
from rich.console import Console

from disco.backends import local
from disco.backends.plan import LaunchError, Step
from disco.config import ConfigError, Experiment
from launch.scripts import SECRETS, script

START = "run.sh"
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
    """The SkyPilot task of a submodel. Its state is saved to the bucket; a recovered job goes on."""
    section, name = config.launch.skypilot, f"{config.name}-submodel-{step.options[1]}"
    accelerator = section.accelerator or ACCELERATORS.get(config.hardware.train)
    if accelerator is None:
        raise ConfigError(
            f"hardware.train is '{config.hardware.train}', whose name in the cloud is not known: "
            "set launch.skypilot.accelerator, such as RTX4090:1"
        )
    if ":" not in accelerator:
        accelerator = f"{accelerator}:{config.train.processes}"
    made_from = f"{name}/experiment.yaml {name}/runs/{config.name}/packed-{step.options[1]}.json"
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
        f"disco train experiment.yaml --submodel {step.options[1]}",
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
    """A task a submodel; `run.sh` prepares and submits, `finish.sh` collects, merges and goes on here."""
    bucket, folder = config.launch.skypilot.bucket, experiment.parent
    if bucket is None:
        raise ConfigError(
            "launch.skypilot.bucket is not set: results come back by it: set it to s3://name or gs://name"
        )
    own = [step for step in steps if step.stage and not step.stage.startswith("baselines/")]
    rest = [step for step in steps if not step.stage]
    files = {
        f"{step.name}.yaml": yaml.dump(task(config, step, folder), Dumper=_Readable, sort_keys=False)
        for step in own
    }
    files |= {f"{step.name}.sh": local.step_script(step, experiment) for step in rest}
    disco, here, source = shlex.join(own[0].command("")[:3]), shlex.quote(str(folder)), shlex.quote(str(experiment))
    secrets = " ".join(f"${{{secret}:+--secret {secret}}}" for secret in SECRETS)
    submit, finish = [f"bash {here}/prepare.sh"], []
    copy = "aws s3 cp" if bucket.startswith("s3://") else "gsutil cp"
    for step in own:
        name = f"{config.name}-submodel-{step.options[1]}"
        submit.append(f"{disco} pack {source} --submodel {step.options[1]} --out {here}")
        submit.append(f"sky jobs launch --yes --detach-run --name {name} {secrets} {here}/{step.name}.yaml")
        finish.append(f"{copy} {bucket}/{name}.result.tar {here}/")
        finish.append(f"{disco} collect {source} {here}/{name}.result.tar")
    finish += [f"bash {here}/{step.name}.sh" for step in rest[1:]]
    files[START] = script(submit, about="Prepare, and submit a job a submodel.", folder=Path.cwd())
    about = "Once all jobs have succeeded (sky jobs queue): collect, merge, fine-tune, evaluate."
    files["finish.sh"] = script(finish, about=about, folder=Path.cwd())
    return files


def launch(config: Experiment, steps: list[Step], experiment: Path, console: Console) -> None:
    """Prepare here, submit a job a submodel, and say how to finish."""
    folder = experiment.parent
    if shutil.which("sky") is None:
        raise ConfigError(
            "--on skypilot: the command sky is not there: pip install 'moe-disco[skypilot]', or add --dry-run"
        )
    if code := subprocess.run(["bash", str(folder / START)]).returncode:
        raise LaunchError(
            f"submitting ended with exit code {code} (its reason stands above); what was submitted goes on"
        )
    console.print(f"watch: sky jobs queue; then: bash {shlex.quote(str(folder / 'finish.sh'))}", markup=False)
