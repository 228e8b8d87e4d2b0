"""Settings of block coordinate descent."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PrefixCache(_Section):
    """Outputs of the frozen prefix for micro-batches that come back while a block is active."""

    max_gb: float = Field(default=4.0, gt=0, description="largest size of the cache in GB (1e9 bytes)")
    directory: str | None = Field(default=None, description="folder on disk; host memory if not given")


class Expansion(_Section):
    """Updates of the layers above the active block, with a number a row and a column of a weight as their state.

    Each gradient that backward makes there is normalised by its factored second moment, moves its parameter by
    `lr_ratio` times the learning rate, and is freed before the next one is made.
    """

    lr_ratio: float = Field(default=0.05, gt=0, description="step size relative to the learning rate")
    active: Literal["adamw", "factored"] = Field(
        default="adamw",
        description="'factored': matrices of the active block are updated in this way too, by lr_ratio in the "
        "layers and by the whole learning rate in embeddings and head; AdamW has the rest, e.g. an always-on norm",
    )


class Config(_Section):
    """All settings of `bcd.initialize`. Frozen; unknown keys are refused."""

    granularity: str | tuple[str, ...] | dict[str, tuple[str, ...]] = Field(
        default="layer", description="'layer', 'module', or patterns: see bcd.partition"
    )
    expert_groups: int = Field(default=1, ge=1, description="blocks that the experts of a layer are cut into")
    max_block_gb: float | None = Field(default=None, gt=0, description="largest training state of a block, GB")
    always_on: tuple[str, ...] = Field(default=(), description="patterns of what trains in every block")

    order: Literal["ascending", "descending", "shuffled", "importance", "ends"] = Field(
        default="ascending", description="of the blocks in a cycle; 'ends': see bcd.BlockSchedule, with expansion"
    )
    steps_per_block: int = Field(default=50, description="applied updates of a block before the next")
    active_blocks: int = Field(default=1, description="blocks that train at once")
    seed: int = 0
    state: Literal["reset", "keep"] = Field(default="keep", description="AdamW moments when a block returns")

    prefetch: bool = Field(
        default=False, description="copy the next block's kept state to the GPU during the update before a switch"
    )

    lr: float = Field(default=1e-4, gt=0, description="peak learning rate")
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    no_decay: tuple[str, ...] = Field(default=(), description="patterns of what is not decayed")
    fused: bool | None = Field(default=None, description="torch's fused AdamW; None: on GPUs")
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0, description="applied updates of linear warm-up")
    total_steps: int | None = Field(default=None, gt=0, description="applied updates at which the decay ends")
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="learning rate at the end over the peak")
    switch_warmup: int = Field(default=0, ge=0, description="updates of linear warm-up after a switch")

    gradient_accumulation_steps: int = Field(default=1, ge=1)
    gradient_clipping: float = Field(default=0.0, ge=0, description="largest norm of the active gradients; 0: off")
    dtype: Literal["fp32", "bf16"] | None = Field(
        default=None, description="of the weights; None: as the model is. DeepSpeed's own sections win"
    )
    activation_checkpointing: bool = False
    switch: Literal["reconfigure", "rebuild"] = Field(
        default="reconfigure", description="DeepSpeed: change the one engine, or build a new one at each switch"
    )
    expansion: Expansion | None = None
    prefix_cache: PrefixCache | None = None

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.steps_per_block < 1:
            raise ValueError(f"steps_per_block is {self.steps_per_block}: it must be at least 1")
        if self.active_blocks < 1:
            raise ValueError(f"active_blocks is {self.active_blocks}: it must be at least 1")
        if self.order == "ends" and self.expansion is None:
            raise ValueError("order is 'ends' without expansion, which trains all between: set expansion={}")
        if self.order == "ends" and self.active_blocks > 1:
            raise ValueError(f"order is 'ends' with active_blocks {self.active_blocks}: it takes one at a time")
        if self.expansion and self.expansion.active == "factored" and self.order == "importance":
            raise ValueError(
                "order is 'importance' with expansion.active 'factored', which measures no norms: use another order"
            )
        if self.lr_schedule != "constant" and self.total_steps is None:
            raise ValueError(f"lr_schedule is {self.lr_schedule!r} without an end: set total_steps")
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, above total_steps {self.total_steps}: lower it")
        return self


def read(config: Config | Mapping[str, Any] | None) -> Config:
    """`config` as a Config; ValueError with one line (value, place, remedy) if it is not one."""
    if isinstance(config, Config):
        return config
    values = dict(config or {})
    for key in values:
        if key not in Config.model_fields:
            close = difflib.get_close_matches(str(key), Config.model_fields, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(Config.model_fields)}"
            raise ValueError(f"bcd config has no setting {key!r}: {hint}")
    try:
        return Config(**values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if not place:
            raise ValueError(message) from None
        raise ValueError(f"bcd config: {place} is {first['input']!r}: {message}") from None
