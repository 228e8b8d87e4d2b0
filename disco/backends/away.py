"""What back ends share whose trainings leave this machine: which those are, and the steps around them that stay."""

from collections.abc import Callable, Iterable
from pathlib import Path

from disco.backends import local
from disco.backends.plan import Step, tuning_of
from disco.config import Experiment
from launch.scripts import script


def own_submodels(steps: list[Step]) -> list[Step]:
    """The steps of DisCo's own submodels; those of baselines stay."""
    return [step for step in steps if step.stage and not step.stage.startswith("baselines/")]


def script_of(step: Step) -> str:
    """The script that has a training done elsewhere; that of a tuning stage stands beside the step's own."""
    return f"{step.name}.sh" if step.options[0] == "--submodel" else f"{step.name}-away.sh"


def scripts(
    config: Experiment,
    steps: list[Step],
    experiment: Path,
    *,
    jobs: Iterable[str],
    tuning: Callable[[Step], dict[str, str]] | None,
    about: str,
) -> dict[str, str]:
    """A script for each step that stays, what `tuning` (None: it stays) writes for each tuning stage, and `run.sh`:
    the commands `jobs` side by side, the rest before and after."""
    files, after = {}, []
    for step in steps:
        if step.stage:
            continue
        for part in tuning_of(config, step) if tuning else ():
            files |= tuning(part)
            after.append(f"bash {script_of(part)}")
        files[f"{step.name}.sh"] = local.step_script(step, experiment)
        after += [f"bash {step.name}.sh"] if step.needs else []
    crowd = [f"{job} & jobs+=($!)" for job in jobs]
    wait = 'for job in "${jobs[@]}"; do wait "$job"; done'
    lines = ["bash prepare.sh", "jobs=()", *crowd, wait, *after]
    files[local.START] = script(lines, about=about, folder=experiment.parent)
    return files
