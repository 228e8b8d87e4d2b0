"""The training stages of an experiment, from its configuration alone.

Until there is a corpus, clusters are taken to be of equal size and every position to have a label; `run` names a
run folder whose corpus and clusters say it exactly.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import AutoConfig, PretrainedConfig

from disco.artifacts import first_line
from disco.config import ConfigError, Experiment, Optimizer
from disco.family import as_submodel, num_experts, top_k, with_experts
from disco.split import groups_of
from disco.start import described_model, full_config, starts_single
from disco.upcycle import upcycled_config
from disco.workload import Training


def planned_model(config: Experiment) -> PretrainedConfig:
    """The full MoE's configuration; of a model on the hub nothing but its config.json is fetched."""
    source, upcycle = config.model.source, config.model.upcycle
    if source is None or Path(source).is_dir():
        return described_model(config)
    try:
        found = AutoConfig.from_pretrained(source, revision=config.model.revision)
    except OSError as error:
        raise ConfigError(
            f"model.source is '{source}': its config.json cannot be read: {first_line(error)}"
        ) from None
    if config.model.extend is not None:
        return with_experts(found, num_experts(found) + config.model.extend.experts, top_k(found))
    return found if upcycle is None else upcycled_config(found, upcycle)


def submodel_models(config: Experiment, full: PretrainedConfig) -> list[PretrainedConfig]:
    """The configuration of each submodel: one expert, or where clusters are fewer than experts a group of them."""
    experts = num_experts(full)
    if config.model.extend is not None:
        return [as_submodel(full, 1)] * config.model.extend.experts
    groups = groups_of(experts, config.cluster.k or experts)
    sizes = [1 if starts_single(config) else len(group) for group in groups]
    made = {size: as_submodel(full, size) for size in set(sizes)}
    return [made[size] for size in sizes]


def trainings(config: Experiment, run: Path | None = None) -> list[Training]:
    """The training stages, in the order of the pipeline; `run` is a folder whose corpus gives the exact rows."""
    full = _model_of(config, run)
    tune, models = config.finetune, submodel_models(config, full)
    source = _Rows(config, run, len(models))
    cheap, big = config.hardware.train, config.hardware.finetune
    mode = "experts" if config.train.mode == "expert" else "all"

    def training(name, model, section, rows, priced_as, **more) -> Training:
        count, labels, each = rows
        method = "adamw" if more.get("trainable") == "router" else section.optimizer
        return Training(
            name=name,
            model=model,
            section=section,
            rows=count,
            labels=labels,
            row_labels=each,
            length=config.corpus.sequence_length,
            priced_as=priced_as,
            method=method,
            blocks=config.bcd.settings if method == "bcd" else None,
            seed=config.seed,
            **more,
        )

    def pipeline(prefix: str) -> Iterator[Training]:
        for index, model in enumerate(models):
            rows = source.submodel(prefix, index)
            yield training(
                f"{prefix}train/{index}", model, config.train, rows, cheap, submodel=index, trainable=mode
            )
        if tune.router_tokens:
            rows = source.mixed(tune, tune.router_tokens, 2)
            yield training(f"{prefix}finetune_router", full, tune, rows, big, trainable="router")
        if tune.tokens:
            yield training(f"{prefix}finetune", full, tune, source.mixed(tune, tune.tokens, 3), big)

    found = []
    if config.seed_phase.tokens:
        begins = as_submodel(full, 1) if starts_single(config) else full
        rows = source.mixed(config.seed_phase, config.seed_phase.tokens, 1)
        found.append(training("start", begins, config.seed_phase, rows, cheap))
    found += pipeline("")
    if "joint" in config.baselines:
        section = tune.model_copy(update=config.joint.model_dump(exclude_none=True))
        found.append(training("baselines/joint", full, section, source.joint(found), big))
    if "random_split" in config.baselines:
        found += pipeline("baselines/random_split/")
    return found


def _model_of(config: Experiment, run: Path | None) -> PretrainedConfig:
    """The full MoE: as configured, or as the run has it, whose tokenizer may have come out smaller."""
    if run is None or not (run / "start" / "config.json").exists():
        return planned_model(config)
    return full_config(config, run / "start")


class _Rows:
    """(rows, labels) of the stages: by budget, or counted in a run's own corpus."""

    def __init__(self, config: Experiment, run: Path | None, k: int):
        self.config, self.run, self.k = config, run, k
        if run is None and config.train.tokens is None:
            raise ConfigError(
                "train.tokens is null (one pass over the corpus), whose size is not known yet: set train.tokens, "
                "or plan --against a run whose corpus is prepared"
            )

    def _budget(self, positions: int, section: Optimizer) -> "Count":
        from disco.train import budget

        length = self.config.corpus.sequence_length
        rows = budget(positions, 0, section, length)
        return rows, rows * length, None

    def mixed(self, section: Optimizer, positions: int, salt: int) -> "Count":
        if self.run is None:
            return self._budget(positions, section)
        from disco.train import mixed_rows

        return _counted(mixed_rows(self.config, self._corpus, section, positions, salt))

    def submodel(self, prefix: str, index: int) -> "Count":
        if self.run is None:
            return self._budget(max(1, round(self.config.train.tokens / self.k)), self.config.train)
        from disco.cluster import assignments
        from disco.train import submodel_rows

        labels = assignments(self.run / f"{prefix}cluster", "train")
        return _counted(submodel_rows(self.config, self._corpus, labels, index))

    def joint(self, parts: list[Training]) -> "Count":
        """Those of all `parts` together."""
        if self.run is None:
            return sum(item.rows for item in parts), sum(item.labels for item in parts), None
        from disco.cluster import assignments
        from disco.train import joint_rows

        labels = assignments(self.run / "cluster", "train")
        return _counted(joint_rows(self.config, self._corpus, labels, self.k))

    @cached_property
    def _corpus(self):
        from disco.corpus import Corpus

        return Corpus.open(self.run / "prepare")


# Rows, their labels, and the labels of each row where they are known.
Count = tuple[int, int, np.ndarray | None]


def _counted(rows) -> Count:
    labels = rows.labels()
    return len(rows), int(labels.sum()), labels


def together(found: list[Training]) -> list[list[Training]]:
    """Stages that run side by side in groups: the submodels of a pipeline, every other stage alone."""
    groups: dict[str, list[Training]] = {}
    for training in found:
        key = training.name.rpartition("/")[0] if training.submodel is not None else training.name
        groups.setdefault(key, []).append(training)
    return list(groups.values())
