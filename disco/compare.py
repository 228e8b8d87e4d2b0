"""The ways to one Mixture-of-Experts side by side: joint training or DisCo, with AdamW or by blocks, what fits on
which cards, and what each costs at the configured prices and with every device priced alike."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from disco.config import ConfigError, Experiment, closest
from disco.plan import Planner
from disco.workload import Training, like
from launch.estimate import break_even, cards_held, makespan
from launch.hardware import Device

COUNTS = (1, 2, 4, 8, 16, 32, 64)
JOINT, JOINT_BCD, FULL, EXPERT, BCD = "joint", "joint, BCD", "DisCo full", "DisCo expert", "DisCo, BCD"
HOURS = ("joint", "joint_bcd", "start", "train", "finetune_router", "finetune")


@dataclass(frozen=True, kw_only=True)
class Step:
    """Jobs of a way that are alike or run side by side: hours of each, on `devices` cards each."""

    name: str
    device: Device
    devices: int
    hours: tuple[float, ...]
    fits: bool
    spare_gb: float
    micro_batch: int
    at_once: int = 1
    measured: bool = False

    @property
    def device_hours(self) -> float:
        """Card-hours paid: cards are held until the last of the jobs is in."""
        return self.devices * cards_held(self.hours, self.at_once)

    @property
    def wall_hours(self) -> float:
        return makespan(self.hours, self.at_once)

    @property
    def dollars(self) -> float:
        return self.device.dollars(3600 * self.device_hours)


@dataclass(frozen=True, kw_only=True)
class Way:
    """`alike`: dollars with every device at the price of hardware.finetune. `break_even`: the price of a cheap
    device-hour, in those of hardware.finetune, at which the way costs what joint training does."""

    name: str
    steps: tuple[Step, ...]
    alike: float
    break_even: float | None = None
    cheapest: bool = False

    @property
    def dollars(self) -> float:
        return sum(step.dollars for step in self.steps)

    @property
    def hours(self) -> float:
        return sum(step.wall_hours for step in self.steps)

    @property
    def fits(self) -> bool:
        return all(step.fits for step in self.steps)

    def device_hours(self, device: str) -> float:
        return sum(step.device_hours for step in self.steps if step.device.name == device)


def ways(
    planner: Planner, stages: list[Training], cards: int | None = None, hours: Mapping[str, float] | None = None
) -> list[Way]:
    """Every way with the tokens of the experiment's own stages, each on the number of cards that costs least.

    `cards` are there for submodels (as many as submodels where absent); `hours` are measured ones by name, as
    `read_hours` gives them, and stand for those of joint training and of the way that the experiment is set to.
    """
    config, hours = planner.config, dict(hours or {})
    own = [training for training in stages if not training.name.startswith("baselines/")]
    train = [training for training in own if training.submodel is not None]
    rest = [training for training in own if training.submodel is None]
    cheap = planner.device(config.hardware.train, "hardware.train")
    big = planner.device(config.hardware.finetune, "hardware.finetune")
    blocks = {"method": "bcd", "blocks": config.bcd.settings}

    whole = joint_training(config, own)
    found = {
        JOINT: [_step(planner, "joint", [whole], big, zero_stage=3, hours=hours.get("joint"))],
        JOINT_BCD: [
            _step(planner, "joint", [like(whole, **blocks)], cheap, zero_stage=3, hours=hours.get("joint_bcd"))
        ],
    }
    variants = {
        FULL: {"trainable": "all", "method": "adamw", "blocks": None},
        EXPERT: {"trainable": "experts", "method": "adamw", "blocks": None},
        BCD: {"trainable": "all", **blocks},
    }
    configured = BCD if train[0].method == "bcd" else EXPERT if train[0].trainable == "experts" else FULL
    for name, changed in variants.items():
        measured = hours if name == configured else {}
        jobs = [like(training, **changed) for training in train]
        stage = 2 if name == EXPERT else 3  # ZeRO-3 does not train beside frozen parameters
        steps = [_around(planner, training, measured) for training in rest if training.name == "start"]
        steps.append(
            _step(
                planner, "train", jobs, cheap, zero_stage=stage, cards=cards, hours=_submodel_hours(measured, jobs)
            )
        )
        steps += [_around(planner, training, measured) for training in rest if training.name != "start"]
        found[name] = steps
    return _compared(found, cheap, big)


def joint_training(config: Experiment, own: list[Training]) -> Training:
    """Joint training of the full model on the tokens of all stages, as the joint baseline does it."""
    section = config.finetune.model_copy(update=config.joint.model_dump(exclude_none=True))
    model = next((item.model for item in own if item.name.startswith("finetune")), None)
    if model is None:
        from disco.workloads import planned_model

        model = planned_model(config)
    rows, labels = sum(item.rows for item in own), sum(item.labels for item in own)
    changed = {"name": "joint", "model": model, "section": section, "rows": rows, "labels": labels}
    changed |= {"submodel": None, "trainable": "all", "method": "adamw", "blocks": None, "row_labels": None}
    return like(own[-1], **changed)


def _around(planner: Planner, training: Training, hours: Mapping[str, float]) -> Step:
    device = planner.device(training.priced_as)
    stage = 2 if training.trainable == "router" else 3
    return _step(planner, training.name, [training], device, zero_stage=stage, hours=hours.get(training.name))


def _submodel_hours(hours: Mapping[str, float], jobs: list[Training]) -> list[float] | None:
    """Hours of each submodel: `train` is the longest and stands for all that are not named."""
    named = [hours.get(job.name, hours.get("train")) for job in jobs]
    if all(value is None for value in named):
        return None
    missing = [job.name for job, value in zip(jobs, named, strict=True) if value is None]
    if missing:
        raise ConfigError(f"--hours names some submodels but not {', '.join(missing)}: add them, or train=HOURS")
    return named


def _step(
    planner: Planner,
    name: str,
    jobs: list[Training],
    device: Device,
    *,
    zero_stage: int,
    cards: int | None = None,
    hours: float | list[float] | None = None,
) -> Step:
    """The jobs on the number of cards each that costs least among those that they fit on (the fewest, if another
    saves no more than a percent); with measured hours on as many as configured."""
    job, memory = jobs[0], planner.memory
    share, _ = planner.utilization(device)
    batch = job.section.batch_size
    counts = [count for count in COUNTS if count <= batch] if hours is None else [job.section.processes]
    tried = []
    for count in counts:
        setting = {"devices": count, "zero_stage": 0 if count == 1 else zero_stage}
        largest = memory.largest(job, device.memory_gb, **setting)
        micro_batch = min(max(1, largest), max(1, batch // count))
        seconds = job.seconds(device, micro_batch=micro_batch, utilization=share, **setting)
        tried.append((count, largest > 0, micro_batch, seconds, setting))
    fitting = [entry for entry in tried if entry[1]] or tried[-1:]
    least = min(count * seconds for count, _, _, seconds, _ in fitting)
    count, fits, micro_batch, _, setting = next(entry for entry in fitting if entry[0] * entry[3] <= 1.01 * least)
    if hours is None:
        distinct = {(each.rows, each.labels): each for each in jobs}
        each_takes = {
            size: each.seconds(device, micro_batch=micro_batch, utilization=share, **setting) / 3600
            for size, each in distinct.items()
        }
        taken = [each_takes[each.rows, each.labels] for each in jobs]
    else:
        taken = hours if isinstance(hours, list) else [hours]
    first = memory.estimate(job, micro_batch=1, **setting)
    return Step(
        name=name,
        device=device,
        devices=count,
        hours=tuple(taken),
        fits=fits,
        spare_gb=device.memory_gb - first.total / 1e9,
        micro_batch=micro_batch,
        at_once=len(jobs) if cards is None else max(1, cards // count),
        measured=hours is not None,
    )


def _compared(found: dict[str, list[Step]], cheap: Device, big: Device) -> list[Way]:
    joint = sum(step.device_hours for step in found[JOINT])
    compared = []
    for name, steps in found.items():
        alike = sum(step.device_hours for step in steps) * big.rate()
        on_cheap = sum(step.device_hours for step in steps if step.device is cheap)
        on_big = sum(step.device_hours for step in steps if step.device is not cheap)
        ratio = None if name == JOINT or cheap is big else break_even(joint, on_big, on_cheap)
        compared.append(Way(name=name, steps=tuple(steps), alike=alike, break_even=ratio))
    fitting = [way for way in compared if way.fits]
    if fitting:
        best = min(fitting, key=lambda way: way.dollars)
        compared = [replace(way, cheapest=way is best) for way in compared]
    return compared


def read_hours(given: list[str], stages: list[Training]) -> dict[str, float]:
    """Measured hours from `name=hours` and from YAML files that map names to hours; later ones win.

    Names are joint, joint_bcd, start, train (the longest submodel), train/0, ..., finetune_router and finetune.
    Raises ConfigError naming what is wrong.
    """
    known = [*HOURS, *(training.name for training in stages if training.submodel is not None)]
    hours: dict[str, float] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if equals:
            entries = {name: value}
        else:
            try:
                entries = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise ConfigError(f"--hours {text}: neither name=hours nor a YAML file: {error}") from None
            if not isinstance(entries, dict):
                raise ConfigError(f"--hours {text}: must map names to hours ({', '.join(HOURS)})")
        for key, value in entries.items():
            if key not in known:
                raise ConfigError(f"--hours: no stage is called '{key}': {closest(str(key), known)}")
            try:
                hours[key] = float(value)
            except (TypeError, ValueError):
                raise ConfigError(f"--hours: {key} is {value!r}: it must be a number of hours") from None
            if not (math.isfinite(hours[key]) and hours[key] >= 0):
                raise ConfigError(f"--hours: {key} is {value}: it must be a number of hours, 0 or more")
    return hours
