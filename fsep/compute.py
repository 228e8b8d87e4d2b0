"""Gated expert feed-forward over rows sorted by slot, forward and backward.

Shapes: R rows, C slots, H hidden width, F expert width, P = 3FH values an expert.
Weights and their gradients are flat, [C, >= P]: gate [F, H], up [F, H], down [H, F] and padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fsep.space import ExpertSpace


def matrices(flat_CP: Tensor, space: ExpertSpace) -> tuple[Tensor, Tensor]:
    """Views of flat experts: gate and up [C, 2F, H], down [C, H, F]."""
    H, F = space.hidden, space.width
    split = 2 * F * H
    return flat_CP[:, :split].unflatten(1, (2 * F, H)), flat_CP[:, split : space.size].unflatten(1, (H, F))


def grouped_mm_pays(x: Tensor, weight: Tensor) -> bool:
    """Whether one grouped kernel runs here: bf16 on a GPU of compute capability 8 on, rows 16-byte aligned.

    On a CPU the kernel is itself a loop, and slower than ours for fp32.
    """
    return (
        x.is_cuda
        and x.dtype == weight.dtype == torch.bfloat16
        and hasattr(torch, "_grouped_mm")
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and all(stride % 8 == 0 or stride == 1 for stride in weight.stride())
        and weight.data_ptr() % 16 == 0
    )


def grouped_mm(x_RK: Tensor, weight_CKM: Tensor, slot_rows: list[int]) -> Tensor:
    """[R, M]: the rows of slot c times ``weight_CKM[c]``; one kernel, or one product a slot."""
    if grouped_mm_pays(x_RK, weight_CKM):
        ends = torch.tensor(slot_rows, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x_RK.device)
        return torch._grouped_mm(x_RK, weight_CKM, offs=ends)
    out = x_RK.new_empty((len(x_RK), weight_CKM.shape[2]))
    rows = zip(x_RK.split(slot_rows), weight_CKM, out.split(slot_rows), strict=True)
    for x, weight, y in rows:
        if len(x):
            torch.mm(x, weight, out=y)
    return out


def gated(up_R2F: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """[R, F]: act(gate) * up."""
    gate, up = up_R2F.chunk(2, dim=-1)
    return act(gate) * up


def forward(x_RH: Tensor, flat_CP: Tensor, slot_rows: list[int], space: ExpertSpace, act: Callable):
    """The experts' output [R, H] and, to keep for backward, their inner products [R, 2F]."""
    gate_up, down = matrices(flat_CP, space)
    up_R2F = grouped_mm(x_RH, gate_up.transpose(1, 2), slot_rows)
    return grouped_mm(gated(up_R2F, act), down.transpose(1, 2), slot_rows), up_R2F


def backward(
    grad_RH: Tensor,
    x_RH: Tensor,
    up_R2F: Tensor,
    flat_CP: Tensor,
    slot_rows: list[int],
    space: ExpertSpace,
    act: Callable,
    grad_flat_CP: Tensor | None,
) -> Tensor:
    """The gradient of the rows [R, H]; that of the weights is written to ``grad_flat_CP``, padding as zeros."""
    gate_up, down = matrices(flat_CP, space)
    with torch.enable_grad():
        leaf = up_R2F.detach().requires_grad_()
        hidden_RF = gated(leaf, act)
    (grad_up,) = torch.autograd.grad(hidden_RF, leaf, grouped_mm(grad_RH, down, slot_rows))
    if grad_flat_CP is not None:
        grad_gate_up, grad_down = matrices(grad_flat_CP, space)
        grad_flat_CP[:, space.size :] = 0
        _outer(grad_up, x_RH, slot_rows, grad_gate_up)
        _outer(grad_RH, hidden_RF.detach(), slot_rows, grad_down)
    return grouped_mm(grad_up, gate_up, slot_rows)


def _outer(a_RM: Tensor, b_RK: Tensor, slot_rows: list[int], out_CMK: Tensor) -> None:
    """out[c] = a[c].T @ b[c] over the rows of slot c, zero for a slot without rows."""
    for a, b, out in zip(a_RM.split(slot_rows), b_RK.split(slot_rows), out_CMK, strict=True):
        torch.mm(a.T, b, out=out)
