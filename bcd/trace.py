"""Bytes that forward and backward keep alive, counted by running them without data.

The model is built and run under `FakeTensorMode`: every operation propagates shapes only, so a 7 B model's
step takes a second and no memory, and what autograd saves is exactly what a real step saves.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bcd.blocks import Piece
from bcd.rows import select

# Under fake tensors transformers takes a batch for padded or packed and builds a mask, which a real step of
# whole sequences does without. An attention that it knows no mask for gets none.
AttentionInterface.register("causal_without_mask", sdpa_attention_forward)


@dataclass(frozen=True)
class Peak:
    """Bytes alive at the peak of forward and backward, beyond weights and optimizer state."""

    total: int
    without_gradients: int  # the peak of everything but parameter gradients
    saved: int  # alive between forward and backward, without logits
    logits: int  # most of the tensors with the vocabulary as last dimension: logits, fp32 copy, gradient


class AllocationTracker(TorchDispatchMode):
    """Counts the storages that operations allocate and that are still alive. Works on real tensors too."""

    def __init__(self, vocabulary: int = 0, tokens: int = 0):
        super().__init__()
        self.vocabulary, self.tokens = vocabulary, tokens
        self.alive: dict[int, tuple[int, bool]] = {}
        self.total = self.logits = self.gradients = self.most_logits = 0
        self.peak = self.peak_without_gradients = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _counted(leaf)}
        out = _run(func, args, kwargs or {})
        for leaf in tree_leaves(out):
            if _counted(leaf):
                self._add(leaf, known)
        return out

    def _add(self, tensor: torch.Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive or key in known:
            return
        is_logits = bool(self.vocabulary) and tensor.shape[-1:] == (self.vocabulary,)
        is_logits = is_logits and tensor.numel() >= self.vocabulary * self.tokens // 2
        self.alive[key] = (storage.nbytes(), is_logits)
        self.total += storage.nbytes()
        self.logits += storage.nbytes() * is_logits
        weakref.finalize(storage, self._remove, key).atexit = False
        self.most_logits = max(self.most_logits, self.logits)
        self.peak = max(self.peak, self.total)
        self.peak_without_gradients = max(self.peak_without_gradients, self.total - self.gradients)

    def _remove(self, key: int) -> None:
        size, is_logits = self.alive.pop(key)
        self.total -= size
        self.logits -= size * is_logits


def _run(func, args, kwargs):
    if func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
        # The shape rule of this operation knows bf16 alone; the kernels take every type.
        dtype = args[0].dtype
        return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **{**kwargs, "out_dtype": None}).to(dtype)
    return func(*args, **kwargs)


def fake_model(config: PretrainedConfig, dtype: torch.dtype) -> tuple[nn.Module, FakeTensorMode]:
    """Model of `config` without data, and the mode to run it under."""
    fake = FakeTensorMode()
    with fake:
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="causal_without_mask"
        ).train(), fake


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """A copy of `config` with only the first `layers` decoder layers."""
    changed = copy.deepcopy(config)
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:  # layer_types and the like
            setattr(changed, key, value[:layers])
    changed.num_hidden_layers = layers
    return changed


def own_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Hugging Face's cross-entropy, all logits at once."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _counted(leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided


def peak(
    model: nn.Module,
    fake: FakeTensorMode,
    pieces: Sequence[Piece],
    *,
    micro_batch: int,
    sequence: int,
    accumulation: int = 1,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    freed: Sequence[str] = (),
) -> Peak:
    """Peak of a training step of `model` (built under `fake`) in which `pieces` are trainable and the gradients
    of the parameters named in `freed` are used up as soon as they are made.

    `loss(model, tokens)`, tokens [micro_batch, sequence], is the loss that is differentiated; None for the
    model's own.
    """
    loss = loss or own_loss
    config = model.config.get_text_config()
    parameters, rows = select(model, pieces)
    for item in rows:
        item.attach()
    tracker = AllocationTracker(config.vocab_size, micro_batch * sequence)

    def count_gradient(parameter):
        if id(parameter) not in counted:
            counted.add(id(parameter))
            tracker.gradients += parameter.grad.untyped_storage().nbytes()

    def use_up(parameter):
        gradient, parameter.grad = parameter.grad, None
        if parameter.dtype != torch.float32:  # what `bcd.expansion` needs at once: gradient, weight and noise
            _ = [torch.empty(gradient.shape) for _ in range(3)]

    counted: set[int] = set()
    handles = [p.register_post_accumulate_grad_hook(count_gradient) for p in parameters]
    for name in freed:
        parameter = model.get_parameter(name).requires_grad_(True)
        handles.append(parameter.register_post_accumulate_grad_hook(use_up))
    try:
        with fake, tracker:
            saved = 0
            for _ in range(min(accumulation, 2)):  # later micro-batches are like the second
                tokens = torch.zeros(micro_batch, sequence, dtype=torch.long)
                value = loss(model, tokens)
                saved = max(saved, tracker.total - tracker.gradients - tracker.logits)
                value.backward()
                del value, tokens
        return Peak(tracker.peak, tracker.peak_without_gradients, saved, tracker.most_logits)
    finally:
        for handle in handles:
            handle.remove()
        for item in rows:
            item.detach()
        for parameter in model.parameters():
            parameter.grad = None
