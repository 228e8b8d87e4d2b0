"""`disco launch`: the plan, its scripts in the run folder, and the back end that carries them out."""

import importlib
import shlex

from rich.console import Console

from disco import artifacts
from disco.backends.plan import plan
from disco.check import check
from disco.config import ConfigError, Experiment, closest
from launch import scripts

# The sections whose training happens on this machine, by back end.
BACKENDS = {
    "local": ("seed_phase", "train", "finetune"),
    "ssh": ("seed_phase", "finetune"),
    "slurm": (),
    "skypilot": ("seed_phase", "finetune"),
}


def launch(config: Experiment, on: str, *, dry_run: bool, console: Console) -> None:
    """Write every script into `launch/` of the run folder; unless `dry_run`, carry the plan out.

    Raises ConfigError for what cannot work, ArtifactError while another launch of this run is at work, and
    LaunchError when something is missing at the end.
    """
    if on not in BACKENDS:
        raise ConfigError(f"--on {on}: no such back end: {closest(on, BACKENDS)}")
    backend = importlib.import_module(f"disco.backends.{on}")
    away = getattr(getattr(config.launch, on), "finetune", None) if on in ("ssh", "skypilot") else None
    elsewhere = {"finetune"} if away else set()
    check(config, {*BACKENDS[on]} - elsewhere)
    steps, folder = plan(config), config.folder.absolute() / "launch"
    with artifacts.lock(config.folder, name="launch/.lock"):
        if on == "slurm":
            backend.refuse_second(config)
        experiment = folder / "experiment.yaml"
        moved = config.model_copy(update={"runs": str(config.folder.absolute().parent)})
        files = backend.scripts(config, steps, experiment) | {experiment.name: moved.dump()}
        scripts.write(folder, files)
        if dry_run:
            console.print(f"written to {folder}, to read, edit and start by hand:", markup=False)
            for step in steps:
                console.print(f"  {step.name:<24} {step.about}", markup=False)
            console.print(f"all of it: bash {shlex.quote(str(folder / backend.START))}", markup=False)
        else:
            backend.launch(moved, steps, experiment, console)
