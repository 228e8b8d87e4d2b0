"""Floating-point operations of a decoder-only Mixture-of-Experts, by formula.

A matrix product [m, k] x [k, n] is 2 m k n operations; only matrix products count, as in
`torch.utils.flop_counter`, with which these formulas agree to the last operation (attention and experts in
their `eager` implementations: the counter does not know the others' kernels on a CPU). Attention scores are
counted for the whole square of a row's length, masked half included: that is what eager and masked kernels
compute.
"""

from dataclasses import dataclass
from typing import Any, Literal

Trainable = Literal["all", "experts", "router"]

# model_type -> where the config keeps: number of experts, expert width, shared expert width, dense layers.
FAMILIES = {
    "qwen2_moe": {
        "experts": "num_experts",
        "width": "moe_intermediate_size",
        "shared": "shared_expert_intermediate_size",
    },
    "mixtral": {"experts": "num_local_experts", "width": "intermediate_size"},
    "olmoe": {"experts": "num_experts", "width": "intermediate_size"},
}


@dataclass(frozen=True)
class Layer:
    """Forward operations a position of one decoder layer's parts; `dense_*` is 0 in an MoE layer and the rest of
    the feed-forward part in a dense one."""

    projections: int  # query, key and value
    scores: int  # query-key and score-value products
    output: int
    router: int = 0
    experts_up: int = 0  # gate and up, of the experts that a token goes to
    experts_down: int = 0
    shared_up: int = 0
    shared_down: int = 0
    shared_gate: int = 0
    dense_up: int = 0
    dense_down: int = 0

    @property
    def forward(self) -> int:
        return sum(vars(self).values())


def layers(config: Any, length: int) -> list[Layer]:
    """The decoder layers of a Hugging Face `config` for rows of `length` positions.

    Raises ValueError for a model_type that is not in FAMILIES.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type is '{config.model_type}', for which no FLOP formula is known: one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[config.model_type]
    hidden, active = config.hidden_size, config.num_experts_per_tok
    experts, width = getattr(config, family["experts"]), getattr(config, family["width"])
    head_size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_size, config.num_key_value_heads * head_size
    attention = {
        "projections": 2 * hidden * (queries + 2 * keys),
        "scores": 4 * length * queries,
        "output": 2 * queries * hidden,
    }
    sparse = {
        "router": 2 * hidden * experts,
        "experts_up": active * 4 * hidden * width,
        "experts_down": active * 2 * hidden * width,
    }
    if "shared" in family:
        shared = getattr(config, family["shared"])
        sparse |= {"shared_up": 4 * hidden * shared, "shared_down": 2 * hidden * shared}
        sparse["shared_gate"] = 2 * hidden
    wide = config.intermediate_size
    dense = {"dense_up": 4 * hidden * wide, "dense_down": 2 * hidden * wide}
    return [
        Layer(**attention, **(sparse if _is_sparse(config, experts, index) else dense))
        for index in range(config.num_hidden_layers)
    ]


def _is_sparse(config: Any, experts: int, index: int) -> bool:
    every = getattr(config, "decoder_sparse_step", 1)
    listed = index in (getattr(config, "mlp_only_layers", None) or ())
    return experts > 0 and not listed and (index + 1) % every == 0


def forward_flops(config: Any, length: int, *, labels: int | None = None) -> int:
    """Operations of the forward pass over one row of `length` positions.

    `labels` positions reach the output head (all of them if None): the loss skips positions without a label.
    """
    decoder = sum(layer.forward for layer in layers(config, length))
    return length * decoder + (length if labels is None else labels) * _head(config)


def training_flops(
    config: Any,
    length: int,
    *,
    labels: int | None = None,
    trainable: Trainable = "all",
    activation_checkpointing: bool = False,
) -> int:
    """Operations of forward and backward over one row of `length` positions, of which `labels` have a label.

    In the backward pass a matrix product costs its forward operations once for the gradient of its input, if
    anything before it is trained, and once for that of its weight, if that is trained. Frozen parts save the
    second, and below the first trained weight both. `activation_checkpointing` computes every decoder layer
    once more, except what PyTorch's non-reentrant checkpointing need not: what comes after the last value that
    the backward pass wants.
    """
    if trainable not in ("all", "experts", "router"):
        raise ValueError(f"trainable is '{trainable}': it must be all, experts or router")
    everything = trainable == "all"
    stream = everything  # does the residual stream carry a gradient? the embedding is trained with everything
    decoder = 0
    for layer in layers(config, length):
        sparse = layer.router > 0
        experts = sparse and trainable in ("all", "experts")
        router = sparse and trainable in ("all", "router")
        attention = stream or everything
        active = attention or experts or router
        decoder += layer.forward
        decoder += (stream + everything) * layer.projections
        decoder += 2 * attention * layer.scores
        decoder += (attention + everything) * layer.output
        decoder += (attention + router) * layer.router
        decoder += (attention + experts) * layer.experts_up
        decoder += ((attention or experts) + experts) * layer.experts_down
        decoder += (attention + everything) * (layer.shared_up + layer.shared_down + layer.shared_gate)
        decoder += (attention + everything) * (layer.dense_up + layer.dense_down)
        if activation_checkpointing and active:
            decoder += layer.forward - layer.dense_down - (0 if attention else layer.shared_gate)
        stream = active
    head = (1 + stream + everything) * _head(config)
    return length * decoder + (length if labels is None else labels) * head


def _head(config: Any) -> int:
    return 2 * config.hidden_size * config.vocab_size
