"""Putting sharded experts into a Hugging Face model.

Shapes: E experts, N ranks, F expert width, H hidden width, P values an expert, S values a slice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsep.check import check_slots
from fsep.experts import ShardedExperts, expert_layers
from fsep.families import MoeBlock, family_of
from fsep.layout import Layout
from fsep.online import Planner
from fsep.runtime import FixedLayouts, LayoutSource, Runtime
from fsep.space import ExpertSpace
from fsep.topology import Topology


def attach(
    model: nn.Module,
    *,
    slots: int,
    planner: LayoutSource | Sequence[Layout] | None = None,
    topology: Topology | None = None,
    device: torch.device | str | None = None,
    prefetch: int = 1,
    delay_reshard: bool = True,
    timeout_s: float = 600.0,
) -> nn.Module:
    """Replace the experts of every MoE block by ``ShardedExperts``, in place; a collective call.

    Call it on every rank after ``torch.distributed`` is initialised and before ``deepspeed.initialize``; a script
    needs no other change. All ranks hold the same weights, or the model (its experts at least) is on the meta
    device and ``fsep.load_pretrained`` fills it. Router, shared experts and everything else are untouched.

    Args:
        model: a Hugging Face model of a family in ``fsep.families.FAMILIES``.
        slots: C, experts that a rank rebuilds at a time in each layer.
        planner: where layouts come from: None for ``fsep.Planner`` with its defaults, a planner, or one layout a
            MoE layer, kept. Loads of a training micro-batch are shown to it when the next one begins.
        topology: for None nodes have ``LOCAL_WORLD_SIZE`` devices, as torchrun says, else 8.
        device: where the slices of experts on the meta device are put; None for the current GPU, or the CPU.
        prefetch: layers whose experts are rebuilt ahead of their use. Rebuilt experts alive at a time are at most
            ``(prefetch + 1) * slots * P`` values.
        delay_reshard: wait for the exchange of a layer's gradients only after an earlier layer's computation. Two
            layers' gradients, else one, are alive at a time.
        timeout_s: seconds after which a rank that does not take part in an exchange is given up.

    Returns:
        The model.

    Raises:
        ValueError: an unknown family, a model without experts, one that has sharded experts or ZeRO-3 parameters
            already, sizes that do not fit, or no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() or "
            "deepspeed.init_distributed() before fsep.attach"
        )
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch is {prefetch!r}: give a whole number of at least 0")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s}: give a positive number of seconds")
    blocks = family_of(model).blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no MoE layer: nothing to shard")
    for block in blocks:
        _check_block(block)
    ranks = dist.get_world_size()
    experts = {block.parent.experts.num_experts for block in blocks}
    if len(experts) > 1:
        raise ValueError(f"the layers have {sorted(experts)} experts: all must have the same number")
    (experts,) = experts
    slots = min(check_slots(slots, ranks, experts), experts)
    if topology is None:
        topology = getattr(planner, "topology", None) or Topology(
            ranks, devices_per_node=min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", 8)))
        )
    if topology.devices != ranks:
        raise ValueError(f"topology.devices is {topology.devices} but there are {ranks} ranks: make them agree")
    if planner is None:
        planner = Planner(topology, slots, layers=len(blocks), experts=experts)
    elif isinstance(planner, Sequence):
        planner = FixedLayouts(planner)
    runtime = Runtime(
        model, planner, topology, slots, prefetch=prefetch, delay_reshard=delay_reshard, timeout_s=timeout_s
    )
    for index, block in enumerate(blocks):
        block.parent.experts = _shard(index, block, runtime, device)
        runtime.layers.append(block.parent.experts)
    model.save_pretrained = _refuse_to_save
    return model


def _refuse_to_save(*_: object, **__: object) -> None:
    raise ValueError("the experts are sharded: call fsep.save_pretrained(model, folder), on every rank")


def sharded_layers(model: nn.Module) -> list[ShardedExperts]:
    """The sharded layers of an attached model, or of an engine or wrapper around one, front to back.

    Raises:
        ValueError: there are none.
    """
    layers = expert_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no sharded experts: call fsep.attach first")
    return layers


def _check_block(block: MoeBlock) -> None:
    experts = block.parent.experts
    if isinstance(experts, ShardedExperts):
        raise ValueError(f"{block.name} is sharded already: call fsep.attach once")
    parameters = dict(experts.named_parameters())
    if sorted(parameters) != ["down_proj", "gate_up_proj"]:
        raise ValueError(f"{block.name} has {sorted(parameters)}: expected down_proj and gate_up_proj")
    if any(hasattr(parameter, "ds_id") for parameter in parameters.values()):
        raise ValueError(f"{block.name} was made under deepspeed.zero.Init (ZeRO-3): make the model without it")
    if experts.gate_up_proj.requires_grad != experts.down_proj.requires_grad:
        raise ValueError(f"{block.name}: one of gate_up_proj and down_proj is frozen: freeze both or none")


def _shard(index: int, block: MoeBlock, runtime: Runtime, device: torch.device | str | None) -> ShardedExperts:
    old = block.parent.experts
    gate_up_E2FH, down_EHF = old.gate_up_proj, old.down_proj
    on_meta = gate_up_E2FH.is_meta or down_EHF.is_meta
    if not on_meta:
        device = gate_up_E2FH.device
    elif device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    space = ExpertSpace(hidden=down_EHF.shape[1], width=down_EHF.shape[2])
    new = ShardedExperts(
        index,
        block.name,
        gate_up_E2FH.shape[0],
        space,
        old.act_fn,
        runtime,
        dtype=gate_up_E2FH.dtype,
        device=torch.device(device),
        trainable=gate_up_E2FH.requires_grad,
    )
    if not on_meta:
        own = space.owned(runtime.tokens.rank, runtime.tokens.size)
        with torch.no_grad():
            new.shard[:, : own.size] = _values(gate_up_E2FH, down_EHF, own.start, own.stop)
        new.loaded = True
    return new.train(old.training)


def _values(gate_up_E2FH: Tensor, down_EHF: Tensor, start: int, stop: int) -> Tensor:
    """Coordinates ``start`` to ``stop`` of every expert, [E, stop - start], without joining whole experts."""
    up = gate_up_E2FH.flatten(1)
    down = down_EHF.flatten(1)
    border = up.shape[1]
    return torch.cat(
        [up[:, min(start, border) : min(stop, border)], down[:, max(start - border, 0) : max(stop - border, 0)]], 1
    )
