"""The training engine: block coordinate descent behind DeepSpeed's engine interface.

    engine = bcd.initialize(model=model, config={"lr": 1e-4, "steps_per_block": 50}, ds_config=...)
    for batch in batches:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

Full-parameter training by blocks as in BAdam (Luo, Yu, Li 2024, arXiv 2404.02827) and in
arXiv 2506.12037: the active block has gradients, master weights and moments; the rest has weights alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from bcd import checkpoint
from bcd.blocks import depths, partition
from bcd.config import Config, read
from bcd.expansion import Expansion, divide
from bcd.groups import Group, GroupState, make_groups
from bcd.plain import PlainBackend
from bcd.prefetch import Prefetch
from bcd.prefix import PrefixCache
from bcd.schedule import BlockSchedule, learning_rate


def initialize(
    *,
    model: nn.Module,
    config: Config | Mapping[str, Any] | None = None,
    ds_config: Mapping[str, Any] | None = None,
) -> Engine:
    """Wrap `model` for block coordinate descent.

    Parameters
    ----------
    model
        A Hugging Face causal language model. Parameters with ``requires_grad=False`` stay frozen.
    config
        A `bcd.Config` or a mapping of its fields.
    ds_config
        A DeepSpeed config without ``optimizer`` and ``scheduler``: train with DeepSpeed at its ZeRO stage.
        None: plain PyTorch on the device that holds the model.

    Raises
    ------
    ValueError
        A setting that is wrong or does not suit the model, before anything is allocated.
    """
    return Engine(model, read(config), None if ds_config is None else dict(ds_config))


class Engine:
    """See `initialize`. Public attributes beside DeepSpeed's interface:

    `partition`, `schedule` (the blocks and where we are among them), `global_steps` (applied updates),
    `skipped_steps` (updates skipped because the gradients were not finite), `micro_steps`.
    """

    def __init__(self, model: nn.Module, config: Config, ds_config: dict[str, Any] | None):
        self.config = config
        width = 14 if _low_precision(model, config, ds_config) else 12
        self.partition = partition(
            model,
            config.granularity,
            always_on=config.always_on,
            expert_groups=config.expert_groups,
            max_block_gb=config.max_block_gb,
            bytes_per_parameter=width,
        )
        self.schedule = BlockSchedule(
            len(self.partition.blocks),
            config.order,
            config.steps_per_block,
            active=config.active_blocks,
            seed=config.seed,
            depths=[block.depth for block in self.partition.blocks],
        )
        self._trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        self._depths = depths(model, self.partition.layers)
        pretrained = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
        if config.activation_checkpointing and pretrained is None:
            raise ValueError("activation_checkpointing needs a transformers model: set it up in the model instead")
        if config.activation_checkpointing or getattr(pretrained, "is_activation_checkpointing", False):
            # Recomputation without reentry is the one that needs no gradient at its input: with the other a
            # block above frozen layers would get none, and transformers therefore makes the embeddings'
            # output require one, which sends backward all the way down.
            zero3 = (ds_config or {}).get("zero_optimization", {}).get("stage") == 3
            # Under ZeRO-3 a weight is whole in forward and empty when its recomputation is compared.
            check = {"determinism_check": "none"} if zero3 else {}
            pretrained.disable_input_require_grads()  # a second call below would leave a first hook in place
            pretrained.activation_checkpointing_enable({"use_reentrant": False, **check})
            pretrained.disable_input_require_grads()
        if ds_config is None:
            self._backend = PlainBackend(model, config)
        else:
            from bcd.zero import DeepSpeedBackend

            self._backend = DeepSpeedBackend(model, ds_config, config)
        inside = f"{self.partition.layers}."
        outside = [name for name in self._depths if not name.startswith(inside)]
        self._expansion = None if config.expansion is None else Expansion(self._backend, config, outside)
        self._prefix = (
            None if config.prefix_cache is None else PrefixCache(model, self.partition, config.prefix_cache)
        )
        self.global_steps = self.skipped_steps = self.micro_steps = 0
        self._since_switch = 0
        self._pending = False  # gradients that no update has used yet
        self._applied = False
        self._rate: float | None = None
        # What the caller wrote for the last update: a rate written after backward comes too late for the
        # expansion, which goes by the one before.
        self._written: float | None = None
        self._grad_norm: float | None = None
        self._kept: dict[str, GroupState] = {}  # state of inactive groups, in host memory
        self._prefetch: Prefetch | None = None
        self._activate()

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._backend.module

    @property
    def optimizer(self):
        """The present optimizer; another object after each switch. A learning rate that is written into its
        ``param_groups`` holds for the next update, as with DeepSpeed; `set_lr` holds for all that follow."""
        return self._backend.optimizer

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def active_blocks(self) -> tuple[str, ...]:
        """Names of the blocks that train now."""
        return tuple(self.partition.blocks[i].name for i in self.schedule.blocks)

    @property
    def expanded(self) -> tuple[str, ...]:
        """Names of the parameters above the active blocks that the expansion updates now."""
        return () if self._expansion is None else tuple(self._expansion.names)

    def __call__(self, *args, **kwargs):
        """Forward pass of the model."""
        if self._expansion is not None and torch.is_grad_enabled():
            rate = self._asked_rate()
            if rate == self._offered and self._written is not None:
                rate = self._written
            self._expansion.enable(self.is_gradient_accumulation_boundary(), rate, self.micro_steps)
        if self._prefix is not None and torch.is_grad_enabled() and self.module.training:
            return self._prefix.forward(self._backend.forward, args, kwargs)
        return self._backend.forward(*args, **kwargs)

    forward = __call__

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradients of `loss` (a scalar), divided by the accumulation steps; returns the divided loss."""
        self._pending = True
        return self._backend.backward(loss)

    def step(self) -> None:
        """Once after each `backward`. At an accumulation boundary: update, and go on to the next blocks when
        the active ones had theirs."""
        boundary = self.is_gradient_accumulation_boundary()
        self._check_rows()
        rate = self._asked_rate()
        if boundary:
            self._written = None if rate == self._offered else rate
        self._applied, norm = self._backend.step(rate, boundary)
        self.micro_steps += 1
        if not boundary:
            return
        self._pending, self._grad_norm = False, norm
        if not self._applied:
            self.skipped_steps += 1
            return
        self.global_steps += 1
        self._since_switch += 1
        self.schedule.record(norm)
        if self.schedule.done:
            self.switch()
        elif self.config.prefetch and self.schedule.inner_step == self.config.steps_per_block - 1:
            self._fetch_ahead()
        self._offer_rate()

    def switch(self) -> None:
        """Go on to the next blocks now. `step` does so after `steps_per_block` updates; RuntimeError in the
        middle of an accumulation, whose gradients would be lost."""
        gas = self.gradient_accumulation_steps()
        if self._pending or self.micro_steps % gas:
            raise RuntimeError(
                f"switch asked at micro-batch {self.micro_steps % gas} of {gas} with gradients not applied: "
                "switch at an accumulation boundary"
            )
        before = self.schedule.blocks
        self.schedule.advance()
        if self.schedule.blocks == before:
            return  # the same parameters: nothing changes hands
        self._store(self._backend.read(moments=True))
        self._backend.deactivate()
        self._since_switch = 0
        self._activate()

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the present micro-batch completes an update."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def gradient_accumulation_steps(self) -> int:
        return self._backend.accumulation

    def zero_optimization_stage(self) -> int:
        """ZeRO stage; 0 without DeepSpeed."""
        return self._backend.stage

    def get_global_grad_norm(self) -> float | None:
        """Norm of the active gradients of the last update, before clipping; None before the first."""
        return self._grad_norm

    def was_step_applied(self) -> bool:
        """True if the last `step` updated the weights."""
        return self._applied

    def get_lr(self) -> list[float]:
        """Learning rate of the next update, one entry a parameter group."""
        config = self.config
        rate = learning_rate(
            self.global_steps,
            self._since_switch,
            peak=config.lr,
            schedule=config.lr_schedule,
            warmup_steps=config.warmup_steps,
            total_steps=config.total_steps,
            min_ratio=config.min_lr_ratio,
            switch_warmup=config.switch_warmup,
        )
        if self._rate is not None:
            rate = self._rate * self._warmth()
        return [rate] * len(self._backend.groups)

    def set_lr(self, rate: float) -> None:
        """Use `rate` from now on in place of the config's schedule; the warm-up after a switch still applies."""
        self._rate = float(rate)
        self._offer_rate()

    def _warmth(self) -> float:
        """Factor of the warm-up after a switch."""
        return min(1.0, (self._since_switch + 1) / (self.config.switch_warmup + 1))

    def _offer_rate(self) -> None:
        """Write the rate of the next update where the caller may replace it."""
        self._offered = self.get_lr()[0]
        for group in self.optimizer.param_groups:
            group["lr"] = self._offered

    def _asked_rate(self) -> float:
        rate = self.optimizer.param_groups[0]["lr"]
        return rate if rate == self._offered else rate * self._warmth()

    def _check_rows(self) -> None:
        for item in self._backend.rows:
            if not item.used:
                raise RuntimeError(
                    f"rows of {item.pieces[0].name!r} were never used in forward: under ZeRO-3 their module must "
                    "be called, reading its weight is not enough; leave this parameter whole (max_block_gb)"
                )

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write ``save_dir/tag`` (default ``global_step<n>``), and make it the latest if `save_latest`; all
        ranks call this.

        Whole or absent: it is written beside its place and renamed. RuntimeError in the middle of an
        accumulation.
        """
        if self._pending or self.micro_steps % self.gradient_accumulation_steps():
            raise RuntimeError("save_checkpoint in the middle of an accumulation: save after step() at a boundary")
        state = {
            **self._identity(),
            "schedule": self.schedule.state_dict(),
            "counters": (self.global_steps, self.skipped_steps, self.micro_steps, self._since_switch),
            "rate": (self._rate, self._written),
            "active": self._backend.read(moments=True),
            "kept": self._kept,
            "statistics": {} if self._expansion is None else self._expansion.state,
            "random": _random_state(),
            "client": dict(client_state or {}),
        }
        checkpoint.save(Path(save_dir), tag or f"global_step{self.global_steps}", state, self._backend, save_latest)
        return True

    def load_checkpoint(self, load_dir: str | Path, tag: str | None = None) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint; (its path, client state), or (None, {}) if there is none and no `tag`.

        ValueError if it was written with another partition, schedule, back end or number of processes.
        """
        found = checkpoint.find(Path(load_dir), tag)
        if found is None:
            return None, {}
        state = checkpoint.read_state(found, self._backend)
        for key, mine in self._identity().items():
            if state[key] != mine:
                raise ValueError(
                    f"checkpoint {found} has {key} {state[key]}, this run {mine}: resume with the same"
                )
        self.schedule.load_state_dict(state["schedule"])
        self._backend.deactivate()
        checkpoint.load_weights(found, self._backend)
        self.global_steps, self.skipped_steps, self.micro_steps, self._since_switch = state["counters"]
        (self._rate, self._written), self._kept = state["rate"], state["kept"]
        if self._expansion is not None:
            saved = state["statistics"].items()
            self._expansion.state = {name: [t.to(self.device) for t in tensors] for name, tensors in saved}
        self._pending = False
        self._activate(state["active"])
        _set_random_state(state["random"])
        return str(found), state["client"]

    def export(self, folder: str | Path) -> None:
        """Write a plain Hugging Face checkpoint; all ranks call this."""
        weights = self._backend.full_weights()
        if self._backend.rank == 0:
            self.module.save_pretrained(folder, state_dict=weights)
        self._backend.barrier()

    def _activate(self, active: dict[str, GroupState] | None = None) -> None:
        groups, expanded = self._groups(self.schedule.blocks)
        ahead = {} if self._prefetch is None else self._prefetch.take()
        saved = self._kept | ahead if active is None else active
        self._backend.activate(groups, {g.name: saved[g.name] for g in groups if g.name in saved})
        for group in groups:
            self._kept.pop(group.name, None)
        if self._expansion is not None:
            self._expansion.attach(expanded)
        self._offer_rate()
        if self._prefix is not None:
            trained = [piece.name for group in groups for piece in group.pieces] + expanded
            self._prefix.reset(min(self._depths[name] for name in trained))

    def _groups(self, indices: tuple[int, ...]) -> tuple[list[Group], list[str]]:
        """What AdamW and what the expansion trains while these blocks are active."""
        blocks, expanded = divide(self.partition, indices, self._depths, self._trainable, self.config)
        return make_groups(self.partition.always_on, blocks, self.config), expanded

    def _fetch_ahead(self) -> None:
        """Start to copy what the next blocks have in host memory to the device."""
        if self._prefetch is None:
            self._prefetch = Prefetch(self.device)
        names = [group.name for group in self._groups(self.schedule.upcoming)[0]]
        present = {group.name for group in self._backend.groups}
        self._prefetch.begin({n: self._kept[n] for n in names if n in self._kept and n not in present})

    def _store(self, state: dict[str, GroupState]) -> None:
        """Keep what the config keeps of groups that stop training; always-on groups keep everything."""
        for name, tensors in state.items():
            if self.config.state == "reset" and name.split("/")[0] != "always_on":
                tensors = [{k: v for k, v in tensor.items() if k == "residual"} for tensor in tensors]
            self._kept[name] = tensors

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint and the run that resumes it must agree on."""
        return {
            "partition": self.partition.digest,
            "back end": self._backend.kind,
            "expansion": "off" if self.config.expansion is None else f"on, active {self.config.expansion.active}",
            "number of processes": self._backend.world_size,
            "dtypes": sorted({str(p.dtype) for p in self.module.parameters()}),
        }


def _low_precision(model: nn.Module, config: Config, ds_config: dict[str, Any] | None) -> bool:
    sections = [(ds_config or {}).get(key, {}) for key in ("bf16", "bfloat16", "fp16")]
    if config.dtype == "bf16" or any(section.get("enabled") for section in sections):
        return True
    return config.dtype is None and next(model.parameters()).dtype != torch.float32


def _random_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
