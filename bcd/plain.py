"""Back end of the engine without DeepSpeed: one device, fp32, or bf16 with fp32 master weights."""

from __future__ import annotations

import torch
from torch import nn

from bcd.config import Config
from bcd.groups import Group, GroupState, adamw, read_state, write_state
from bcd.rows import ActiveRows, select

UPDATE_CHUNK = 1 << 26  # elements whose fp32 gradients exist at once in a mixed-precision update
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PlainBackend:
    """AdamW on the active pieces of `module`."""

    rank, world_size, stage, kind, half = 0, 1, 0, "plain", False

    def __init__(self, model: nn.Module, config: Config):
        self.module, self.config = model, config
        if config.dtype is not None:
            # Not the buffers: rotary frequencies in bf16 would blur positions.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(DTYPES[config.dtype])
        self.accumulation = config.gradient_accumulation_steps
        self.rows: list[ActiveRows] = []
        self.optimizer: torch.optim.Optimizer | None = None

    def activate(self, groups: list[Group], saved: dict[str, GroupState]) -> None:
        """Make `groups` trainable, with their saved state where there is one."""
        self.groups = groups
        pieces = [piece for group in groups for piece in group.pieces]
        self.parameters, self.rows = select(self.module, pieces)
        for item in self.rows:
            item.attach()
        with torch.no_grad():
            masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        found = iter(masters)
        self.masters = [[next(found) for _ in group.pieces] for group in groups]
        self.optimizer = adamw(groups, self.masters, self.config)
        for group, tensors in zip(groups, self.masters, strict=True):
            if group.name in saved:
                write_state(tensors, self.optimizer, saved[group.name])

    def read(self, *, moments: bool) -> dict[str, GroupState]:
        """State of the active groups, in host memory."""
        state, parameters = {}, iter(self.parameters)
        for group, masters in zip(self.groups, self.masters, strict=True):
            state[group.name] = [
                read_state([master], self.optimizer, next(parameters).dtype, moments=moments)[0]
                for master in masters
            ]
        return state

    def deactivate(self) -> None:
        """Let go of everything that belongs to the active groups but their weights."""
        for item in self.rows:
            item.detach()
        for parameter in self.parameters:
            parameter.grad = None
        self.optimizer, self.rows, self.parameters, self.masters = None, [], [], []

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        loss = loss / self.accumulation if self.accumulation > 1 else loss
        loss.backward()
        return loss

    def step(self, rate: float, boundary: bool) -> tuple[bool, float | None]:
        """Update at a boundary; (whether it was applied, norm of the gradients before clipping)."""
        if not boundary:
            return False, None
        pairs = [
            (parameter, master)
            for parameter, master in zip(self.parameters, sum(self.masters, []), strict=True)
            if parameter.grad is not None
        ]
        norm = _total_norm([parameter.grad for parameter, _ in pairs])
        if not torch.isfinite(norm):
            for parameter, _ in pairs:
                parameter.grad = None
            return False, float(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # The arithmetic of torch.nn.utils.clip_grad_norm_.
        clip = self.config.gradient_clipping
        scale = torch.clamp(clip / (norm + 1e-6), max=1.0) if clip else None
        self._update(pairs, scale)
        return True, float(norm)

    def _update(self, pairs: list[tuple[nn.Parameter, torch.Tensor]], scale: torch.Tensor | None) -> None:
        gradients = [parameter.grad for parameter, _ in pairs]
        for parameter, _ in pairs:
            parameter.grad = None
        start, size = 0, 0
        for end, (parameter, _) in enumerate(pairs, 1):
            size += parameter.numel() if parameter.dtype != torch.float32 else 0
            if size < UPDATE_CHUNK and end < len(pairs):
                continue
            # A step of torch's optimizer passes over parameters without a gradient.
            for i in range(start, end):
                master = pairs[i][1]
                master.grad = gradients[i].to(master.dtype)
                gradients[i] = None
                if scale is not None:
                    master.grad.mul_(scale)
            self.optimizer.step()
            for parameter, master in pairs[start:end]:
                master.grad = None
                if master is not parameter:
                    parameter.detach().copy_(master)
            start, size = end, 0

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights and buffers of the model."""
        return self.module.state_dict()

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.module.load_state_dict(weights)

    def full_weights(self) -> dict[str, torch.Tensor]:
        """All weights and buffers, on rank 0."""
        return self.module.state_dict()

    def barrier(self) -> None:
        """One process has nobody to wait for."""


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))
