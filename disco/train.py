"""Training stages: which rows each consumes, and the job that a process runs.

Rows are fixed before training starts, in the order of consumption. The joint baseline can therefore be given
exactly the rows that the stages of DisCo saw.
"""

import os
from pathlib import Path

import numpy as np

from disco import billing
from disco.artifacts import SCRATCH
from disco.checkpoint import copy_side_files, load_config
from disco.config import ConfigError, Experiment, Finetune, Optimizer
from disco.corpus import Corpus, Split
from disco.descent import with_stay
from disco.job import Job, Price, run_job
from disco.packing import Rows, pack
from launch import hardware


def budget(positions: int | None, rows: int, section: Optimizer, sequence_length: int) -> int:
    """Rows to consume for `positions` of training: whole batches; without a budget one pass over `rows`."""
    if positions is None:
        return rows
    return -(-positions // (sequence_length * section.batch_size)) * section.batch_size


def consume(rows: Rows, count: int, seed: int) -> Rows:
    """The first `count` rows of an endless sequence of seeded permutations of `rows`."""
    if not len(rows):
        raise ConfigError("there are no rows to train on: the corpus or the cluster is empty")
    epochs = [
        np.random.default_rng([seed, epoch]).permutation(len(rows)) for epoch in range(-(-count // len(rows)))
    ]
    return rows.take(np.concatenate(epochs)[:count])


def rows_of(config: Experiment, part: Split, documents: np.ndarray | None = None) -> Rows:
    """The documents (all if None) of one split, packed as section `corpus` says."""
    documents = np.arange(len(part)) if documents is None else documents
    return pack(part, documents, config.corpus.sequence_length, config.corpus.packing, config.seed)


def mixed_rows(config: Experiment, corpus: Corpus, section: Optimizer, positions: int, salt: int) -> Rows:
    """Rows of the whole corpus, for the seed phase (salt 1), router tuning (2) and fine-tuning (3)."""
    rows = rows_of(config, corpus.split("train"))
    count = budget(positions, len(rows), section, config.corpus.sequence_length)
    return consume(rows, count, config.seed * 10 + salt)


def submodel_rows(config: Experiment, corpus: Corpus, labels: np.ndarray, submodel: int) -> Rows:
    """Rows of one cluster; `train.tokens` is shared among clusters by their tokens."""
    rows = rows_of(config, corpus.split("train"), np.flatnonzero(labels == submodel))
    positions = config.train.tokens
    if positions is not None:
        tokens = np.bincount(labels, weights=corpus.split("train").tokens, minlength=submodel + 1)
        positions = max(1, round(positions * tokens[submodel] / tokens.sum()))
    count = budget(positions, len(rows), config.train, config.corpus.sequence_length)
    return consume(rows, count, config.seed * 10 + 100 + submodel)


def joint_rows(config: Experiment, corpus: Corpus, labels: np.ndarray, experts: int) -> Rows:
    """Exactly the rows that all DisCo stages consume, mixed."""
    parts = [submodel_rows(config, corpus, labels, submodel) for submodel in range(experts)]
    tune = config.finetune
    for section, positions, salt in (
        (config.seed_phase, config.seed_phase.tokens, 1),
        (tune, tune.router_tokens, 2),
        (tune, tune.tokens, 3),
    ):
        if positions:
            parts.append(mixed_rows(config, corpus, section, positions, salt))
    rows = Rows.concat(parts)
    return rows.take(np.random.default_rng([config.seed, 4]).permutation(len(rows)))


def curve_rows(config: Experiment, corpus: Corpus) -> Rows:
    """The validation rows of the points on loss curves: the same in every stage."""
    rows = rows_of(config, corpus.split("validation"))
    return rows.take(np.arange(min(len(rows), config.evaluate.curve_rows)))


def curve_points(config: Experiment, rows: Rows, section: Optimizer) -> list[int]:
    """Steps after which the validation loss is taken: evenly spaced, the last step among them."""
    points = np.linspace(0, updates(len(rows), section), config.evaluate.curve_points + 1)[1:]
    return sorted({max(1, round(point)) for point in points})


def price_of(config: Experiment, priced_as: str) -> Price:
    """What a device-hour of a stage costs, from the hardware table."""
    device = hardware.lookup(priced_as, hardware.load(config.hardware.table))
    return Price(priced_as=device.name, dollars_per_hour=device.rate(), source=device.source, as_of=device.as_of)


def updates(rows: int, section: Optimizer) -> int:
    """Updates that a stage makes with so many rows."""
    return -(-rows // section.batch_size)


def threads_of(config: Experiment, section: Optimizer, side_by_side: int) -> int:
    """CPU threads of each training process: `launch.threads`, or the cores shared out."""
    processes = section.processes // (config.launch.nodes if isinstance(section, Finetune) else 1)
    return config.launch.threads or max(1, (os.cpu_count() or 1) // (side_by_side * processes))


def run_training(
    config: Experiment,
    out: Path,
    *,
    phase: str,
    section: Optimizer,
    model: Path,
    rows: Rows,
    validation: Rows | None = None,
    submodel: int | None = None,
    trainable: str = "all",
    aux_loss: float = 0.0,
) -> None:
    """Train `model` on `rows` in processes of its own; leaves a Hugging Face checkpoint in `out`."""
    work = out / SCRATCH
    work.mkdir(exist_ok=True)
    rows.save(work / "rows.npz")
    blocks = None
    if section.optimizer == "bcd":
        made = updates(len(rows), section)
        blocks = with_stay(config.bcd, section, load_config(model), made, place=phase, trainable=trainable)
    if validation is not None:
        validation.save(work / "validation.npz")
    routed: dict = {"aux_loss": aux_loss}
    if isinstance(section, Finetune):
        routed = {
            "aux_loss": section.aux_loss,
            "z_loss": section.z_loss,
            "collapse_share": section.collapse_share,
            "collapse_logs": section.collapse_logs,
            "shared_as": section.experts,
            "fsep": config.fsep,
            "record_loads": section.record_loads,
            "nodes": config.launch.nodes,
            "node_command": config.launch.node_command,
            "rendezvous": config.launch.rendezvous,
        }
    cheap = not isinstance(section, Finetune)
    job = Job(
        phase=phase,
        stage=phase.rpartition("/")[0].rpartition("/")[2] if submodel is not None else phase.rpartition("/")[2],
        submodel=submodel,
        model=str(model.absolute()),
        out=str(out.absolute()),
        rows=str((work / "rows.npz").absolute()),
        validation=str((work / "validation.npz").absolute()) if validation is not None else None,
        validate_at=curve_points(config, rows, section) if validation is not None else [],
        section=section.model_dump(include=set(Optimizer.model_fields)),
        bcd=blocks,
        trainable=trainable,
        dtype=config.model.dtype,
        experts=config.model.experts,
        seed=config.seed,
        price=price_of(config, config.hardware.train if cheap else config.hardware.finetune),
        run=str(config.folder.absolute()),
        group=config.name,
        tracking=config.tracking,
        **routed,
    )
    if not (work / "trained").exists():  # else a killed run was about to seal the folder
        threads = threads_of(config, section, side_by_side=config.launch.parallel if submodel is not None else 1)
        with billing.what_was_lost(job, section.processes):
            run_job(job, threads)
        (work / "trained").touch()
    copy_side_files(model, out)
