"""What the training stages of an experiment will take, before any is started: operations, bytes, hours, dollars.

Works from configurations alone, on the meta device. Until there is a corpus, clusters are taken to be of equal
size and every position to have a label; `run` names a run folder whose corpus and clusters say it exactly.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

import bcd
from bcd.blocks import depths as depths_of
from bcd.config import read as read_bcd
from bcd.expansion import above as above_of
from bcd.memory import Estimate, Predictor
from bcd.schedule import BlockSchedule
from disco.config import ConfigError, Experiment, Optimizer
from disco.family import as_submodel, num_experts, set_trainable, top_k, with_experts
from disco.loss import labelled_cross_entropy
from disco.split import groups_of
from disco.start import described_model, full_config, starts_single
from disco.upcycle import upcycled_config
from launch import hardware, ledger
from launch.estimate import communication_seconds, compute_seconds, measured_utilization
from launch.flops import training_flops
from launch.hardware import Device

TRACED_DEPTHS = (2, 4)  # of models that are too deep to trace whole
EXACT_DEPTH = 6
REDUCE_BUCKET = 500_000_000  # DeepSpeed's default, which the engine leaves
ITEM = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """One training stage: `rows` of `length` positions, `labels` of them with a label, on what and how."""

    name: str
    model: PretrainedConfig
    section: Optimizer
    rows: int
    labels: int
    length: int
    priced_as: str
    submodel: int | None = None
    trainable: str = "all"
    method: str = "adamw"  # or bcd
    blocks: dict[str, Any] | None = None  # settings of bcd
    seed: int = 0
    row_labels: np.ndarray | None = None  # of each row, where they are known

    @property
    def updates(self) -> int:
        return -(-self.rows // self.section.batch_size)

    @cached_property
    def shapes(self) -> torch.nn.Module:
        """The model without data, with what is trained marked."""
        return shapes_of(self.model, self.trainable)

    @property
    def alike(self) -> tuple:
        """Equal for stages that only their rows' order and name tell apart."""
        return id(self.shapes), self.rows, self.labels, self.method, str(self.blocks), str(self.section)

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.shapes.parameters())

    @cached_property
    def turns(self) -> list[tuple[int, frozenset[str], frozenset[str], int]]:
        """Stretches of updates in order: how many, what is trained in them by name, what bcd's expansion updates
        besides, and the elements of both."""
        if self.method == "adamw":
            trained = {name: p.numel() for name, p in self.shapes.named_parameters() if p.requires_grad}
            return [(self.updates, frozenset(trained), frozenset(), sum(trained.values()))]
        settings = read_bcd({k: v for k, v in self.blocks.items() if k != "steps_per_block"})
        cut = bcd.partition(
            self.shapes,
            settings.granularity,
            always_on=settings.always_on,
            expert_groups=settings.expert_groups,
            max_block_gb=settings.max_block_gb,
            bytes_per_parameter=12 if self.section.precision == "fp32" else 14,
        )
        count, active = len(cut.blocks), min(settings.active_blocks, len(cut.blocks))
        order = "shuffled" if settings.order == "importance" else settings.order  # gradients are not known yet
        depths = [block.depth for block in cut.blocks]
        schedule = BlockSchedule(count, order, active=active, seed=self.seed, depths=depths)
        stay = stay_of(self, len(schedule.current_order), active)
        parameters = {name: p for name, p in self.shapes.named_parameters() if p.requires_grad}
        depth = depths_of(self.shapes, cut.layers)
        turns = []
        for begin in range(0, self.updates, stay):
            pieces = [*cut.always_on, *(piece for index in schedule.blocks for piece in cut.blocks[index].pieces)]
            names = frozenset(piece.name for piece in pieces)
            above = above_of(cut, schedule.blocks, depth, parameters) if settings.expansion else ()
            size = sum(piece.numel for piece in pieces) + sum(parameters[name].numel() for name in above)
            turns.append((min(stay, self.updates - begin), names, frozenset(above), size))
            schedule.advance()
        return turns

    @cached_property
    def flops(self) -> int:
        """Operations of the stage, as the ledger counts them."""

        @cache
        def row_flops(names: frozenset[str], labels: int) -> int:
            checkpointing = self.section.activation_checkpointing
            return training_flops(
                self.model, self.length, labels=labels, trainable=names, activation_checkpointing=checkpointing
            )

        total = done = 0
        for count, names, above, _ in self.turns:
            rows, labels = self._between(done, done + count)
            made = []
            for trained in (names, names | above):
                whole, one = (row_flops(trained, labels) for labels in (0, 1))
                made.append(rows * whole + labels * (one - whole))
            # The expansion's gradients are made in the last micro-batch of an update.
            total += made[0] + (made[1] - made[0]) // self.section.accumulation
            done += count
        return total

    def _between(self, begin: int, end: int) -> tuple[int, int]:
        """(rows, labels) of the updates from `begin` on, before `end`."""
        size = self.section.batch_size
        rows = min(self.rows, end * size) - begin * size
        if self.row_labels is not None:
            return rows, int(self.row_labels[begin * size : end * size].sum())
        return rows, rows * self.labels // max(1, self.rows)

    @cached_property
    def active(self) -> int:
        """Elements trained at once, on average over the updates."""
        return round(sum(count * size for count, *_, size in self.turns) / max(1, self.updates))

    def seconds(
        self, device: Device, *, devices: int, zero_stage: int | None, micro_batch: int, utilization: float
    ):
        """Wall time of the training steps alone: products at `utilization` of the peak, or the links, whichever
        takes longer (as if they overlapped entirely)."""
        section, item = self.section, ITEM[self.section.precision]
        links = communication_seconds(
            item * self.parameters,
            item * self.active,
            device,
            devices=devices,
            zero_stage=zero_stage,
            accumulation=max(1, -(-section.batch_size // (micro_batch * devices))),
        )
        computing = compute_seconds(self.flops, device, section.precision, devices=devices, utilization=utilization)
        return max(computing, self.updates * links)


def stay_of(training: Training, blocks: int, active: int) -> int:
    """steps_per_block: as set, or for whole cycles within the updates, no longer than bcd's default."""
    given = (training.blocks or {}).get("steps_per_block")
    if given is not None:
        return given
    visits, longest = -(-blocks // active), bcd.Config.model_fields["steps_per_block"].default
    cycles = max(1, -(-training.updates // (visits * longest)))
    return max(1, training.updates // (visits * cycles))


_shapes: dict[str, torch.nn.Module] = {}


def shapes_of(model: PretrainedConfig, trainable: str = "all") -> torch.nn.Module:
    """The model of a configuration without data, the same object for the same one."""
    key = json.dumps([model.to_dict(), trainable], sort_keys=True, default=str)
    if key not in _shapes:
        with torch.device("meta"):
            _shapes[key] = AutoModelForCausalLM.from_config(model)
        set_trainable(_shapes[key], trainable)
    return _shapes[key]


def planned_model(config: Experiment) -> PretrainedConfig:
    """The full MoE's configuration; of a model on the hub nothing but its config.json is fetched."""
    source, upcycle = config.model.source, config.model.upcycle
    if source is None or Path(source).is_dir():
        return described_model(config)
    try:
        found = AutoConfig.from_pretrained(source, revision=config.model.revision)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.source is '{source}': its config.json cannot be read: {reason}") from None
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
        parts = [item for item in found if not item.name.startswith("baselines/")]
        rows = sum(item.rows for item in parts), sum(item.labels for item in parts), None
        found.append(training("baselines/joint", full, section, rows, big))
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
        length = self.config.corpus.sequence_length
        rows = -(-positions // (length * section.batch_size)) * section.batch_size
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

    @cached_property
    def _corpus(self):
        from disco.corpus import Corpus

        return Corpus.open(self.run / "prepare")


# Rows, their labels, and the labels of each row where they are known.
Count = tuple[int, int, np.ndarray | None]


def _counted(rows) -> Count:
    labels = rows.labels()
    return len(rows), int(labels.sum()), labels


class Memory:
    """Bytes of training steps. Traces are kept, since one serves any number of devices and ZeRO stages."""

    def __init__(self):
        self._predictors: dict[tuple, Predictor] = {}

    def estimate(
        self,
        training: Training,
        *,
        devices: int,
        zero_stage: int | None,
        micro_batch: int,
        method: str | None = None,
    ) -> Estimate:
        section = training.section
        settings = dict(training.blocks or {})
        if settings.get("steps_per_block", 0) is None:
            del settings["steps_per_block"]
        settings |= {
            "activation_checkpointing": section.activation_checkpointing,
            "gradient_accumulation_steps": max(1, -(-section.batch_size // (micro_batch * devices))),
        }
        return self._predictor(training).estimate(
            method or training.method,
            read_bcd(settings),
            devices=devices,
            zero_stage=zero_stage,
            micro_batch=micro_batch,
            reduce_bucket=REDUCE_BUCKET,
        )

    def largest(self, training: Training, gb: float, *, devices: int, zero_stage: int | None) -> int:
        """The largest micro-batch within `gb`, or 0. Sequences are taken to cost alike; with blocks each as much
        as when everything is trained, since the lowest block keeps most."""

        def total(micro_batch: int, method: str | None = None) -> int:
            found = self.estimate(
                training, devices=devices, zero_stage=zero_stage, micro_batch=micro_batch, method=method
            )
            return found.total if method is None else found.activations + found.logits

        spare = gb * 1e9 - total(1)
        if spare < 0:
            return 0
        return 1 + int(spare // max(1, total(2, "adamw") - total(1, "adamw")))

    def _predictor(self, training: Training) -> Predictor:
        section = training.section
        shown = [
            training.model.to_dict(),
            section.precision,
            training.length,
            training.trainable,
            section.loss_chunk,
        ]
        key = json.dumps(shown, sort_keys=True, default=str)
        if key not in self._predictors:

            def loss(model, tokens, chunk=section.loss_chunk):
                hidden = model.model(input_ids=tokens, use_cache=False)[0]
                return labelled_cross_entropy(
                    hidden.flatten(0, 1), model.get_output_embeddings().weight, tokens.flatten(), chunk
                )

            deep = training.model.num_hidden_layers > EXACT_DEPTH
            self._predictors[key] = Predictor(
                training.shapes, section.precision, training.length, loss, TRACED_DEPTHS if deep else None
            )
        return self._predictors[key]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one training stage takes as it is configured. Seconds are of its training steps."""

    name: str
    submodel: int | None
    priced_as: str
    devices: int
    tokens: int
    flops: int
    seconds: float
    dollars: float
    memory: Estimate
    fits: bool
    spare_gb: float  # below 0: by how much it does not fit
    largest_micro_batch: int
    utilization: float
    checkpoint_bytes: int


class Planner:
    """The devices, their prices and what was measured on them, and the memory of what was traced."""

    def __init__(self, config: Experiment):
        self.config, self.memory = config, Memory()
        self.devices = hardware.load(config.hardware.table)
        self._measured: dict[str, tuple[float, str]] = {}
        self._forecasts: dict[tuple, Forecast] = {}

    def device(self, name: str, place: str = "hardware") -> Device:
        return hardware.lookup(name, self.devices, place)

    def utilization(self, device: Device) -> tuple[float, str]:
        """Share of the peak, and where the figure is from: ledgers beside this run's, else the table."""
        if device.name not in self._measured:
            found, runs = [], Path(self.config.runs)
            for path in sorted(runs.glob("*/ledger.jsonl")) if runs.is_dir() else ():
                found += [
                    row | {"phase": f"{path.parent.name}/{ledger.phase_of(row)}"} for row in ledger.read(path)
                ]
            share = measured_utilization(found, device)
            known = (device.utilization, "assumed") if share is None else (share, f"measured in {runs}")
            self._measured[device.name] = known
        return self._measured[device.name]

    def forecast(self, training: Training, device: Device | None = None) -> Forecast:
        """`device` stands in for the one that the stage is priced as."""
        key = (training.alike, training.priced_as, device)
        if key not in self._forecasts:
            self._forecasts[key] = self._forecast(training, device)
        return replace(self._forecasts[key], name=training.name, submodel=training.submodel)

    def _forecast(self, training: Training, device: Device | None) -> Forecast:
        section = training.section
        device = device or self.device(training.priced_as)
        setting = {"devices": section.processes, "zero_stage": section.zero_stage}
        memory = self.memory.estimate(training, micro_batch=section.micro_batch, **setting)
        share, _ = self.utilization(device)
        seconds = training.seconds(device, micro_batch=section.micro_batch, utilization=share, **setting)
        state = ITEM[section.precision] * training.parameters + 12 * training.active
        return Forecast(
            name=training.name,
            submodel=training.submodel,
            priced_as=device.name,
            devices=section.processes,
            tokens=training.labels,
            flops=training.flops,
            seconds=seconds,
            dollars=device.dollars(seconds, section.processes),
            memory=memory,
            fits=memory.fits(device.memory_gb),
            spare_gb=device.memory_gb - memory.total / 1e9,
            largest_micro_batch=self.memory.largest(training, device.memory_gb, **setting),
            utilization=share,
            checkpoint_bytes=state,
        )


def together(found: list[Training]) -> list[list[Training]]:
    """Stages that run side by side in groups: the submodels of a pipeline, every other stage alone."""
    groups: dict[str, list[Training]] = {}
    for training in found:
        key = training.name.rpartition("/")[0] if training.submodel is not None else training.name
        groups.setdefault(key, []).append(training)
    return list(groups.values())


def like(training: Training, **changed: Any) -> Training:
    """The stage with something changed; what was worked out for it is worked out anew."""
    return replace(training, **changed)


def weights_of(model: PretrainedConfig) -> int:
    """Parameters of a model."""
    return sum(parameter.numel() for parameter in shapes_of(model).parameters())
