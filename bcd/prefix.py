"""Cache of the frozen prefix's output, for micro-batches that come back while the same block is active.

All that lies below the lowest active parameter gives the same output for the same input until the next
switch. A cached step skips those layers: each passes its input on, and the last returns the stored output.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bcd.blocks import Partition
from bcd.config import PrefixCache as Settings


class PrefixCache:
    """Outputs of the last frozen layer by the content of the model's inputs. Nothing is evicted: once
    `max_gb` is used up, further micro-batches are computed anew."""

    def __init__(self, model: nn.Module, partition: Partition, settings: Settings):
        if not partition.layers:
            raise ValueError("prefix_cache needs a model with decoder layers")
        dropout = [name for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
        if dropout or getattr(model.config, "attention_dropout", 0.0):
            raise ValueError("prefix_cache needs a prefix without dropout: set the model's dropout to 0")
        if getattr(model.config, "output_router_logits", False):
            raise ValueError("prefix_cache skips the prefix's routers: set output_router_logits=False")
        self.layers = model.get_submodule(partition.layers)
        self.limit = int(settings.max_gb * 1e9)
        self.folder = None if settings.directory is None else Path(settings.directory)
        self.skip = 0  # layers below the lowest active parameter
        self.entries: dict[str, torch.Tensor | Path] = {}
        self.bytes = self.hits = self.misses = 0

    def reset(self, depth: int) -> None:
        """Forget everything; `depth` is that of the lowest active parameter."""
        for entry in self.entries.values():
            if isinstance(entry, Path):
                entry.unlink()
        self.entries.clear()
        self.bytes = 0
        self.skip = max(0, depth - 1)

    def forward(self, call: Callable, args: tuple, kwargs: dict):
        """``call(*args, **kwargs)``, from the cache as far as it reaches."""
        if self.skip == 0:
            return call(*args, **kwargs)
        key = _key(args, kwargs)
        prefix = self.layers[: self.skip]
        if key in self.entries:
            self.hits += 1
            entry = self.entries[key]
            stored = torch.load(entry) if isinstance(entry, Path) else entry
            stored = stored.to(next(prefix.parameters()).device, non_blocking=True)
            for layer in prefix:
                layer.forward = lambda hidden, *_, **__: hidden
            prefix[-1].forward = lambda *_, **__: stored
            try:
                return call(*args, **kwargs)
            finally:
                for layer in prefix:
                    del layer.forward
        self.misses += 1
        handle = prefix[-1].register_forward_hook(lambda module, inputs, output: self._store(key, output))
        try:
            return call(*args, **kwargs)
        finally:
            handle.remove()

    def _store(self, key: str, output) -> None:
        if not torch.is_tensor(output):
            raise ValueError(f"prefix_cache needs decoder layers that return a tensor, not {type(output).__name__}")
        if self.bytes + output.nbytes > self.limit:
            return
        self.bytes += output.nbytes
        value = output.detach().to("cpu", copy=True)
        if self.folder is None:
            self.entries[key] = value.pin_memory() if output.is_cuda else value
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = Path(tempfile.mkstemp(dir=self.folder, suffix=".pt")[1])
            torch.save(value, path)
            self.entries[key] = path


def _key(args: tuple, kwargs: dict) -> str:
    digest = hashlib.sha256()
    for name, value in [*enumerate(args), *sorted(kwargs.items())]:
        if name == "labels" or not torch.is_tensor(value):
            continue
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
