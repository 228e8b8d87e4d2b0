"""The training state of one rank as intervals in coordinate spaces that no world size changes.

Shapes: E experts, P values an expert, S values a slice, G rows of a part.
A plain parameter is one row of numel coordinates; a layer's experts are E rows of P coordinates (``fsep.space``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsep.experts import ShardedExperts, expert_layers
from fsep.space import Interval

WEIGHT, MASTER = "weight", "master"


class Part(NamedTuple):
    """What this rank holds of one state of one parameter: ``values`` [G, interval.size], a view to read or fill."""

    parameter: str
    state: str
    interval: Interval
    values: Tensor


class Held(NamedTuple):
    """The optimizer's copy of (a fragment of) a parameter: the elements of ``owner`` from ``offset`` on."""

    name: str
    parameter: nn.Parameter
    owner: Tensor
    offset: int
    interval: Interval  # in the flattened parameter
    group: dict


class State:
    """The state of a DeepSpeed engine on this rank, of a model with sharded experts or without.

    Raises:
        ValueError: ZeRO stage 3, or an optimizer whose state can't be taken apart (fp16, offload or one of
            DeepSpeed's own kind).
    """

    def __init__(self, engine) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.names = {name: parameter for name, parameter in engine.module.named_parameters()}
        if engine.zero_optimization_stage() > 2:
            raise ValueError("zero_optimization.stage is 3, which leaves no rank a parameter's place: use 0 to 2")
        self._layer_of = {id(layer.shard): layer for layer in expert_layers(engine.module)}
        self.held = list(_held(engine, self.names))
        self._trained = {id(held.parameter) for held in self.held} | {
            id(parameter) for parameter in self.names.values() if hasattr(parameter, "_hp_mapping")
        }
        outer = engine.optimizer
        self.optimizer = getattr(outer, "optimizer", outer)

    def sizes(self) -> dict[str, list[int]]:
        """[rows, coordinates] of each parameter's space."""
        return {
            name: [self.rows(name), self._layer(name).space.size if self._layer(name) else parameter.numel()]
            for name, parameter in self.names.items()
        }

    def rows(self, name: str) -> int:
        """G: E for a layer's experts, else 1."""
        layer = self._layer(name)
        return layer.num_experts if layer else 1

    def owned(self) -> Iterator[Part]:
        """The parts this rank answers for: over all ranks every coordinate of every state once."""
        for part in self.parts():
            if self._replicated(part):  # every rank has all of it and answers for its share
                share = -(-part.interval.size // self.ranks)
                mine = Interval(self.rank * share, (self.rank + 1) * share) & part.interval
                part = part._replace(interval=mine, values=part.values[:, mine.start : mine.stop])
            if part.interval.size:
                yield part

    def parts(self) -> Iterator[Part]:
        """All that this rank holds: weights, fp32 masters and every optimizer state of a parameter's size."""
        for name, parameter in self.names.items():
            yield self._part(name, WEIGHT, parameter.data.flatten(), Interval(0, parameter.numel()))
        for held in self.held:
            fragment = slice(held.offset, held.offset + held.interval.size)
            if held.owner is not held.parameter:
                yield self._part(held.name, MASTER, held.owner.data.flatten()[fragment], held.interval)
            for state, value in self.optimizer.state.get(held.owner, {}).items():
                if _is_like(value, held.owner):
                    yield self._part(held.name, state, value.flatten()[fragment], held.interval)

    def scalars(self) -> dict[str, dict]:
        """Optimizer states that are single numbers, such as the step, by parameter."""
        return {
            held.name: {
                key: value.item() if torch.is_tensor(value) else value
                for key, value in self.optimizer.state.get(held.owner, {}).items()
                if not _is_like(value, held.owner)
            }
            for held in self.held
        }

    def options(self) -> dict[str, dict]:
        """The hyperparameters of each parameter's group."""
        plain = (int, float, bool, str, list, tuple, type(None))
        return {
            held.name: {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in held.group.items()
                if key not in ("params", "name", "moe") and isinstance(value, plain)
            }
            for held in self.held
        }

    def trained(self) -> set[str]:
        """Names of the parameters that the optimizer trains, on whatever rank."""
        return {name for name, parameter in self.names.items() if id(parameter) in self._trained}

    def prepare(self, states: set[str]) -> None:
        """Make optimizer states that come into being only at the first step."""
        for held in self.held:
            found = self.optimizer.state[held.owner]
            for state in states - {WEIGHT, MASTER} - found.keys():
                found[state] = torch.zeros_like(held.owner, requires_grad=False)

    def set_scalars(self, scalars: dict[str, dict], options: dict[str, dict]) -> None:
        """Fill what ``scalars`` and ``options`` returned."""
        for held in self.held:
            found = self.optimizer.state[held.owner]
            for key, value in scalars.get(held.name, {}).items():
                if torch.is_tensor(found.get(key)):
                    found[key].fill_(value)
                else:
                    # As PyTorch's optimizers begin their step counter.
                    found[key] = torch.tensor(value, dtype=torch.float32) if key == "step" else value
            for key, value in options.get(held.name, {}).items():
                if key in held.group:
                    held.group[key] = tuple(value) if isinstance(held.group[key], tuple) else value

    def _replicated(self, part: Part) -> bool:
        parameter = self.names[part.parameter]
        if id(parameter) in self._layer_of:
            return False
        return part.state == WEIGHT or not hasattr(parameter, "_hp_mapping")

    def _layer(self, name: str) -> ShardedExperts | None:
        return self._layer_of.get(id(self.names[name]))

    def _part(self, name: str, state: str, flat: Tensor, interval: Interval) -> Part:
        layer = self._layer(name)
        if layer is None:
            return Part(name, state, interval, flat[None])
        own = layer.space.owned(self.rank, self.ranks)
        return Part(name, state, own, flat.view(layer.num_experts, -1)[:, : own.size])


def _is_like(value: object, owner: Tensor) -> bool:
    return torch.is_tensor(value) and value.dim() > 0 and value.shape == owner.shape


def _held(engine, names: dict[str, nn.Parameter]) -> Iterator[Held]:
    """Where the optimizer keeps each trained parameter, for the wrappers that DeepSpeed puts around it."""
    outer = engine.optimizer
    if engine.fp16_enabled():
        raise ValueError("fp16 keeps a loss scale that is not saved here: train in bf16 or fp32")
    groups = getattr(outer, "param_groups", None)
    if groups is None:
        raise ValueError(f"{type(outer).__name__} has no param_groups: give an optimizer as PyTorch has them")
    trained = {name: parameter for name, parameter in names.items() if parameter.requires_grad}
    if any(hasattr(parameter, "_hp_mapping") for parameter in trained.values()):
        for name, parameter in trained.items():
            mapping = parameter._hp_mapping
            if mapping is None:
                continue
            group = groups[mapping.param_group_index]
            lp, hp = mapping.lp_fragment_address, mapping.hp_fragment_address
            yield Held(
                name, parameter, group["params"][0], hp.start, Interval(lp.start, lp.start + lp.numel), group
            )
        return
    name_of = {id(parameter): name for name, parameter in trained.items()}
    masters = getattr(outer, "fp32_groups", None)  # 16-bit weights without ZeRO
    for index, group in enumerate(groups):
        parameters = group["params"] if masters is None else outer.fp16_groups[index]
        for number, parameter in enumerate(parameters):
            owner = parameter if masters is None else masters[index][number]
            yield Held(name_of[id(parameter)], parameter, owner, 0, Interval(0, parameter.numel()), group)
