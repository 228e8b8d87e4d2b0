"""Section `bcd` of the experiment file: block coordinate descent, for every stage whose optimizer is bcd."""

from typing import Any

from pydantic import Field, create_model, model_validator

import bcd.config
from disco.schema import Positive, Section

# Settings of bcd.Config that a training stage's own keys give.
OF_THE_STAGE = {
    "lr", "betas", "eps", "weight_decay", "no_decay", "fused", "lr_schedule", "warmup_steps", "total_steps",
    "min_lr_ratio", "gradient_accumulation_steps", "gradient_clipping", "dtype", "activation_checkpointing", "seed",
}  # fmt: skip
OF_NO_USE = {"prefix_cache"}


class _BlockDescent(Section):
    @model_validator(mode="before")
    @classmethod
    def _has_nothing_useless(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "prefix_cache" in raw:
            raise ValueError(
                "prefix_cache would never be hit: a stage shuffles its rows anew in each epoch, so no micro-batch "
                "comes back; leave it out (it is for loops of one's own, with bcd.initialize)"
            )
        return raw

    @model_validator(mode="after")
    def _is_a_config(self):
        bcd.config.read(self.settings)
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """As `bcd.initialize` takes them; steps_per_block is missing where it is to be chosen."""
        return {name: value for name, value in self if name != "steps_per_block" or value is not None}


BlockDescent = create_model(
    "BlockDescent",
    __base__=_BlockDescent,
    __doc__="Block coordinate descent, for every stage whose optimizer is bcd; keys and meanings are bcd.Config's.",
    **{
        name: (key.annotation, key)
        for name, key in bcd.config.Config.model_fields.items()
        if name not in OF_THE_STAGE | OF_NO_USE
    }
    | {
        "steps_per_block": (
            Positive | None,
            Field(
                None, description="updates of a block before the next; absent = such that the last cycle is whole"
            ),
        )
    },
)
