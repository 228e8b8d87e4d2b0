"""How many bytes training takes a device, before it is started.

State (weights, gradients, master weights, moments) is in closed form and exact; activations and logits are
counted by `bcd.trace`. Sizes are bytes, GB is 1e9 bytes. A card's nominal 24 GB is a little more in bytes;
the difference is left to the driver and to fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from bcd.blocks import Piece, decoder_layers, depths, partition
from bcd.config import Config, read
from bcd.expansion import divide, statistics
from bcd.groups import make_groups
from bcd.plain import UPDATE_CHUNK
from bcd.schedule import BlockSchedule
from bcd.trace import Peak, fake_model, peak, with_layers

GPU_GB = {
    "t4": 16, "v100": 32, "rtx3090": 24, "rtx4090": 24, "rtx5090": 32, "a10": 24, "l4": 24, "a6000": 48,
    "l40s": 48, "a100-40": 40, "a100": 80, "h100": 80, "h200": 141, "b200": 180,
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEP_BYTES = 4  # torch's AdamW counts steps in an fp32 tensor a parameter
PERSISTENT = 100_000  # DeepSpeed's param_persistence_threshold: smaller parameters stay whole under ZeRO-3


@dataclass(frozen=True)
class Estimate:
    """Bytes a device at the worst moment of a cycle; `host` bytes of CPU memory a device.

    `total` is the peak; it can be less than the sum of the parts, since not all gradients exist yet when
    the logits do.
    """

    method: str
    devices: int
    micro_batch: int
    sequence: int
    block: str  # the block with the highest peak
    parameters: int
    gradients: int
    optimizer: int  # master weights and moments
    activations: int
    logits: int
    buffers: int  # communication buckets, gathered weights, temporaries of the update
    total: int
    host: int

    def fits(self, gb: float) -> bool:
        """True if the peak is at most `gb` * 1e9 bytes."""
        return self.total <= gb * 1e9


def gpu_gb(name: str) -> float:
    """GB of a card by name (``rtx4090``) or by number (``24``); ValueError for a name not in `GPU_GB`."""
    try:
        size = float(name)
    except ValueError:
        if name.lower() not in GPU_GB:
            raise ValueError(f"gpu is {name!r}: use one of {', '.join(GPU_GB)}, or its memory in GB") from None
        return float(GPU_GB[name.lower()])
    if not 0 < size < math.inf:
        raise ValueError(f"gpu memory is {name} GB: it must be positive")
    return size


# Shapes by the names that papers use, so that a plan needs no download.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2-7b": ("llama", dict(vocab_size=32000)),
    "llama-3-8b": (
        "llama",
        dict(vocab_size=128256, intermediate_size=14336, num_key_value_heads=8),
    ),
    "qwen1.5-moe-a2.7b": (
        "qwen2_moe",
        dict(
            vocab_size=151936, hidden_size=2048, num_hidden_layers=24, num_attention_heads=16,
            num_key_value_heads=16, intermediate_size=5632, moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4,
        ),
    ),
}  # fmt: skip


def shape(model: str) -> PretrainedConfig:
    """Config of a model by a folder that holds config.json or by a name in `SHAPES`; ValueError otherwise."""
    if model in SHAPES:
        kind, values = SHAPES[model]
        return AutoConfig.for_model(kind, **values)
    if not (Path(model) / "config.json").is_file():
        raise ValueError(f"model {model!r} is no folder with a config.json; shapes by name: {', '.join(SHAPES)}")
    return AutoConfig.from_pretrained(model)


def memory(
    model: nn.Module | PretrainedConfig,
    *,
    method: str = "bcd",
    config: Config | Mapping[str, Any] | None = None,
    dtype: str = "bf16",
    devices: int = 1,
    zero_stage: int | None = None,
    offload: bool = False,
    micro_batch: int = 1,
    sequence: int = 1024,
    reduce_bucket: int = 50_000_000,
    fused: bool = True,
) -> Estimate:
    """Predict the bytes of a training step.

    Parameters
    ----------
    model
        A Hugging Face causal language model or its config; no weights are read or made.
    method
        ``"bcd"``, with `config` as in `bcd.initialize`, or ``"adamw"`` for training everything.
    zero_stage
        0 to 3 for DeepSpeed, None for plain PyTorch on one device.
    offload
        Optimizer state in host memory (ZeRO 1 to 3).
    reduce_bucket
        DeepSpeed's ``reduce_bucket_size`` in elements; its default of 5e8 costs 1 GB in bf16.
    fused
        AdamW without temporaries, as on GPUs; False for torch's loop over tensors, as on CPU.
    """
    return Predictor(model, dtype, sequence).estimate(
        method,
        read(config),
        devices=devices,
        zero_stage=zero_stage,
        offload=offload,
        micro_batch=micro_batch,
        reduce_bucket=reduce_bucket,
        fused=fused,
    )


def plan(
    model: nn.Module | PretrainedConfig,
    gb: float,
    *,
    dtype: str = "bf16",
    sequence: int = 1024,
    devices: Sequence[int] = (1, 2, 4, 8),
    config: Config | Mapping[str, Any] | None = None,
) -> list[tuple[Estimate, bool]]:
    """Ways to train `model` on cards of `gb` GB: for each the estimate on the fewest `devices` that suffice
    at its largest micro-batch and True, or on the most of `devices` at micro-batch 1 and False.

    AdamW plain and under ZeRO 1 to 3 with and without offload; BCD plain and under ZeRO-3 by layer, by
    module, and by layer with blocks cut to a third of the card.
    """
    predictor, base = Predictor(model, dtype, sequence), read(config)
    bcd = [base.model_copy(update={"granularity": granularity}) for granularity in ("layer", "module")]
    bcd.append(base.model_copy(update={"granularity": "layer", "max_block_gb": gb / 12}))
    ways: list[tuple[str, Config, int | None, bool]] = [("adamw", base, None, False)]
    ways += [("adamw", base, stage, offload) for stage in (1, 2, 3) for offload in (False, True)]
    ways += [("bcd", way, stage, False) for way in bcd for stage in (None, 3)]
    rows = []
    for method, way, stage, offload in ways:
        counts = (1,) if stage is None else [n for n in devices if n > 1 or method == "adamw"]
        if not counts:
            continue

        def at(count: int, micro_batch: int, m=method, w=way, s=stage, o=offload) -> Estimate:
            return predictor.estimate(m, w, devices=count, zero_stage=s, offload=o, micro_batch=micro_batch)

        fitting = next((n for n in counts if at(n, 1).fits(gb)), None)
        if fitting is None:
            rows.append((at(counts[-1], 1), False))
        else:
            rows.append((_largest(lambda size, n=fitting: at(n, size), gb), True))
    return rows


def _largest(at, gb: float) -> Estimate:
    """The estimate at the largest micro-batch that fits; micro-batch 1 is known to."""
    low = at(1)
    size = 1 + int((gb * 1e9 - low.parameters - low.optimizer) // max(1, low.activations))
    high = at(max(2, size))
    while high.fits(gb):
        low, high = high, at(2 * high.micro_batch)
    while high.micro_batch - low.micro_batch > 1:  # regula falsi: the total is piecewise linear
        share = (gb * 1e9 - low.total) / (high.total - low.total)
        size = low.micro_batch + int(share * (high.micro_batch - low.micro_batch))
        middle = at(min(max(size, low.micro_batch + 1), high.micro_batch - 1))
        low, high = (middle, high) if middle.fits(gb) else (low, middle)
    return low


def state_bytes(
    groups: Sequence[Sequence[int]], *, dtype: str, devices: int = 1, zero_stage: int | None = None
) -> tuple[int, int]:
    """(gradient bytes, optimizer bytes) a device for optimizer groups given as element counts of pieces.

    Optimizer bytes are master weights, where the back end keeps them, both moments and step counters.
    """
    item = DTYPES[dtype].itemsize
    flat = [n for group in groups for n in group]
    if zero_stage in (None, 0):
        master = 4 if dtype != "fp32" else 0
        return item * sum(flat), (8 + master) * sum(flat) + STEP_BYTES * len(flat)
    if zero_stage == 3:
        own = sum(math.ceil(n / devices) for n in flat)
        return item * own, 12 * own + STEP_BYTES * len(groups)
    # ZeRO 1 and 2 flatten each group and pad it so that every share is a multiple of two elements.
    own = sum(math.ceil(sum(group) / (2 * devices)) * 2 for group in groups)
    return item * (sum(flat) if zero_stage == 1 else own), 12 * own + STEP_BYTES * len(groups)


class Predictor:
    """Estimates for one model, dtype and sequence length; traces are shared among them.

    `loss(model, tokens)` stands for what the training script computes its loss by, Hugging Face's own if None.
    With `depths` a deeper model's activations are not traced: those of models of that many layers are, and go on
    growing evenly; much faster, and a percent off.
    """

    def __init__(
        self,
        model: nn.Module | PretrainedConfig,
        dtype: str,
        sequence: int,
        loss: Callable | None = None,
        depths: tuple[int, int] | None = None,
    ):
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: use one of {', '.join(DTYPES)}")
        if sequence < 2:
            raise ValueError(f"sequence is {sequence}: at least 2 tokens are needed for a loss")
        hf_config = model if isinstance(model, PretrainedConfig) else model.config
        self.model, self.fake = fake_model(hf_config, DTYPES[dtype])
        if isinstance(model, nn.Module):
            for name, parameter in model.named_parameters():
                self.model.get_parameter(name).requires_grad_(parameter.requires_grad)
        self.frozen = {name for name, p in self.model.named_parameters() if not p.requires_grad}
        self.dtype, self.sequence, self.loss = dtype, sequence, loss
        self.peak = cache(self._peak)
        self.shallow: list[Predictor] = []
        if depths and hf_config.num_hidden_layers > max(depths):
            self.peak = cache(self._extrapolated)
            self.shallow = [self._with_layers(depth) for depth in depths]

    def _with_layers(self, depth: int) -> Predictor:
        found = Predictor(with_layers(self.model.config, depth), self.dtype, self.sequence, self.loss)
        for name, parameter in found.model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        found.frozen = {name for name, p in found.model.named_parameters() if not p.requires_grad}
        return found

    def _extrapolated(
        self,
        pieces: tuple[Piece, ...],
        micro_batch: int,
        checkpointing: bool,
        accumulation: int,
        freed: tuple[str, ...] = (),
    ) -> Peak:
        """The peak where every layer more adds what it adds between the shallow models."""
        found = []
        for predictor in self.shallow:
            there = dict(predictor.model.named_parameters())
            kept = tuple(piece for piece in pieces if piece.name in there)
            if not kept:  # all of them lie deeper
                return self._peak(pieces, micro_batch, checkpointing, accumulation, freed)
            found.append(predictor.peak(kept, micro_batch, checkpointing, 1, tuple(n for n in freed if n in there)))
        low, high = (predictor.model.config.num_hidden_layers for predictor in self.shallow)
        beyond = (self.model.config.num_hidden_layers - low) / (high - low)
        total, without, saved, logits = (
            round(a + beyond * (b - a)) for a, b in zip(*map(astuple, found), strict=True)
        )
        if accumulation > 1:  # the gradients of the micro-batches before are there all along
            total = max(total, without + DTYPES[self.dtype].itemsize * sum(piece.numel for piece in pieces))
        return Peak(max(total, without), without, saved, logits)

    def _peak(
        self,
        pieces: tuple[Piece, ...],
        micro_batch: int,
        checkpointing: bool,
        accumulation: int,
        freed: tuple[str, ...] = (),
    ) -> Peak:
        if checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
            self.model.disable_input_require_grads()
        try:
            return peak(
                self.model,
                self.fake,
                pieces,
                micro_batch=micro_batch,
                sequence=self.sequence,
                accumulation=accumulation,
                loss=self.loss,
                freed=freed,
            )
        finally:
            if checkpointing:
                self.model.activation_checkpointing_disable()
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name not in self.frozen)

    def estimate(
        self,
        method: str,
        config: Config,
        *,
        devices: int = 1,
        zero_stage: int | None = None,
        offload: bool = False,
        micro_batch: int = 1,
        reduce_bucket: int = 50_000_000,
        fused: bool = True,
    ) -> Estimate:
        if method not in ("bcd", "adamw"):
            raise ValueError(f"method is {method!r}: use 'bcd' or 'adamw'")
        if zero_stage not in (None, 0, 1, 2, 3):
            raise ValueError(f"zero_stage is {zero_stage}: use 0 to 3, or None for plain PyTorch")
        if devices < 1 or (zero_stage is None and devices > 1):
            raise ValueError(f"devices is {devices}: at least 1, and 1 without DeepSpeed (set zero_stage)")
        if offload and not zero_stage:
            raise ValueError("offload needs zero_stage 1, 2 or 3")
        if micro_batch < 1:
            raise ValueError(f"micro_batch is {micro_batch}: it must be at least 1")
        worst = None
        sets = list(self._active_sets(method, config))
        shapes = {name: self.model.get_parameter(name).shape for *_, freed in sets for name in freed}
        means = STEP_BYTES * sum(1 + sum(map(math.prod, statistics(shape))) for shape in shapes.values())
        # With prefetch: moments, and the residual of low-precision weights, of the largest block that may be next.
        ahead = max(sum(piece.numel for group in groups for piece in group) for _, groups, _ in sets)
        ahead *= (12 if self.dtype != "fp32" else 8) * (config.prefetch and method == "bcd")
        ahead = -(-ahead // (devices if zero_stage else 1))
        for name, groups, freed in sets:
            found = self._one(
                name, groups, freed, config, devices, zero_stage, offload, micro_batch, reduce_bucket, fused
            )
            found = replace(
                found,
                optimizer=found.optimizer + means,
                buffers=found.buffers + ahead,
                total=found.total + means + ahead,
            )
            if worst is None or found.total > worst.total:
                worst = found
        label = _label(method, config, zero_stage, offload)
        return replace(worst, method=label)

    def _active_sets(
        self, method: str, config: Config
    ) -> Iterable[tuple[str, list[tuple[Piece, ...]], tuple[str, ...]]]:
        """The active sets that can be the worst, of those with equal sizes the one that reaches lowest: name,
        optimizer groups, and the parameters that the expansion updates."""
        if method == "adamw":
            named = self.model.named_parameters()
            yield "all", [tuple(Piece(name, tuple(p.shape)) for name, p in named if p.requires_grad)], ()
            return
        cut = partition(
            self.model,
            config.granularity,
            always_on=config.always_on,
            expert_groups=config.expert_groups,
            max_block_gb=config.max_block_gb,
            bytes_per_parameter=DTYPES[self.dtype].itemsize + 12 - 4 * (self.dtype == "fp32"),
        )
        count = min(config.active_blocks, len(cut.blocks))
        seen = set()
        largest = 0  # elements of the whole blocks so far
        # Random orders join any blocks; neighbours stand for them, which is exact for one active block.
        visited = range(0, len(cut.blocks), count)
        if config.order == "ends":
            order = BlockSchedule(len(cut.blocks), "ends", depths=[b.depth for b in cut.blocks]).current_order
            visited = sorted(set(order))
        trainable = [name for name, p in self.model.named_parameters() if p.requires_grad]
        depth = depths(self.model, cut.layers)
        for start in visited:
            blocks = cut.blocks[start : start + count]
            sizes = tuple(tuple(piece.shape for piece in block.pieces) for block in blocks)
            elements = sum(block.numel for block in blocks)
            indices = range(start, start + len(blocks))
            trained, freed = divide(cut, indices, depth, trainable, config)
            # What is no larger and reaches less far down takes less; blocks cut by rows form whole gradients.
            smaller = self.shallow and elements <= largest and all(p.rows is None for b in blocks for p in b.pieces)
            if sizes not in seen and not smaller:
                seen.add(sizes)
                largest = max(largest, elements)
                groups = make_groups(cut.always_on, trained, config)
                yield "+".join(block.name for block in blocks), [group.pieces for group in groups], tuple(freed)

    def _one(
        self, name, groups, freed, config, devices, stage, offload, micro_batch, reduce_bucket, fused
    ) -> Estimate:
        item = DTYPES[self.dtype].itemsize
        numels = [[piece.numel for piece in group] for group in groups]
        gradients, optimizer = state_bytes(numels, dtype=self.dtype, devices=devices, zero_stage=stage)
        pieces = tuple(piece for group in groups for piece in group)
        accumulation = min(config.gradient_accumulation_steps, 2)
        found = self.peak(pieces, micro_batch, config.activation_checkpointing, accumulation, freed)

        sizes = [p.numel() for p in self.model.parameters()]
        parameters = item * sum(sizes)
        buffers = 0
        if stage == 3:
            parameters = item * sum(n if n <= PERSISTENT else math.ceil(n / devices) for n in sizes)
            units = [*self.model.get_submodule(decoder_layers(self.model)).children()] or [self.model]
            widest = max(sum(p.numel() for p in unit.parameters()) for unit in units)
            buffers = item * 2 * max(widest, max(sizes))  # the weights in use and those fetched ahead
        if stage:
            buffers += item * min(reduce_bucket, sum(n for group in numels for n in group))
        if offload and stage >= 2:
            gradients = 0  # each goes to the host once it is reduced
        # Stages 2 and 3 let go of a gradient's other shares once it is reduced.
        forward_backward = found.without_gradients + gradients if stage in (2, 3) else found.total
        update = 0 if offload else _update_bytes(numels, self.dtype, stage, devices, fused)
        peak_bytes = max(forward_backward, gradients + update)
        return Estimate(
            method="",
            devices=devices,
            micro_batch=micro_batch,
            sequence=self.sequence,
            block=name,
            parameters=parameters,
            gradients=gradients + item * max((self.model.get_parameter(n).numel() for n in freed), default=0),
            optimizer=0 if offload else optimizer,
            activations=found.saved,
            logits=found.logits,
            buffers=buffers + update,
            total=parameters + (0 if offload else optimizer) + buffers + peak_bytes,
            host=(optimizer + optimizer // 3 if offload else 0) + self._kept(config, name, devices),
        )

    def _kept(self, config: Config, name: str, devices: int) -> int:
        """Host bytes of inactive blocks: moments if they are kept, and the fp32 residual of the weights."""
        if name == "all":
            return 0
        each = 8 * (config.state == "keep") + 4 * (self.dtype != "fp32")
        if config.order == "ends":  # the other blocks have no moments and round at random
            trainable = sum(
                sum(p.numel for g in groups for p in g) for _, groups, _ in self._active_sets("", config)
            )
        else:
            trainable = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return each * trainable // devices


def _update_bytes(groups: Sequence[Sequence[int]], dtype: str, stage: int | None, devices: int, fused: bool) -> int:
    """Temporaries of the update: fp32 gradients of a chunk, and AdamW's denominator of the largest tensor."""
    if stage in (None, 0):
        flat = [n for group in groups for n in group]
    else:
        flat = [math.ceil(sum(group) / devices) for group in groups]
    largest = 0 if fused else 2 * 4 * max(flat)
    if dtype == "fp32":
        return largest
    chunk = sum(flat) if stage is not None else min(sum(flat), max(UPDATE_CHUNK, max(flat)))
    return 4 * chunk + largest


def _label(method: str, config: Config, stage: int | None, offload: bool) -> str:
    place = "" if stage is None else f" ZeRO-{stage}" + (" offload" if offload else "")
    if method == "adamw":
        return f"AdamW{place}"
    by = config.granularity if isinstance(config.granularity, str) else "patterns"
    cut = "" if config.max_block_gb is None else f" cut to {config.max_block_gb:.3g} GB"
    return f"BCD {by}{cut}{place}"
