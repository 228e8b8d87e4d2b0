"""Optimizer groups and the AdamW state that outlives a switch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from bcd.blocks import Block, Piece, matches
from bcd.config import Config

# State of one group: a dict for each tensor that the optimizer holds for it. That is a piece in plain PyTorch
# and under ZeRO-0, a rank's share of the flattened group under ZeRO-1 and 2, of a sub-group under ZeRO-3.
# "exp_avg", "exp_avg_sq" and "step" are AdamW's; "residual" is the fp32 master weight minus the weight.
GroupState = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Group:
    """Pieces of one block (or of the always-on set) with one weight decay. A group has the same members
    whenever its block is active, so its flattened layout, and with it its saved state, keeps its meaning."""

    name: str
    pieces: tuple[Piece, ...]
    weight_decay: float


def make_groups(always_on: Sequence[Piece], blocks: Iterable[Block], config: Config) -> list[Group]:
    """Groups of the always-on set and of the active blocks, decayed and not decayed parts apart."""
    groups = []
    for name, pieces in [("always_on", always_on), *((block.name, block.pieces) for block in blocks)]:
        exempt = [piece for piece in pieces if any(matches(pattern, piece.name) for pattern in config.no_decay)]
        decayed = [piece for piece in pieces if piece not in exempt]
        if decayed:
            groups.append(Group(name, tuple(decayed), config.weight_decay))
        if exempt:
            groups.append(Group(f"{name}/no_decay", tuple(exempt), 0.0))
    return groups


def adamw(groups: Sequence[Group], parameters: Sequence[Sequence[torch.Tensor]], config: Config):
    """torch's AdamW over `parameters` [group][piece]; fused on GPUs unless the config says otherwise: the plain
    one needs temporaries."""
    fused = config.fused if config.fused is not None else True if parameters[0][0].is_cuda else None
    return torch.optim.AdamW(
        [
            {"params": list(tensors), "weight_decay": group.weight_decay}
            for group, tensors in zip(groups, parameters, strict=True)
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
    )


def read_state(
    masters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, dtype: torch.dtype, *, moments: bool
) -> GroupState:
    """Copy a group's state to host memory: moments if asked for, and the residual where `dtype`, the
    weights' own, is not that of the master weights."""
    result = []
    for master in masters:
        state = {}
        if moments:
            state |= {key: _to_host(value) for key, value in optimizer.state.get(master, {}).items()}
        if dtype != master.dtype:
            # A weight is its master rounded. Keeping the difference lets a weight that was changed meanwhile
            # stay changed; added to an unchanged one it gives the master back exactly.
            residual = master.detach() - master.detach().to(dtype).to(master.dtype)
            state["residual"] = _to_host(residual)
        result.append(state)
    if any(master.is_cuda for master in masters):
        torch.cuda.current_stream().synchronize()  # once for all copies
    return result


def write_state(masters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, saved: GroupState) -> None:
    """Undo `read_state` on fresh master weights. Tensors that are on the device already become the optimizer's
    own; those in host memory are copied."""
    with torch.no_grad():
        for master, state in zip(masters, saved, strict=True):
            if "residual" in state:
                master.add_(state["residual"].to(master.device, non_blocking=master.is_cuda))
            moments = {key: value for key, value in state.items() if key != "residual"}
            if moments:
                optimizer.state[master] = {
                    # torch keeps the step counter on the host unless the update is fused.
                    key: value.clone()
                    if key == "step" and not master.is_cuda
                    else value.to(master.device, non_blocking=master.is_cuda, copy=not value.is_cuda)
                    for key, value in moments.items()
                }


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)
    return tensor.detach().clone()
