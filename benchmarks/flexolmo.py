"""The recipe of FlexOlmo (arXiv 2507.07024) for benchmarks/disco.py: each new expert learns beside a public one.

A model of two experts, both active: the public expert and everything shared are frozen; the new expert and its row
of every router are trained on the rows of one cluster. The experts of all clusters and the public one then become
one model, their router rows put together without training. Rows begin drawn: theirs come from a text embedder.

Shapes: E experts, H hidden.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from disco.config import Optimizer
from disco.engine import load_model
from disco.family import expert_parameters, moe_blocks, router_parameters, set_trainable, with_experts
from disco.loss import CausalLoss
from disco.packing import Rows
from disco.trainer import learning_rate
from launch.flops import training_flops


def resized(model: torch.nn.Module, experts: int, top_k: int) -> torch.nn.Module:
    """`model`, all of whose experts are alike, with another number of them; router rows are drawn."""
    config = with_experts(model.config, experts, top_k, renormalize=True)
    new = AutoModelForCausalLM.from_config(config, dtype=model.dtype, experts_implementation="grouped_mm")
    old = model.state_dict()
    alike = {name for name, value in new.state_dict().items() if value.shape == old[name].shape}
    new.load_state_dict({name: old[name] for name in alike}, strict=False)
    with torch.no_grad():
        theirs = [p for block in moe_blocks(model) for p in block.experts.parameters()]
        for ours_E, theirs_E in zip(expert_parameters(new), theirs, strict=True):
            ours_E.copy_(theirs_E[:1].expand_as(ours_E))
        for block in moe_blocks(new):
            block.router.weight.normal_(0, config.initializer_range)
    return new


def train_beside(model: torch.nn.Module, rows: Rows, section: Optimizer) -> dict[str, float]:
    """Train expert 1 and its router rows; returns FLOPs and seconds."""
    set_trainable(model, "router")
    frozen = training_flops(model.config, rows.sequence_length, trainable="router")
    trained = [*router_parameters(model), *expert_parameters(model)]
    for parameter_E in trained:
        parameter_E.requires_grad_(True)
        parameter_E.register_hook(lambda grad_E: grad_E.index_fill(0, torch.tensor([0]), 0.0))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    both = training_flops(model.config, rows.sequence_length, trainable=names)
    loss = CausalLoss(model)
    optimizer = torch.optim.AdamW(trained, betas=section.betas, weight_decay=0.0)  # would pull the frozen rows too
    steps = -(-len(rows) // section.batch_size)
    started = time.perf_counter()
    for step in range(steps):
        part = np.arange(step * section.batch_size, min(len(rows), (step + 1) * section.batch_size))
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, section)
        loss(**rows.batch(part), tokens=int(rows.labels()[part].sum())).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, section.clip)
        optimizer.step()
        optimizer.zero_grad()
    # Half of the experts' weight gradients are of the frozen one, which a real implementation leaves out.
    return {"flops": len(rows) * (frozen + both) / 2, "seconds": time.perf_counter() - started}


def flexolmo(
    public: Path, rows: list[Rows], section: Optimizer, dtype: str, seed: int
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model that becomes of the one in folder `public`, an expert for each of `rows` after the
    public one; and FLOPs, seconds and the bytes of state of one training."""
    torch.manual_seed(seed)
    source = load_model(public, dtype, "grouped_mm")
    merged = resized(source, len(rows) + 1, 2)
    used = {"flops": 0.0, "seconds": 0.0}
    for index, own in enumerate(rows):
        pair = resized(source, 2, 2)
        for name, value in train_beside(pair, own, section).items():
            used[name] += value
        with torch.no_grad():
            for of in (expert_parameters, router_parameters):
                for whole_E, pair_E in zip(of(merged), of(pair), strict=True):
                    whole_E[0] = pair_E[0] if of is expert_parameters else 0.0
                    whole_E[index + 1] = pair_E[1] - (0.0 if of is expert_parameters else pair_E[0])
    parameters = sum(p.numel() for p in pair.parameters())
    half = sum(p.numel() for p in (*expert_parameters(pair), *router_parameters(pair))) // 2
    return merged, used | {"state_bytes": 4 * (parameters + 3 * half)}
