"""What tests of sharded experts share: layouts at random, references, and the comparison with Hugging Face.

Shapes: L layers, E experts, N ranks, C slots, S values a slice.
"""

import logging

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fsep
from fsep.families import family_of
from fsep.layout import Layout
from tests.disco.tiny_models import tiny_model

EXPERTS, SLOTS, LENGTH, VOCABULARY = 5, 5, 6, 61


class RandomLayouts:
    """Other layouts at every micro-batch, the same on all ranks; some devices may hold nothing."""

    def __init__(self, layers, experts, ranks, slots, seed=0):
        self._draw = np.random.default_rng(seed)
        self._sizes = layers, experts, ranks, slots
        self.observed = []
        self._next()

    def observe(self, load):
        self.observed.append(load)
        self._next()

    def _next(self):
        layers, experts, ranks, slots = self._sizes
        self.layouts = [random_layout(self._draw, experts, ranks, slots) for _ in range(layers)]


def random_layout(draw, experts, ranks, slots, full=False):
    while True:
        replicas_EN = np.zeros((experts, ranks), np.uint8)
        for device in range(ranks):
            held = slots if full else draw.integers(0, slots + 1)
            replicas_EN[draw.permutation(experts)[:held], device] = 1
        if replicas_EN.any(1).all():
            return Layout(replicas_EN, slots)


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def slice_of(gate_up_E2FH, down_EHF, shape):
    """This rank's part, written out the slow way: flatten, pad, cut."""
    rank, ranks = rank_and_size()
    flat = torch.cat([gate_up_E2FH.flatten(1), down_EHF.flatten(1)], 1)
    flat = F.pad(flat, (0, shape[1] * ranks - flat.shape[1]))
    return flat[:, rank * shape[1] : (rank + 1) * shape[1]]


def expected(name, reference, shape, of=lambda parameter: parameter.data):
    """The tensor of a dense model that corresponds to the parameter ``name`` of the sharded one."""
    named = dict(reference.named_parameters())
    if not name.endswith(".shard"):
        return of(named[name])
    base = name.removesuffix("shard")
    return slice_of(of(named[base + "gate_up_proj"]), of(named[base + "down_proj"]), shape)


def difference(found, wanted):
    """The largest difference, relative to the largest value."""
    return ((found.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-30)).item()


def sequences(step, ranks, rows=3):
    """All ranks' sequences of a step, and where each rank's begin: uneven counts."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (rows * ranks, LENGTH), generator=generator)
    counts = [rows + (2 if rank == step % ranks else 0) for rank in range(ranks)]
    counts[(step + 1) % ranks] += rows * ranks - sum(counts)
    return ids, np.concatenate([[0], np.cumsum(counts)])


def loss_of(model, ids, tokens):
    """Cross-entropy summed over ``ids``, over ``tokens``."""
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum") / tokens


def attached(family, planner=None, dtype=torch.float32, experts=EXPERTS, **settings):
    model = tiny_model(family, experts=experts, dtype=dtype).train()
    layers = len(family_of(model).blocks(model))
    planner = planner or RandomLayouts(layers, experts, dist.get_world_size(), SLOTS)
    return fsep.attach(model, slots=SLOTS, planner=planner, **settings)


def start_engine(model, stage, *, dtype="fp32", accumulation=1, clip=0.0, lr=1e-2, micro_batch=3):
    """A DeepSpeed engine as a script makes one, without compiling anything."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": lr, "weight_decay": 0.1}},
            "steps_per_print": 2**31,
        },
    )
    return engine


def train(engine, steps, first=0):
    """Losses [steps] of the global batches, of which each rank computes its own, uneven part."""
    rank, ranks = rank_and_size()
    losses = []
    for step in range(first, first + steps):
        total = torch.zeros(())
        for micro in range(engine.gradient_accumulation_steps()):
            ids, begin = sequences(100 * step + micro, ranks)
            mine = ids[begin[rank] : begin[rank + 1]]
            # DeepSpeed averages over ranks and micro-batches; the loss is a share of the batch's mean.
            loss = loss_of(engine, mine, ids[:, 1:].numel() / ranks)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / ranks / engine.gradient_accumulation_steps()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


class Dense:
    """The Hugging Face model in one process on the whole batch, with PyTorch's AdamW."""

    def __init__(self, family, *, accumulation=1, clip=0.0, lr=1e-2):
        self.model = tiny_model(family, experts=EXPERTS).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.1)
        self.accumulation, self.clip = accumulation, clip
        self.norm = None

    def train(self, steps, first=0):
        losses = []
        for step in range(first, first + steps):
            losses.append(0.0)
            for micro in range(self.accumulation):
                ids, _ = sequences(100 * step + micro, dist.get_world_size())
                loss = loss_of(self.model, ids, ids[:, 1:].numel()) / self.accumulation
                loss.backward()
                losses[-1] += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or float("inf"))
            self.norm = norm.item()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses


def compare_training(family, steps, stage, *, dtype="fp32", accumulation=1, clip=0.0, checkpointing=False, **more):
    """How far ten steps under DeepSpeed are from the dense model's: losses, norm, every weight."""
    model = attached(family, **more)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = start_engine(model, stage, dtype=dtype, accumulation=accumulation, clip=clip)
    dense = Dense(family, accumulation=accumulation, clip=clip)
    losses, wanted = train(engine, steps), dense.train(steps)
    weights = max(
        difference(parameter, expected(name, dense.model, parameter.shape))
        for name, parameter in engine.module.named_parameters()
    )
    norm = engine.get_global_grad_norm()
    return {
        "loss": float(np.abs(np.subtract(losses, wanted) / wanted).max()),
        "norm": abs(float(norm) - dense.norm) / dense.norm if clip else 0.0,
        "weights": weights,
    }


def compare_gradients(family, steps=2, checkpointing=False, **settings):
    """The largest differences of logits, losses and gradients from the dense model, over several micro-batches."""
    rank, ranks = rank_and_size()
    model, dense = attached(family, **settings), tiny_model(family, experts=EXPERTS).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    worst = {"logits": 0.0, "loss": 0.0, "gradients": 0.0}
    for step in range(steps):
        ids, begin = sequences(step, ranks)
        mine = ids[begin[rank] : begin[rank + 1]]
        model.zero_grad()
        dense.zero_grad()
        logits = model(input_ids=mine).logits
        worst["logits"] = max(
            worst["logits"], difference(logits, dense(input_ids=ids).logits[begin[rank] : begin[rank + 1]])
        )
        loss, wanted = loss_of(model, mine, 1), loss_of(dense, ids, 1)
        loss.backward()
        wanted.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        worst["loss"] = max(worst["loss"], difference(total, wanted.detach()))
        for name, parameter in model.named_parameters():
            gradient = parameter.grad.clone()
            if not name.endswith(".shard"):
                dist.all_reduce(gradient)
            want = expected(name, dense, parameter.shape, of=lambda parameter: parameter.grad)
            worst["gradients"] = max(worst["gradients"], difference(gradient, want))
    return worst
