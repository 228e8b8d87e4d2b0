"""DeepSpeed's settings that sharded experts depend on, and its one wrong gradient norm put right."""

from __future__ import annotations

import torch
import torch.distributed as dist


def check_engine(engine) -> None:
    """Refuse settings that sharded experts do not work with; set the clipping of ZeRO stage 0 right.

    Without ZeRO, DeepSpeed (0.19) averages the norm over ranks instead of adding the squares of the experts'
    parts, and clips by that.

    Raises:
        ValueError: ZeRO stage 3, or clipping at stage 0 in 16 bits.
    """
    if engine is None or not hasattr(engine, "zero_optimization_stage"):
        return
    stage = engine.zero_optimization_stage()
    if stage > 2:
        raise ValueError(
            f"zero_optimization.stage is {stage}: it partitions parameters that sharded experts have partitioned "
            "already, and DeepSpeed refuses expert layers there: use stage 1 or 2"
        )
    if stage == 0 and engine.gradient_clipping() > 0:
        if engine.bfloat16_enabled() or engine.fp16_enabled():
            raise ValueError(
                f"gradient_clipping is {engine.gradient_clipping():g} with 16-bit weights and "
                "zero_optimization.stage 0: DeepSpeed leaves experts out of the norm there: use stage 1 or 2"
            )
        engine.clip_fp32_gradients = lambda: _clip(engine)


def global_norm(parameters) -> torch.Tensor:
    """The 2-norm of the gradients of all parameters, experts on all ranks included; a collective call, fp32."""
    squares = None
    for parameter in parameters:
        if parameter.grad is not None:
            if squares is None:
                squares = torch.zeros(2, device=parameter.device)
            squares[int(not getattr(parameter, "allreduce", True))] += parameter.grad.float().square().sum()
    shared, experts = squares[:1], squares[1:]
    dist.all_reduce(experts)
    return (shared + experts).sqrt().squeeze(0)


def _clip(engine) -> None:
    parameters = list(engine.module.parameters())
    norm = global_norm(parameters)
    scale = (engine.gradient_clipping() / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)
    engine._global_grad_norm = norm.item()
