"""Back end `slurm`: an array of submodels between jobs for what comes before and after, in a shared run folder."""

import shlex
import shutil
from pathlib import Path

from rich.console import Console

from disco.artifacts import ArtifactError
from disco.backends import local
from disco.backends.plan import LaunchError, Step
from disco.config import ConfigError, Experiment
from launch import slurm
from launch.scripts import retrying

START = "submit.sh"
ARRAY = "train"


def scripts(config: Experiment, steps: list[Step], experiment: Path) -> dict[str, str]:
    """A batch script a step, one for the whole array of submodels, and the script that submits them."""
    section, folder = config.launch.slurm, experiment.parent
    submodels = [step for step in steps if step.stage]
    files = {f"{step.name}.sh": local.step_script(step, experiment) for step in submodels}
    jobs = []
    for step in steps:
        if step.stage and step is not submodels[0]:
            continue
        name = ARRAY if step.stage else step.name
        after = (ARRAY,) if step.name == "merge" else step.needs
        jobs.append(slurm.Job(name=name, after=after, tasks=len(submodels) if step.stage else 0))
        if step.stage:
            names = " ".join(f"{submodel.name}.sh" for submodel in submodels)
            command, about = (
                f'bash {shlex.quote(str(folder))}/"${{scripts[$SLURM_ARRAY_TASK_ID]}}"',
                "All submodels.",
            )
            lines = [f"scripts=({names})", *retrying(command, config.launch.retries)]
            options = [*section.options, *section.train]
        else:
            about = step.about
            lines = retrying(
                shlex.join([*step.command(str(experiment)), *_nodes(config, step)]), config.launch.retries
            )
            big = step.name in ("finetune", "baselines")
            options = [*section.options, *(section.finetune if big else [])]
            if step.nodes > 1:
                options += [f"--nodes={step.nodes}", "--ntasks-per-node=1"]
        files[f"{name}.sbatch"] = slurm.batch_script(
            lines, about=about, folder=Path.cwd(), options=options, setup=section.setup
        )
    files[START] = slurm.submit_script(jobs, config.name, folder)
    return files


def _nodes(config: Experiment, step: Step) -> list[str]:
    """What tells a step on several machines how to reach them, unless the experiment does."""
    if step.nodes == 1 or config.launch.node_command:
        return []
    return [f"launch.node_command=[srun, --nodes={step.nodes}, --ntasks={step.nodes}, --ntasks-per-node=1]"]


def launch(config: Experiment, steps: list[Step], experiment: Path, console: Console) -> None:
    """Submit everything and say how to watch it. Raises ArtifactError while earlier jobs of the run are there."""
    folder = experiment.parent
    if shutil.which("sbatch") is None:
        raise ConfigError("--on slurm: sbatch is not on this machine: run this on a login node, or add --dry-run")
    try:
        submitted = slurm.submit(folder / START)
    except slurm.SlurmError as error:
        raise LaunchError(f"SLURM refused: {error}: nothing was submitted") from None
    ids = [line.split()[-1] for line in submitted.splitlines()]
    console.print(submitted.rstrip(), markup=False)
    console.print(f"watch: disco status {shlex.quote(str(config.folder))}; logs in {folder / 'logs'}", markup=False)
    console.print(f"stop: scancel {' '.join(ids)}; the same command goes on where it stopped", markup=False)


def refuse_second(config: Experiment) -> None:
    """Raise ArtifactError while jobs of an earlier launch wait or run: their scripts must stay as they are."""
    if shutil.which("squeue") is None:
        return
    try:
        ids = slurm.pending(config.folder / "launch")
    except slurm.SlurmError as error:
        raise LaunchError(f"SLURM does not answer: {error}") from None
    if ids:
        raise ArtifactError(
            f"{config.folder}: jobs {' '.join(ids)} of an earlier launch are there: wait for them, or scancel them"
        )
