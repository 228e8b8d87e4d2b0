"""The pipeline as a graph: what each stage needs, which configuration it depends on, and how it is made.

    prepare > cluster > start > (split/<k>) > train/<k> > merge > (finetune_router) > finetune > evaluate > report

`start` is the shared start of all submodels: the initial model, or with a seed phase the model trained from
`initial`. The baselines are more stages of the same kinds under `baselines/`.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from disco import artifacts, shards
from disco.checkpoint import identity
from disco.cluster import assignments, cluster
from disco.combine import Shared
from disco.config import Experiment, Finetune, Optimizer, Section, Source
from disco.corpus import Corpus, prepare
from disco.evaluate import evaluate
from disco.extend import extend, favourite, fit_new_rows
from disco.family import num_experts
from disco.merge import merge
from disco.packing import Rows
from disco.report import report
from disco.router import METHODS, initialise_router
from disco.sources import local_files
from disco.split import groups_of, split, write_submodel_note
from disco.start import described_model, full_config, initial_model, locate, starts_single
from disco.train import curve_rows, joint_rows, mixed_rows, run_training, submodel_rows

# Keys of the configuration that change how a stage runs, but not what comes out of it.
NEUTRAL = {"log_every", "checkpoint_every"}


@dataclass(frozen=True)
class Stage:
    """`make(out)` fills the folder; `section` is the configuration that the result depends on.

    What trains begins from the model of the last stage in `needs`; `carries` gives the rows that it trains on and
    those of its curve, where a pack can take the stage elsewhere.
    """

    name: str
    needs: tuple[str, ...]
    section: Any
    make: Callable[[Path], None]
    trains: bool = False
    carries: Callable[[], tuple[Rows, Rows]] | None = None

    @property
    def submodel(self) -> bool:
        return self.trains and "train/" in self.name


def stages(config: Experiment) -> dict[str, Stage]:
    """Every stage of the experiment, in an order in which they can run."""
    graph = list(_start(config))
    graph += _disco(config, "", None)
    if "joint" in config.baselines:
        graph += _joint(config)
    if "random_split" in config.baselines:
        graph += _disco(config, "baselines/random_split/", "random")
    run, models = config.folder, [stage.name for stage in graph if not stage.name.startswith("split/")]
    make = functools.partial(evaluate, config, run, stages=models)
    graph.append(Stage("evaluate", tuple(models), dump(config.evaluate), make))
    graph.append(Stage("report", ("evaluate",), dump(config.hardware), lambda out: report(config, run, out)))
    return {stage.name: stage for stage in graph}


def _start(config: Experiment) -> Iterator[Stage]:
    """The corpus and the shared start of all submodels."""
    run, phase = config.folder, config.seed_phase
    model, checkpoint = _model(config)
    yield Stage(
        "prepare",
        (),
        {"corpus": dump(config.corpus), "model": model, "files": source_files(config)},
        lambda out: prepare(config, out, model_folder=checkpoint),
    )
    yield Stage(
        "initial" if phase.tokens else "start",
        ("prepare",),
        {"model": model, "single_expert": starts_single(config)},
        lambda out: initial_model(config, _corpus(config), out, single_expert=starts_single(config)),
    )
    if phase.tokens:
        yield Stage(
            "start",
            ("prepare", "initial"),
            training(config, phase),
            lambda out: run_training(
                config,
                out,
                phase="start",
                section=phase,
                model=run / "initial",
                rows=mixed_rows(config, _corpus(config), phase, phase.tokens, salt=1),
            ),
            trains=True,
        )


def _disco(config: Experiment, prefix: str, method: str | None) -> Iterator[Stage]:
    """Cluster, train apart, merge, fine-tune; `method` overrides cluster.method for the random split."""
    run, tune, k = config.folder, config.finetune, clusters(config)
    minimum = config.train.batch_size * config.corpus.sequence_length
    looks = ("start",) if config.cluster.features != "tfidf" and method is None else ()

    yield Stage(
        f"{prefix}cluster",
        ("prepare", *looks),
        {"cluster": dump(config.cluster), "k": k, "method": method, "minimum_tokens": minimum},
        lambda out: cluster(
            config,
            _corpus(config),
            out,
            k=k,
            method=method,
            model_folder=run / "start" if looks else None,
            minimum_tokens=minimum,
            parts=feature_parts(config) if method is None else None,
        ),
    )
    if config.model.extend is not None:
        for submodel in range(k):
            yield Stage(
                begins_from(config, submodel),
                ("prepare", "cluster", "start"),
                {"begin": config.model.extend.begin, "submodel": submodel},
                functools.partial(begin_extension, config, submodel),
            )
    elif not prefix and not starts_single(config):
        for submodel in range(k):
            keys = {"submodels": k, "renormalize": submodel_renormalize(config)}
            make = functools.partial(split, run / "start", submodel, **keys)
            yield Stage(begins_from(config, submodel), ("start",), keys if grouped(config) else {}, make)
    for submodel in range(k):
        yield Stage(
            f"{prefix}train/{submodel}",
            ("prepare", f"{prefix}cluster", begins_from(config, submodel)),
            {"train": training(config, config.train), "submodel": submodel},
            lambda out, submodel=submodel: train_submodel(config, prefix, submodel, out),
            trains=True,
        )
    trained = [f"{prefix}train/{submodel}" for submodel in range(k)]
    yield Stage(
        f"{prefix}merge",
        ("prepare", f"{prefix}cluster", "start", *trained),
        {"merge": dump(config.merge), "model": dump(config.model)} | old_text_hash(config),
        lambda out: (merge_submodels if config.model.extend is None else extend_model)(config, prefix, out),
    )
    last = f"{prefix}merge"
    # Routers are smaller than a block: blocks would save nothing.
    router = tune.model_copy(update={"optimizer": "adamw"})
    for name, section, positions, trainable, salt in (
        ("finetune_router", router, tune.router_tokens, "router", 2),
        ("finetune", tune, tune.tokens, "all", 3),
    ):
        if not positions:
            continue
        rows = functools.partial(_tuning_rows, config, section, positions, salt)
        yield Stage(
            f"{prefix}{name}",
            ("prepare", last),
            training(config, section),
            functools.partial(
                tune_model, config, f"{prefix}{name}", section, run / last, trainable=trainable, rows=rows
            ),
            trains=True,
            carries=rows,
        )
        last = f"{prefix}{name}"


def _model(config: Experiment) -> tuple[dict, Path | None]:
    """What the first model depends on, and the folder of its source."""
    if config.model.source is None:
        return dump(config.model), None
    checkpoint = locate(config.model.source, config.model.revision)
    return dump(config.model) | {"content": identity(checkpoint)}, checkpoint


def _joint(config: Experiment) -> Iterator[Stage]:
    """The full MoE trained on exactly the tokens that the stages of DisCo see."""
    run, begin = config.folder, "start"
    if config.seed_phase.tokens:
        begin = "initial"
    if starts_single(config):
        begin = "baselines/joint_initial"
        yield Stage(
            begin,
            ("prepare",),
            {"model": _model(config)[0]},
            lambda out: initial_model(config, _corpus(config), out, single_expert=False),
        )
    section = joint_section(config)
    phases = {
        "seed_phase": dump(config.seed_phase),
        "train": dump(config.train),
        "finetune": training(config, config.finetune),
    }
    rows = functools.partial(_joint_rows, config)
    yield Stage(
        "baselines/joint",
        ("prepare", "cluster", begin),
        phases | {"joint": training(config, section)},
        functools.partial(tune_model, config, "baselines/joint", section, run / begin, rows=rows),
        trains=True,
        carries=rows,
    )


def _joint_rows(config: Experiment) -> tuple[Rows, Rows]:
    corpus, labels = _corpus(config), assignments(config.folder / "cluster", "train")
    return joint_rows(config, corpus, labels, clusters(config)), curve_rows(config, corpus)


def _tuning_rows(config: Experiment, section: Finetune, positions: int, salt: int) -> tuple[Rows, Rows]:
    corpus = _corpus(config)
    return mixed_rows(config, corpus, section, positions, salt), curve_rows(config, corpus)


def joint_section(config: Experiment) -> Optimizer:
    """How the joint baseline is trained: as fine-tuning, but for what section `joint` says."""
    changed = {"learning_rate": joint_rate(config)} | config.joint.model_dump(exclude_none=True)
    return config.finetune.model_copy(update=changed)


def joint_rate(config: Experiment) -> float:
    """Learning rate of the joint baseline: from scratch the highest of the stages that it stands for."""
    sections = [config.finetune]
    if config.model.source is None:
        sections += [config.train, *([config.seed_phase] if config.seed_phase.tokens else [])]
    return max(section.learning_rate for section in sections)


def feature_parts(config: Experiment) -> tuple[Path, str]:
    """Where parts of the features lie, and what they depend on: corpus, model, settings, seed."""
    run, section = config.folder, config.cluster
    read = ("prepare",) if section.features == "tfidf" else ("prepare", "start")
    made_from = {name: artifacts.content(run / name) for name in read}
    settings = section.model_dump(include={"features", "dimensions", "max_terms"})
    key = artifacts.fingerprint({**made_from, **settings, "k": clusters(config), "seed": config.seed})
    return run / shards.FOLDER, key


def write_feature_part(config: Experiment, part: str, say: Callable[[str], None]) -> Path:
    """One part (such as 2/8) of the features, for a machine that has the stages before clustering."""
    folder, key = feature_parts(config)
    model = config.folder / "start" if config.cluster.features != "tfidf" else None
    return shards.write_part(
        config,
        _corpus(config),
        folder,
        shards.parse_part(part),
        k=clusters(config),
        model_folder=model,
        key=key,
        progress=say,
    )


def train_submodel(config: Experiment, prefix: str, submodel: int, out: Path) -> None:
    """Train one submodel on its cluster, from the shared start or its own part of it."""
    rows, note = submodel_input(config, prefix, submodel)
    run_training(
        config,
        out,
        phase=f"{prefix}train/{submodel}",
        section=config.train,
        model=config.folder / begins_from(config, submodel),
        rows=rows,
        submodel=submodel,
        trainable="experts" if config.train.mode == "expert" else "all",
        aux_loss=config.finetune.aux_loss if grouped(config) else 0.0,
    )
    write_submodel_note(out, **note)


def submodel_input(config: Experiment, prefix: str, submodel: int) -> tuple[Rows, dict]:
    """The rows that a submodel trains on and the note of where it belongs, from the run or from a pack."""
    run = config.folder
    packed = packed_file(run, submodel)
    if packed.exists():
        return Rows.load(run / f"rows-{submodel}" / "rows.npz"), artifacts.read_json(packed)["note"]
    folder = run / f"{prefix}cluster"
    note = {
        "base": identity(run / "start"),
        "expert": submodel,
        "experts": clusters(config),
        "clustering": artifacts.content(folder),
        "group": groups(config)[submodel],
    }
    return submodel_rows(config, _corpus(config), assignments(folder, "train"), submodel), note


def packed_file(run: Path, what: int | str) -> Path:
    """The note of a pack: of a submodel's number, or a stage's name."""
    return run / f"packed-{dashed(what)}.json"


def packed_rows(run: Path, stage: str) -> tuple[Path, Path]:
    """Where a pack of a stage keeps the rows to train on and those of the curve."""
    return run / f"rows-{dashed(stage)}", run / f"curve-{dashed(stage)}"


def dashed(what: int | str) -> str:
    return str(what).replace("/", "-")


def begins_from(config: Experiment, submodel: int) -> str:
    return "start" if starts_single(config) else f"split/{submodel}"


def tune_model(
    config: Experiment,
    phase: str,
    section: Finetune,
    begin: Path,
    out: Path,
    *,
    rows: Callable[[], tuple[Rows, Rows]],
    trainable: str = "all",
) -> None:
    """Train the router, or everything, of a whole MoE, in the run or in a pack."""
    if packed_file(config.folder, phase).exists():
        consumed, curve = (Rows.load(folder / "rows.npz") for folder in packed_rows(config.folder, phase))
    else:
        consumed, curve = rows()
    run_training(
        config,
        out,
        phase=phase,
        section=section,
        model=begin,
        rows=consumed,
        validation=curve,
        trainable=trainable,
    )


def merge_submodels(config: Experiment, prefix: str, out: Path) -> None:
    """Submodels to the full MoE, then its router."""
    run, section, k = config.folder, config.merge, clusters(config)
    labels = assignments(run / f"{prefix}cluster", "train")
    tokens_K = np.bincount(labels, weights=_corpus(config).split("train").tokens, minlength=k)
    weights_K = {"tokens": tokens_K, "uniform": np.ones(k)}.get(str(section.backbone), section.backbone)
    merge(
        run / "start",
        [run / f"{prefix}train/{submodel}" for submodel in range(k)],
        out,
        full_config=full_config(config, run / "start"),
        weights=list(weights_K),
        original=run / "start" if section.router == "original" else None,
        renormalize=section.renormalize,
        shared=Shared(section.shared, section.scale, section.density, section.keep, section.layer_weights),
        own_rows=section.router in METHODS,
        clone_noise=section.clone_noise,
        seed=config.seed,
    )
    rows = [submodel_rows(config, _corpus(config), labels, submodel) for submodel in range(k)]
    initialise_router(
        out,
        rows,
        method=section.router,
        tokens=section.probe_tokens,
        l2=section.probe_l2,
        seed=config.seed,
        groups=[len(group) for group in groups(config)],
        base=run / "start",
    )


def begin_extension(config: Experiment, submodel: int, out: Path) -> None:
    """What a new expert begins from: one of the old model's, alone."""
    start, expert = config.folder / "start", config.model.extend.begin
    if expert is None:
        labels = assignments(config.folder / "cluster", "train")
        expert = favourite(start, submodel_rows(config, _corpus(config), labels, submodel))
    split(start, expert, out)


def extend_model(config: Experiment, prefix: str, out: Path) -> None:
    """The old model and its new experts, then their rows of the router."""
    run, section = config.folder, config.merge
    labels = assignments(run / "cluster", "train")
    trained = [run / f"{prefix}train/{submodel}" for submodel in range(clusters(config))]
    extend(run / "start", trained, out, seed=config.seed)
    fit_new_rows(
        out,
        [submodel_rows(config, _corpus(config), labels, submodel) for submodel in range(clusters(config))],
        method=section.router,
        tokens=section.probe_tokens,
        l2=section.probe_l2,
        seed=config.seed,
        old=run / "start",
        old_text=old_text(config),
    )


def old_text(config: Experiment) -> list[Path]:
    """Files of `model.extend.old_text`. Raises ConfigError for a glob that matches nothing."""
    globs = config.model.extend.old_text if config.model.extend else []
    return local_files(Source(name="model.extend.old_text", files=globs)) if globs else []


def old_text_hash(config: Experiment) -> dict:
    files = old_text(config)
    hashes = artifacts.file_hashes(files, config.folder / "hashes.json")
    return {"old_text": artifacts.fingerprint(hashes)} if files else {}


def clusters(config: Experiment) -> int:
    """Clusters, and submodels: one an expert (a new one, where a model is extended), or fewer."""
    if config.model.extend is not None:
        return config.model.extend.experts
    return config.cluster.k or num_experts(described_model(config))


def groups(config: Experiment) -> list[list[int]]:
    """The experts of the full model that each submodel stands for."""
    experts, k = num_experts(described_model(config)), clusters(config)
    return groups_of(experts, k) if config.model.extend is None else [[e] for e in range(experts - k, experts)]


def grouped(config: Experiment) -> bool:
    """Whether a submodel has a group of experts, with a router of its own."""
    return not starts_single(config) and any(len(group) > 1 for group in groups(config))


def submodel_renormalize(config: Experiment) -> bool | None:
    """norm_topk_prob of submodels with a group of experts: that of the model that they are merged to."""
    if config.merge.renormalize is not None or config.merge.router == "original":
        return config.merge.renormalize
    return True


def source_files(config: Experiment) -> dict[str, str]:
    """Content of each source's local files, so that an edited file makes the corpus stale."""
    cache = config.folder / "hashes.json"
    return {
        source.name: artifacts.fingerprint(artifacts.file_hashes(local_files(source), cache))
        for source in config.corpus.sources
        if source.hub is None
    }


def _corpus(config: Experiment) -> Corpus:
    return Corpus.open(config.folder / "prepare")


def dump(section: Section) -> dict:
    """The section without what changes nothing in the result."""
    return section.model_dump(mode="json", exclude=NEUTRAL)


def training(config: Experiment, section: Optimizer) -> dict:
    """What a training stage depends on: its section, and how blocks are descended on or experts sharded
    where that is done."""
    more = {"bcd": dump(config.bcd)} if section.optimizer == "bcd" else {}
    if getattr(section, "experts", None) == "fsep":
        more["fsep"] = dump(config.fsep)
    return dump(section) | more
