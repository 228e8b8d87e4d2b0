"""Tokens to the copies of their experts and back.

Shapes: T tokens, K experts a token, E experts, N ranks, P copies, C slots, R rows received, H hidden width.
A pair is one (token, k): pair t * K + k. A row is the hidden state of a pair on its way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fsep.layout import Copies
from fsep.link import Link, move_rows


@dataclass(frozen=True)
class Flow:
    """Where this rank's pairs go and what it receives, for one layer and one micro-batch.

    Rows are sent ordered by (rank, slot); received ones are reordered to (slot, rank).
    """

    pair_of_sent: Tensor  # [T * K] int64
    sent_of_pair: Tensor  # [T * K] int64, the inverse
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    arrival_of_row: Tensor  # [R] int64: place on arrival of each row in slot order
    row_of_arrival: Tensor  # [R] int64, the inverse
    slot_rows: list[int]  # rows of each filled slot of this rank
    top_k: int


def make_flow(chosen_TK: Tensor, tokens_NP: np.ndarray, copies: Copies, rank: int) -> Flow:
    """The flow of ``chosen_TK`` (expert numbers) when rank i sends ``tokens_NP[i, p]`` pairs to copy p.

    The pairs of an expert go to its copies in order: the first to its first copy, and so on.
    """
    device = chosen_TK.device
    first, last = copies.device_start[rank], copies.device_start[rank + 1]
    order = copies.on_device
    count_P = tokens_NP[rank]
    start_P = np.cumsum(count_P) - count_P
    # Sorted by expert, the pairs of copy p are start_P[p] .. start_P[p] + count_P[p].
    by_expert = torch.argsort(chosen_TK.flatten(), stable=True)
    picked = torch.from_numpy(_ranges(start_P[order], count_P[order])).to(device)
    pair_of_sent = by_expert[picked]

    received_NC = tokens_NP[:, order[first:last]]
    arrival_NC = (np.cumsum(received_NC) - received_NC.ravel()).reshape(received_NC.shape)
    arrival_of_row = torch.from_numpy(_ranges(arrival_NC.T.ravel(), received_NC.T.ravel())).to(device)
    return Flow(
        pair_of_sent=pair_of_sent,
        sent_of_pair=_inverse(pair_of_sent),
        sent=np.bincount(copies.device, count_P, len(tokens_NP)).astype(np.int64).tolist(),
        received=received_NC.sum(1).tolist(),
        arrival_of_row=arrival_of_row,
        row_of_arrival=_inverse(arrival_of_row),
        slot_rows=received_NC.sum(0).tolist(),
        top_k=chosen_TK.shape[1],
    )


def _ranges(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """start[0] .. start[0] + count[0] - 1, then the same of 1, and so on."""
    return np.repeat(start - (np.cumsum(count) - count), count) + np.arange(count.sum())


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse


class Dispatch(torch.autograd.Function):
    """[T, H] of this rank's tokens to [R, H], the rows of the experts this rank holds, ordered by slot."""

    @staticmethod
    def forward(ctx, x_TH: Tensor, flow: Flow, link: Link, name: str) -> Tensor:
        ctx.flow, ctx.link, ctx.name = flow, link, name
        rows = x_TH[flow.pair_of_sent // flow.top_k]
        return move_rows(link, rows, flow.received, flow.sent, f"dispatch of {name}")[flow.arrival_of_row]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_RH: Tensor):
        flow = ctx.flow
        rows = grad_RH[flow.row_of_arrival]
        rows = move_rows(ctx.link, rows, flow.sent, flow.received, f"dispatch backward of {ctx.name}")
        grad_TKH = rows[flow.sent_of_pair].view(len(rows) // flow.top_k, flow.top_k, rows.shape[1])
        return grad_TKH.sum(1), None, None, None


class Combine(torch.autograd.Function):
    """[R, H] of this rank's experts back to [T * K, H], one row for each pair of this rank, in order."""

    @staticmethod
    def forward(ctx, y_RH: Tensor, flow: Flow, link: Link, name: str) -> Tensor:
        ctx.flow, ctx.link, ctx.name = flow, link, name
        rows = move_rows(link, y_RH[flow.row_of_arrival], flow.sent, flow.received, f"combine of {name}")
        return rows[flow.sent_of_pair]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_PH: Tensor):
        flow = ctx.flow
        rows = grad_PH[flow.pair_of_sent]
        rows = move_rows(ctx.link, rows, flow.received, flow.sent, f"combine backward of {ctx.name}")
        return rows[flow.arrival_of_row], None, None, None
