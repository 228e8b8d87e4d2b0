"""The plan that all back ends follow: a few commands of `disco`, and which must wait for which."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from disco.config import Experiment
from disco.job import JobError
from disco.stages import Stage, dashed, stages


class LaunchError(JobError):
    """A launch that could not make everything; the message says what is missing and how to go on."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """`disco <verb> EXPERIMENT <options>`, once all steps named in `needs` are done.

    It holds `devices` on each of `nodes` machines. `stage` is the one that a submodel's step makes.
    """

    name: str
    verb: str = "run"
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    devices: int = 1
    nodes: int = 1
    about: str
    stage: str | None = None

    def command(self, experiment: str, disco: tuple[str, ...] = (sys.executable, "-m", "disco.cli")) -> list[str]:
        return [*disco, self.verb, experiment, *self.options]


def plan(config: Experiment) -> list[Step]:
    """The steps in an order in which they can run; submodels need `prepare` alone, and none of each other."""
    graph, tune = stages(config), config.finetune
    submodels = [stage for stage in graph.values() if stage.submodel]
    big = {"devices": tune.processes // config.launch.nodes, "nodes": config.launch.nodes}
    steps = [
        Step(
            name="prepare",
            options=_until(_last_before(graph, submodels)),
            devices=config.seed_phase.processes if config.seed_phase.tokens else 1,
            about="Everything that the submodels begin from: the corpus, the clusters, the shared start.",
        ),
        *(_submodel(config, stage) for stage in submodels),
    ]
    trained = tuple(step.name for step in steps if step.stage)
    steps.append(
        Step(
            name="merge", options=_until(["merge"]), needs=trained, about="The submodels, merged into the full MoE."
        )
    )
    tuned = [name for name in ("finetune_router", "finetune") if name in graph]
    if tuned:
        about = "Fine-tuning of the merged model."
        steps.append(Step(name="finetune", options=_until(tuned[-1:]), needs=("merge",), about=about, **big))
    if config.baselines:
        about = "What is left of the baselines."
        steps.append(
            Step(name="baselines", options=_until(["baselines"]), needs=(steps[-1].name,), about=about, **big)
        )
    steps.append(Step(name="report", needs=(steps[-1].name,), about="Evaluation and report."))
    return steps


def what_of(step: Step) -> int | str:
    """What a step trains, as `pack` takes it: a submodel's number, or a stage's name."""
    return int(step.options[1]) if step.options[0] == "--submodel" else step.options[1]


def tuning_of(config: Experiment, step: Step) -> list[Step]:
    """The trainings of a step that another machine can take over, one after the other."""
    names = {"finetune": ("finetune_router", "finetune"), "baselines": ("baselines/joint",)}.get(step.name, ())
    graph, about = stages(config), "Tuning of the whole model."
    return [
        Step(name=dashed(name), verb="train", options=("--stage", name), about=about, stage=name)
        for name in names
        if name in graph
    ]


def _submodel(config: Experiment, stage: Stage) -> Step:
    *baseline, _, submodel = stage.name.split("/")
    return Step(
        name=stage.name.removeprefix("baselines/").replace("/", "-"),
        verb="train",
        options=("--submodel", submodel, *(("--baseline", baseline[1]) if baseline else ())),
        needs=("prepare",),
        devices=config.train.processes,
        about=f"Submodel {submodel}{f' of the baseline {baseline[1]}' if baseline else ''}.",
        stage=stage.name,
    )


def _last_before(graph: dict[str, Stage], submodels: list[Stage]) -> list[str]:
    """What the submodels need, without what those needs imply; split/0, split/1, ... as `split`."""
    needs = dict.fromkeys(need for stage in submodels for need in stage.needs)
    implied = {above for need in needs for above in _all_needs(graph, need)}
    return list(
        dict.fromkeys("split" if name.startswith("split/") else name for name in needs if name not in implied)
    )


def _all_needs(graph: dict[str, Stage], name: str) -> Iterator[str]:
    for need in graph[name].needs:
        yield need
        yield from _all_needs(graph, need)


def _until(names: list[str]) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--until", name))
