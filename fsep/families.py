"""Where each Hugging Face mixture-of-experts architecture keeps its experts: one table entry a family.

Shapes: E experts, H hidden width, F expert width.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn


class MoeBlock(NamedTuple):
    """One MoE layer of a model: ``parent.experts`` is the module of all its experts."""

    layer: int
    name: str  # of the experts module, as in model.named_modules()
    parent: nn.Module


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names of one architecture; the defaults are those most families share.

    In memory a module ``<block>.experts`` holds ``gate_up_proj`` [E, 2F, H] and ``down_proj`` [E, H, F]; on disk
    expert e is the ``matrices`` [F, H], [F, H], [H, F] (gate, up, down) under ``<block_on_disk>.experts.<e>``.
    """

    model_type: str
    block: str = "mlp"
    block_on_disk: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")

    def blocks(self, model: nn.Module) -> list[MoeBlock]:
        """The MoE layers of a model, front to back; dense layers are left out."""
        pattern = re.compile(rf"(?:.*\.)?layers\.(\d+)\.{self.block}\.experts")
        return [
            MoeBlock(int(found[1]), name, model.get_submodule(name.rpartition(".")[0]))
            for name, _ in model.named_modules()
            if (found := pattern.fullmatch(name))
        ]

    def on_disk(self, key: str) -> str:
        """The name in a checkpoint file of a parameter that is not an expert's."""
        return re.sub(rf"((?:^|\.)layers\.\d+\.){self.block}\.", rf"\g<1>{self.block_on_disk}.", key)

    def expert_key(self, experts_name: str, expert: int, matrix: int) -> str:
        """The name in a checkpoint file of one matrix (0 gate, 1 up, 2 down) of one expert."""
        return f"{self.on_disk(experts_name + '.')}{expert}.{self.matrices[matrix]}"


FAMILIES = {
    family.model_type: family
    for family in (
        Family(model_type="qwen2_moe"),
        Family(model_type="qwen3_moe"),
        Family(model_type="olmoe"),
        Family(model_type="flex_olmo"),
        Family(model_type="deepseek_v2"),
        Family(model_type="deepseek_v3"),
        Family(
            model_type="mixtral",
            block_on_disk="block_sparse_moe",
            matrices=("w1.weight", "w3.weight", "w2.weight"),
        ),
    )
}


def family_of(model: nn.Module) -> Family:
    """The table entry of a Hugging Face model.

    Raises:
        ValueError: not a Hugging Face model, or an architecture that is not in the table; it is never guessed.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ValueError(f"{type(model).__name__} has no config.model_type: give the Hugging Face model itself")
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type '{model_type}' is not a mixture-of-experts family known here: "
            f"known are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]
