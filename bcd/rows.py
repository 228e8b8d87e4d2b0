"""Training some rows of a parameter while the rest of it is frozen.

ZeRO can't split a parameter and autograd can't freeze a part of one. Here the active rows are a parameter
of their own, and while a module that uses the weight runs, its attribute is replaced by a tensor that has
the whole weight's values and passes the gradient of the active rows on. Gradient accumulation, master
weights and moments then exist for these rows only; the whole weight's gradient lives for one backward
operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bcd.blocks import Piece, row_view


class _RowSlice(torch.autograd.Function):
    """Values of `weight`, gradient to `rows` (and to `weight` if it needs one)."""

    @staticmethod
    def forward(ctx, rows, weight, start, stop):
        ctx.bounds = start, stop
        target = weight.detach()[start:stop]
        if not _same_memory(target, rows):  # ZeRO keeps the active rows in a flat buffer of its own
            target.copy_(rows)
        return weight.detach()

    @staticmethod
    def backward(ctx, gradient):
        start, stop = ctx.bounds
        # A clone, since a view would keep the whole weight's gradient alive.
        return gradient[start:stop].clone(), gradient if ctx.needs_input_grad[1] else None, None, None


class ActiveRows:
    """The active row ranges of one weight, hooked into every module that uses it (tied weights too).

    `parameters` holds one trainable parameter a piece, on the same memory as the weight's rows.
    """

    def __init__(self, model: nn.Module, weight: nn.Parameter, pieces: Sequence[Piece]):
        self.root, self.weight, self.pieces = model, weight, tuple(pieces)
        self.used = False
        rows = [row_view(weight.detach(), piece) for piece in pieces]
        # Under ZeRO-3 the whole weight is here for a moment only.
        self.parameters = [nn.Parameter(r.clone() if hasattr(weight, "ds_id") else r) for r in rows]
        self.owners = [
            (module, attribute)
            for module in model.modules()
            for attribute, parameter in module._parameters.items()
            if parameter is weight
        ]
        self._handles = []

    def attach(self) -> None:
        """Replace the weight by the sliced one in every forward pass from now on.

        While the whole model runs, since a loss may read ``lm_head.weight`` without calling the module; and
        while the module runs, which it also does alone when activations are recomputed. Under ZeRO-3 the
        weight is there only while its module runs.
        """
        hooked = [(module, [(module, attribute)]) for module, attribute in self.owners]
        if not hasattr(self.weight, "ds_id"):
            hooked.insert(0, (self.root, self.owners))
        for module, owners in hooked:
            for owner, attribute in owners:
                enter, leave = self._hooks(owner, attribute)
                self._handles.append(module.register_forward_pre_hook(enter))
                self._handles.append(module.register_forward_hook(leave, always_call=True))

    def detach(self) -> None:
        """Undo `attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def register(self) -> None:
        """Make the active rows parameters of the module that holds the weight, where DeepSpeed finds them.

        State dicts stay those of the model as it was.
        """
        module, attribute = self.owners[0]
        names = [f"{attribute}_rows{index}" for index in range(len(self.parameters))]
        for name, parameter in zip(names, self.parameters, strict=True):
            module.register_parameter(name, parameter)

        def before(module, prefix, keep_vars):
            if self.weight.numel() and all(p.numel() for p in self.parameters):  # not taken apart by ZeRO-3
                self.write_back()

        def after(module, state_dict, prefix, metadata):
            for name in names:
                del state_dict[prefix + name]

        self._registration = [
            module.register_state_dict_pre_hook(before),
            module.register_state_dict_post_hook(after),
        ]

    def unregister(self) -> None:
        """Undo `register`."""
        for handle in self._registration:
            handle.remove()
        module, attribute = self.owners[0]
        for index in range(len(self.parameters)):
            del module._parameters[f"{attribute}_rows{index}"]

    def write_back(self) -> None:
        """Copy the active rows into the weight, where they don't share memory with it."""
        with torch.no_grad():
            for piece, parameter in zip(self.pieces, self.parameters, strict=True):
                target = row_view(self.weight.detach(), piece)
                if not _same_memory(target, parameter):
                    target.copy_(parameter)

    def _hooks(self, owner: nn.Module, attribute: str):
        before = []

        def enter(module, args):
            value = self.weight
            for piece, parameter in zip(self.pieces, self.parameters, strict=True):
                value = _RowSlice.apply(parameter, value, *piece.rows)
            before.append(owner.__dict__.get(attribute))
            # An entry in the instance's dict is found before the registered parameter.
            owner.__dict__[attribute] = value
            self.used = True

        def leave(module, args, output):
            # Nothing was entered if another hook raised first.
            value = before.pop() if before else None
            if value is None:
                owner.__dict__.pop(attribute, None)
            else:
                owner.__dict__[attribute] = value

        return enter, leave


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()


def select(model: nn.Module, pieces: Sequence[Piece]) -> tuple[list[nn.Parameter], list[ActiveRows]]:
    """Trainable parameters for `pieces` in order, and the row ranges (to `attach`) behind those not whole.

    Sets ``requires_grad`` of every parameter of the model: True for whole pieces, False for the rest.
    """
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.requires_grad_(False)
    cut: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.rows is None:
            named[piece.name].requires_grad_(True)
        else:
            cut.setdefault(piece.name, []).append(piece)
    active = [ActiveRows(model, named[name], parts) for name, parts in cut.items()]
    rows = {p.key: q for item in active for p, q in zip(item.pieces, item.parameters, strict=True)}
    return [named[p.name] if p.rows is None else rows[p.key] for p in pieces], active
