"""How a training stage's processes share the experts: each has all, or one of two ways of dividing them.

`replicated` is plain data parallelism. `fsep` is this project's: each process owns a slice of every expert and
rebuilds those that the routing load needs. `autoep` is DeepSpeed's expert parallelism: each process has E / N whole
experts for good.

Shapes: L MoE layers, N processes, E experts, F expert width, H hidden width.
"""

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

import fsep
from disco.checkpoint import load_config
from disco.config import ConfigError, Experiment, ExpertSharding, Finetune, Optimizer
from disco.engine import DTYPES, export_model, load_model
from disco.family import num_experts
from disco.job import Job
from fsep.check import check_slots
from fsep.families import FAMILIES

# Families whose training by DeepSpeed's AutoEP equals that with replicated experts, as a test shows.
AUTOEP_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")


class Replicated:
    """Every process has all experts; the other ways change what they must."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device = job, device

    def load(self, dtype: str) -> nn.Module:
        """The model of the job on this process's device."""
        return load_model(Path(self.job.model), dtype, self.job.experts).to(self.device)

    def save(self, engine, folder: Path, tag: str, client: dict) -> None:
        """Write a checkpoint `folder/tag` from which training resumes, whole or not at all; a collective call."""
        if for_any_processes(self.job):
            fsep.save_checkpoint(engine, folder, tag, client)
            return
        engine.save_checkpoint(str(folder), tag=f"{tag}.partial", client_state=client, save_latest=False)
        dist.barrier()
        if dist.get_rank() == 0:
            os.rename(folder / f"{tag}.partial", folder / tag)

    def resume(self, engine, folder: Path, tag: str) -> dict | None:
        """Load a checkpoint; its client state, None where it cannot be loaded."""
        if is_for_any_processes(folder / tag):
            return fsep.load_checkpoint(engine, folder, tag)[1]
        loaded, client = engine.load_checkpoint(str(folder), tag=tag)
        return None if loaded is None else client

    def settings(self, model: nn.Module) -> dict:
        """What DeepSpeed's configuration has more."""
        return {}

    def begin(self, engine) -> None:
        """The engine is there; training has not begun."""

    def figures(self, engine, counts_LE: Tensor | None) -> dict:
        """What a metrics row says of the balance, of the last micro-batch or by the global batch's counts; lists
        hold a value a layer."""
        return {}

    def export(self, engine, folder: Path) -> None:
        """Write the model as a Hugging Face checkpoint; a collective call."""
        export_model(engine, folder, self.job.dtype)

    def close(self) -> None:
        """Training has ended."""


class Sharded(Replicated):
    """`fsep`: no process ever holds all experts, from the checkpoint it starts from to the one it leaves."""

    def load(self, dtype: str) -> nn.Module:
        settings, config = self.job.fsep, load_config(Path(self.job.model))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
        world, experts = dist.get_world_size(), num_experts(config)
        topology, slots = topology_of(settings, config, world, self.job.nodes), slots_of(settings, world, experts)
        layers = len(FAMILIES[config.model_type].blocks(model))
        if settings.planner == "fixed":
            self._planner = [fsep.plan(np.ones((world, experts)), topology, slots)] * layers
        else:
            self._planner = fsep.Planner(
                topology,
                slots,
                layers=layers,
                experts=experts,
                forecast=settings.forecast,
                threshold=settings.threshold,
                every=settings.replan_every,
            )
        fsep.attach(
            model,
            slots=slots,
            planner=self._planner,
            topology=topology,
            device=self.device,
            prefetch=settings.prefetch,
            delay_reshard=settings.delay_reshard,
            timeout_s=settings.timeout_s,
        )
        return fsep.load_pretrained(model, self.job.model).train()

    def figures(self, engine, counts_LE: Tensor | None) -> dict:
        layers = fsep.stats(engine)
        names = ("imbalance", "expert_imbalance", "inter_node_fraction", "route_ms")
        return {name: [layer[name] for layer in layers] for name in names} | {"plan_ms": layers[0]["plan_ms"]}

    def export(self, engine, folder: Path) -> None:
        fsep.save_pretrained(engine, folder, dtype=DTYPES[self.job.dtype])

    def close(self) -> None:
        if isinstance(self._planner, fsep.Planner):
            self._planner.close()


def for_any_processes(job: Job) -> bool:
    """Whether the job's checkpoints can go on with another number of processes: fsep's can, which take every state
    as intervals in one coordinate space. Not so those of bcd, of ZeRO 3 and of autoep, a file a process.

    What is restored is exact; the steps after it are so to rounding, since gradients are summed in another order.
    """
    return job.bcd is None and job.section.zero_stage < 3 and job.shared_as != "autoep"


def is_for_any_processes(checkpoint: Path) -> bool:
    """Whether a checkpoint was written so."""
    return (checkpoint / "manifest.json").exists()


def whole_names(name: str) -> list[str]:
    """The parameters of the Hugging Face model that a parameter of the trained one is, or is a part of."""
    from disco.autoep import hugging_face_name

    experts, _, leaf = name.rpartition(".")
    if leaf == "shard":
        return [f"{experts}.gate_up_proj", f"{experts}.down_proj"]
    return [hugging_face_name(name)]


def way_of(job: Job, device: torch.device) -> Replicated:
    """How the job's processes share the experts."""
    if job.shared_as == "autoep":
        from disco.autoep import AutoEP

        return AutoEP(job, device)
    return Sharded(job, device) if job.shared_as == "fsep" else Replicated(job, device)


def slots_of(settings: ExpertSharding, processes: int, experts: int) -> int:
    """Experts that a process rebuilds at a time. Raises ConfigError where some would be nobody's."""
    slots = settings.slots or min(experts, 2 * -(-experts // processes))
    try:
        return check_slots(min(slots, experts), processes, experts)
    except ValueError as error:
        raise ConfigError(f"fsep.{error}") from None


def topology_of(settings: ExpertSharding, model: PretrainedConfig, processes: int, nodes: int) -> fsep.Topology:
    """The processes' devices as the planner sees them. Raises ConfigError for unknown hardware and sizes."""
    try:
        return fsep.Topology.from_hardware(
            settings.hardware,
            processes,
            devices_per_node=settings.devices_per_node or max(1, processes // nodes),
            hidden=model.hidden_size,
            expert_width=getattr(model, "moe_intermediate_size", None) or model.intermediate_size,
        )
    except ValueError as error:
        raise ConfigError(f"fsep: {error}") from None


def check_experts(config: Experiment, model: PretrainedConfig, stages: dict[str, Optimizer]) -> None:
    """Raise ConfigError for stages, by name, that cannot divide the experts of `model` as they are told to."""
    for name, section in stages.items():
        if isinstance(section, Finetune) and section.experts != "replicated":
            _check_divided(name, section, model)
            if section.experts == "fsep":
                _check_sharded(config, name, section, model)
            else:
                _check_autoep(name, section, model)


def _check_divided(name: str, section: Finetune, model: PretrainedConfig) -> None:
    way = f"{name}: experts is {section.experts}"
    if section.optimizer == "bcd":
        raise ConfigError(
            f"{way} but optimizer is bcd, whose blocks are whole experts of one process: "
            "set finetune.experts=replicated, or optimizer=adamw"
        )
    if name == "finetune" and section.router_tokens:
        raise ConfigError(
            f"{way} but router_tokens is {section.router_tokens}, which freezes the experts, and DeepSpeed refuses "
            "divided experts that no optimizer trains: set finetune.router_tokens=0, or finetune.experts=replicated"
        )
    if section.zero_stage == 3:
        raise ConfigError(
            f"{way} but zero_stage is 3, which partitions parameters that are divided already: "
            "set finetune.zero_stage=2"
        )
    if section.zero_stage == 0 and section.clip and section.precision == "bf16":
        raise ConfigError(
            f"{way} and clip is {section.clip:g} in bf16 with zero_stage 0, where DeepSpeed leaves experts out of "
            "the norm: set finetune.zero_stage=1, or finetune.clip=0"
        )


def _check_sharded(config: Experiment, name: str, section: Finetune, model: PretrainedConfig) -> None:
    if model.model_type not in FAMILIES:
        raise ConfigError(
            f"{name}: experts is fsep but the model is a {model.model_type}, whose experts fsep does not know "
            f"(it knows {', '.join(sorted(FAMILIES))}): set finetune.experts=replicated"
        )
    slots_of(config.fsep, section.processes, num_experts(model))
    topology_of(config.fsep, model, section.processes, config.launch.nodes)


def _check_autoep(name: str, section: Finetune, model: PretrainedConfig) -> None:
    way, experts = f"{name}: experts is autoep", num_experts(model)
    if model.model_type not in AUTOEP_FAMILIES:
        raise ConfigError(
            f"{way} but the model is a {model.model_type}, whose routing is not shown to be the same in "
            f"DeepSpeed's layer (it is for {', '.join(AUTOEP_FAMILIES)}): set finetune.experts=fsep, or replicated"
        )
    if experts % section.processes:
        raise ConfigError(
            f"{way} but {section.processes} processes cannot have equally many of {experts} experts: set "
            f"finetune.processes to a divisor of {experts}, or finetune.experts=fsep"
        )
    if section.record_loads:
        raise ConfigError(
            f"{way}, whose routers fsep's recorder does not know, but record_loads is true: set "
            "finetune.record_loads=false, or finetune.experts=fsep"
        )
