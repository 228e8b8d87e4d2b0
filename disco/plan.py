"""What the training stages of an experiment will take, before any is started: operations, bytes, hours, dollars.

Works from configurations alone, on the meta device.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from bcd.config import read as read_bcd
from bcd.memory import Estimate, Predictor
from disco.config import Experiment
from disco.loss import labelled_cross_entropy
from disco.workload import ITEM, Training
from launch import hardware, ledger
from launch.estimate import measured_utilization
from launch.hardware import Device

TRACED_DEPTHS = (2, 4)  # of models that are too deep to trace whole
EXACT_DEPTH = 6
REDUCE_BUCKET = 500_000_000  # DeepSpeed's default, which the engine leaves


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
