"""Stateless updates of the layers above the active block (the idea of BREAD).

Backward passes through these layers anyway; one matrix product more a weight gives its gradient, which is
used and freed at once, so there is never more than one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bcd.config import Config
from bcd.plain import PlainBackend


class Expansion:
    """Moves parameters by ``lr * lr_ratio`` along their gradient scaled to unit root mean square."""

    def __init__(self, backend, config: Config):
        if not isinstance(backend, PlainBackend):
            raise ValueError("expansion works without DeepSpeed: drop ds_config, or expansion")
        self.ratio, self.seed = config.expansion.lr_ratio, config.seed
        self.parameters: list[nn.Parameter] = []
        self._handles: list = []
        self._rate = 0.0
        self.device = next(backend.module.parameters()).device

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update `parameters` from now on, and no others."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.parameters = list(parameters)

    def enable(self, boundary: bool, rate: float, step: int) -> None:
        """Before a forward pass: gradients are made at accumulation boundaries only. `step` seeds the
        rounding, so that a resumed run rounds alike."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for parameter in self.parameters:
            parameter.requires_grad_(boundary)
        if not boundary:
            return
        self._rate = rate * self.ratio
        self._generator = torch.Generator(self.device).manual_seed(1_000_003 * self.seed + step)
        for parameter in self.parameters:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._update))

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        rms = torch.linalg.vector_norm(gradient, dtype=torch.float32) / gradient.numel() ** 0.5
        if not (torch.isfinite(rms) and rms > 0):
            return
        if parameter.dtype == torch.float32:
            parameter.sub_(gradient * (self._rate / rms))
            return
        # Rounded to the nearest, small steps of bf16 weights would all be lost.
        exact = parameter.float() - gradient.float() * (self._rate / rms)
        parameter.copy_(_round_at_random(exact, self._generator))


def _round_at_random(exact: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 to bf16, up or down with the probability that keeps the mean."""
    noise = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32, device=exact.device, generator=generator)
    bits = (exact.view(torch.int32) + noise) & -(1 << 16)
    return bits.view(torch.float32).to(torch.bfloat16)
