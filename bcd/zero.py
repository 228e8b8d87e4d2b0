"""Back end of the engine on DeepSpeed, ZeRO stage 0 to 3.

DeepSpeed builds its partitions, hooks and buckets once, for the parameters that are trainable at
initialisation; changing ``requires_grad`` afterwards trains the wrong ones in silence. At a switch we
therefore either let the one engine build a new ZeRO optimizer (``reconfigure``, the private calls that its
own constructor makes, DeepSpeed pinned in pyproject.toml) or build a new engine (``rebuild``, public, slower).
A test holds both to the same weights.
"""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from bcd.blocks import decoder_layers, depths
from bcd.config import Config
from bcd.environment import prepare_environment
from bcd.groups import Group, GroupState, adamw, read_state, write_state
from bcd.rows import ActiveRows, select


class DeepSpeedBackend:
    """A DeepSpeed engine whose trained parameters can change."""

    def __init__(self, model: nn.Module, ds_config: dict[str, Any], config: Config):
        prepare_environment()
        import deepspeed  # reads its environment when it is imported

        self.deepspeed = deepspeed
        self.module, self.config = model, config
        self.ds_config = _checked(ds_config, config)
        self.stage = self.ds_config.get("zero_optimization", {}).get("stage", 0)
        self.kind = f"zero{self.stage}"
        self.half = bool(self.ds_config.get("fp16", {}).get("enabled"))
        self.accumulation = self.ds_config["gradient_accumulation_steps"]
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.depth = depths(model, decoder_layers(model))
        self.layers = decoder_layers(model)
        self.engine = None
        self.rows: list[ActiveRows] = []
        self._input_hooks: list = []

    @property
    def optimizer(self):
        return self.engine.optimizer

    def activate(self, groups: list[Group], saved: dict[str, GroupState]) -> None:
        """Make `groups` trainable, with their saved state where there is one."""
        self.groups = groups
        pieces = [piece for group in groups for piece in group.pieces]
        with self._whole([self.module.get_parameter(piece.name) for piece in pieces if piece.rows]):
            parameters, self.rows = select(self.module, pieces)
        for item in self.rows:
            item.register()
        found = iter(parameters)
        optimizer = adamw(groups, [[next(found) for _ in group.pieces] for group in groups], self.config)
        if self.engine is None or self.config.switch == "rebuild":
            self._build(optimizer, parameters)
        else:
            self._reconfigure(optimizer, parameters)
        for item in self.rows:
            item.attach()  # after DeepSpeed's own hooks, which fetch the weight
        # Without this ZeRO 1 and 2 apply updates that are not finite, unless the weights are fp16.
        if hasattr(self.optimizer, "check_grad_overflow"):
            self.optimizer.check_grad_overflow = True
        if self.stage == 3:
            self._require_input_gradients(groups)
        self._undo_initial_step()
        for group, masters in zip(groups, self._masters(), strict=True):
            if group.name in saved:
                write_state(masters, self._adamw(), saved[group.name])

    def read(self, *, moments: bool) -> dict[str, GroupState]:
        """State of the active groups on this rank, in host memory."""
        dtype = self.engine.get_data_types()[0]
        return {
            group.name: read_state(masters, self._adamw(), dtype, moments=moments)
            for group, masters in zip(self.groups, self._masters(), strict=True)
        }

    def deactivate(self) -> None:
        """Let go of everything that belongs to the active groups but their weights."""
        for hook in self._input_hooks:
            hook.remove()
        self._input_hooks.clear()
        if self.config.switch == "rebuild":
            self.counters = self.engine.micro_steps, self.engine.global_steps, self.engine.global_samples
            self.engine.destroy()
            # The model would keep the engine alive through these.
            self.engine.module_forward_pre_hook.remove()
            self.engine.module_forward_post_hook.remove()
        elif hasattr(self.optimizer, "destroy"):
            old = self.optimizer
            old.destroy()
            old.optimizer.state.clear()
            # Cycles keep the object itself until the next garbage collection; its tensors shall not wait.
            vars(old).clear()
        self._write_rows_back()
        for item in self.rows:
            item.detach()
            item.unregister()
        for parameter in self.module.parameters():
            parameter.grad = None
        self.engine.optimizer = self.engine.basic_optimizer = self.engine.client_optimizer = None
        self.rows = []

    def _build(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        counters = None if self.engine is None else self.counters
        self.engine = None
        self.engine, *_ = self.deepspeed.initialize(
            model=self.module, optimizer=optimizer, model_parameters=parameters, config=self.ds_config
        )
        if counters is not None:
            self.engine.micro_steps, self.engine.global_steps, self.engine.global_samples = counters

    def _reconfigure(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        engine = self.engine
        engine.client_optimizer = optimizer
        engine.param_names = {parameter: name for name, parameter in self.module.named_parameters()}
        # ZeRO-3 collects garbage here, through every object of the process: nearly all of the time a switch
        # takes, for nothing, since `deactivate` let go of the old block.
        mine = gc.get_freeze_count() == 0
        if mine:
            gc.freeze()
        try:
            engine._configure_optimizer(optimizer, parameters)
        finally:
            if mine:
                gc.unfreeze()
        if engine._support_torch_style_backward:
            engine.optimizer.register_grad_acc_post_hook(engine._backward_post_hook)

    def _adamw(self) -> torch.optim.Optimizer:
        """The AdamW inside DeepSpeed's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _masters(self) -> list[list[torch.Tensor]]:
        """What AdamW updates on this rank, for each group: see `groups.GroupState`."""
        optimizer = self.optimizer
        if hasattr(optimizer, "single_partition_of_fp32_groups"):  # ZeRO 1 and 2
            return [[flat] for flat in optimizer.single_partition_of_fp32_groups]
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # ZeRO 3
            masters: list[list[torch.Tensor]] = [[] for _ in self.groups]
            for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
                masters[optimizer.sub_group_to_group_id[index]].append(flat)
            return masters
        if hasattr(optimizer, "fp32_groups"):  # ZeRO 0, bf16 or fp16
            return optimizer.fp32_groups
        return [group["params"] for group in optimizer.param_groups]

    def _undo_initial_step(self) -> None:
        """At ZeRO-0 in bf16 or fp16 DeepSpeed makes a step with zero gradients to allocate the moments. It
        decays the weights and counts."""
        if not hasattr(self.optimizer, "fp32_groups"):
            return
        self._adamw().state.clear()
        with torch.no_grad():
            for masters, weights in zip(self.optimizer.fp32_groups, self.optimizer.fp16_groups, strict=True):
                for master, weight in zip(masters, weights, strict=True):
                    master.copy_(weight)

    def _require_input_gradients(self, groups: list[Group]) -> None:
        """Make the input of the lowest active layer require a gradient.

        ZeRO-3 frees and fetches weights in hooks on the gradients of a module's inputs; below the lowest
        active parameter there are none, and its own module would find its weights gone.
        """
        names = [piece.name for group in groups for piece in group.pieces]
        lowest = min(self.depth[name] for name in names)
        if lowest == 0:
            return
        if lowest <= len(self.module.get_submodule(self.layers)):
            modules = [self.module.get_submodule(self.layers)[lowest - 1]]
        else:
            owners = {name.rpartition(".")[0] for name in names}
            modules = [self.module.get_submodule(name) for name in owners]

        def hook(module, args):
            if torch.is_grad_enabled() and args and torch.is_tensor(args[0]) and not args[0].requires_grad:
                return (args[0].detach().requires_grad_(True), *args[1:])

        self._input_hooks = [module.register_forward_pre_hook(hook, prepend=True) for module in modules]

    def forward(self, *args, **kwargs):
        return self.engine(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        return self.engine.backward(loss)

    def step(self, rate: float, boundary: bool) -> tuple[bool, float | None]:
        """Update at a boundary; (whether it was applied, norm of the gradients before clipping)."""
        if not boundary:
            self.engine.step()
            return False, None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = None
        if not hasattr(self.optimizer, "_global_grad_norm"):  # ZeRO-0 in fp32 measures none
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if not norm < float("inf"):
                self.engine.zero_grad()
                self.engine.micro_steps += 1
                return False, norm
        self.engine.step()
        if norm is None:
            norm = float(self.optimizer._global_grad_norm)
        return self.engine.was_step_applied(), norm

    def barrier(self) -> None:
        torch.distributed.barrier()

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights that this rank has to save: all on rank 0, under ZeRO-3 its share on each rank."""
        if self.stage < 3:
            return self.module.state_dict() if self.rank == 0 else {}
        self._write_rows_back()
        return self._buffers() | {name: p.ds_tensor.detach() for name, p in self._own_parameters().items()}

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Undo `weights`, while no group is active."""
        with torch.no_grad():
            if self.stage < 3:
                self.module.load_state_dict(weights)
                return
            for name, buffer in self._buffers().items():
                buffer.copy_(weights[name])
            for name, parameter in self._own_parameters().items():
                parameter.ds_tensor.copy_(weights[name])
                if parameter.ds_status.name == "AVAILABLE":  # a small one, kept whole beside its share
                    parameter.partition()

    def full_weights(self) -> dict[str, torch.Tensor]:
        """All weights and buffers, on rank 0."""
        if self.stage < 3:
            return self.weights()
        self._write_rows_back()
        whole = self._buffers() if self.rank == 0 else {}
        for name, parameter in self._own_parameters(tied=True).items():
            with self.deepspeed.zero.GatheredParameters([parameter]):
                if self.rank == 0:
                    whole[name] = parameter.detach().cpu().clone()
        return whole

    def _own_parameters(self, tied: bool = False) -> dict[str, nn.Parameter]:
        """The model's parameters without registered rows; each once, or under every name if `tied`."""
        rows = {id(p) for item in self.rows for p in item.parameters}
        named = self.module.named_parameters(remove_duplicate=not tied)
        return {name: parameter for name, parameter in named if id(parameter) not in rows}

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that belong to the state dict."""
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        return {name: value for name, value in self.module.state_dict().items() if name not in parameters}

    def _write_rows_back(self) -> None:
        for item in self.rows:
            with self._whole([item.weight, *item.parameters]):
                item.write_back()

    def _whole(self, parameters: list[nn.Parameter]):
        """Context in which `parameters` are whole on every rank; changes made on rank 0 are kept."""
        split = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
        return self.deepspeed.zero.GatheredParameters(split, modifier_rank=0) if split else nullcontext()


def _checked(ds_config: dict[str, Any], config: Config) -> dict[str, Any]:
    """A copy of `ds_config` with what bcd needs; ValueError where it says otherwise than `config`."""
    ds_config = dict(ds_config)
    world = int(os.environ["WORLD_SIZE"])
    micro = ds_config.get("train_micro_batch_size_per_gpu")
    if micro and "train_batch_size" in ds_config:
        ds_config.setdefault("gradient_accumulation_steps", ds_config["train_batch_size"] // (micro * world))
    for section in ("optimizer", "scheduler"):
        if section in ds_config:
            raise ValueError(f"ds_config has {section!r}: bcd owns it, set lr, weight_decay, ... in the bcd config")
    for key, default in (("gradient_accumulation_steps", 1), ("gradient_clipping", 0.0)):
        mine, theirs = getattr(config, key), ds_config.setdefault(key, getattr(config, key))
        if mine not in (default, theirs):
            raise ValueError(f"{key} is {mine} in the bcd config and {theirs} in ds_config: say it once")
    if "train_batch_size" not in ds_config:
        ds_config.setdefault("train_micro_batch_size_per_gpu", 1)
    if config.dtype == "bf16":
        ds_config.setdefault("bf16", {"enabled": True})
    zero = ds_config.get("zero_optimization", {})
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        raise ValueError(f"ds_config zero_optimization.stage is {zero['stage']}: use 0 to 3")
    if zero.get("compute_grad_norm") is False:
        raise ValueError("ds_config zero_optimization.compute_grad_norm is False: bcd needs the norm, drop it")
    if "offload_optimizer" in zero:
        ds_config["zero_force_ds_cpu_optimizer"] = False
    return ds_config
