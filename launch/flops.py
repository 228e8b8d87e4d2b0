"""Floating-point operations of a decoder-only language model, dense or Mixture-of-Experts, by formula.

A matrix product [m, k] x [k, n] is 2 m k n operations; only matrix products count, as in
`torch.utils.flop_counter`, with which these formulas agree to the last operation (attention and experts in
their `eager` implementations: the counter does not know the others' kernels on a CPU). Attention scores are
counted for the whole square of a row's length, masked half included: that is what eager and masked kernels
compute.

In the backward pass a product costs its forward operations once for each factor that wants a gradient. What
wants one follows from the names of the trained parameters: a layer's products are gone through in the order of
the forward pass, each with two flags. Frozen parts save their weights' half, and below the first trained weight
nothing is left of the backward pass.
"""

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

Trainable = Literal["all", "experts", "router"]
ROUTER = "mlp.gate"
DEEPSEEK = {"experts": "n_routed_experts", "width": "moe_intermediate_size", "ungated": "n_shared_experts"}

# model_type -> where the config keeps: number of experts, expert width, shared expert width (behind a gate),
# number of shared experts (without one). Dense families have none of them.
FAMILIES: dict[str, dict[str, str]] = {
    "qwen2_moe": {
        "experts": "num_experts",
        "width": "moe_intermediate_size",
        "shared": "shared_expert_intermediate_size",
    },
    "mixtral": {"experts": "num_local_experts", "width": "intermediate_size"},
    "olmoe": {"experts": "num_experts", "width": "intermediate_size"},
    "qwen3_moe": {"experts": "num_experts", "width": "moe_intermediate_size"},
    "flex_olmo": {"experts": "num_experts", "width": "intermediate_size"},
    "gpt_oss": {"experts": "num_local_experts", "width": "intermediate_size"},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "olmo2": {},
    "gpt_neox": {},
}
POST_NORM = ("olmo2", "flex_olmo")  # normalise what a block puts out, not what it takes in


@dataclass(frozen=True)
class Layer:
    """Forward operations a position of one decoder layer's products; `router` is 0 in a dense layer."""

    query: int
    key: int  # and as many for the value; in latent attention both together
    scores: int
    mix: int  # score-value products
    output: int
    compressed_query: int = 0  # down-projections of latent attention (DeepSeek)
    compressed_key: int = 0
    up: int = 0  # of a dense layer: gate and up, each
    down: int = 0
    router: int = 0
    experts_up: int = 0  # gate and up together, of the experts that a token goes to
    experts_down: int = 0
    shared_up: int = 0  # gate and up, each
    shared_down: int = 0
    shared_gate: int = 0


@dataclass
class Tally:
    """Operations of one layer so far. `recomputed` are those of forward up to the last value that backward
    wants, which is where PyTorch's non-reentrant activation checkpointing stops."""

    forward: int = 0
    backward: int = 0
    recomputed: int = 0

    def product(self, operations: int, first: bool, second: bool) -> bool:
        """Count a product; the flags say which factors want a gradient. Returns whether the result does."""
        self.forward += operations
        self.backward += operations * (first + second)
        return first or second

    def wanted(self, by_backward: bool) -> None:
        """What was computed last is a value that backward may want."""
        if by_backward:
            self.recomputed = self.forward


def layers(config: Any, length: int) -> list[Layer]:
    """The decoder layers of a Hugging Face `config` for rows of `length` positions.

    Raises ValueError for a model_type that is not in FAMILIES.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type is '{config.model_type}', for which no FLOP formula is known: one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[config.model_type]
    hidden, wide = config.hidden_size, config.intermediate_size
    head_size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries = config.num_attention_heads * head_size
    keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_size
    attention = {
        "query": 2 * hidden * queries,
        "key": 2 * hidden * keys,
        "scores": 2 * length * queries,
        "mix": 2 * length * queries,
        "output": 2 * queries * hidden,
    }
    if "ungated" in family:
        attention = _latent_sizes(config, length)
    dense = {"up": 2 * hidden * wide, "down": 2 * hidden * wide}
    if "experts" not in family:
        return [Layer(**attention, **dense)] * config.num_hidden_layers
    experts, width = getattr(config, family["experts"]), getattr(config, family["width"])
    sparse = {
        "router": 2 * hidden * experts,
        "experts_up": config.num_experts_per_tok * 4 * hidden * width,
        "experts_down": config.num_experts_per_tok * 2 * hidden * width,
    }
    if "shared" in family:
        shared = 2 * hidden * getattr(config, family["shared"])
        sparse |= {"shared_up": shared, "shared_down": shared, "shared_gate": 2 * hidden}
    if "ungated" in family:
        shared = 2 * hidden * width * getattr(config, family["ungated"])
        sparse |= {"shared_up": shared, "shared_down": shared}
    return [
        Layer(**attention, **(sparse if _is_sparse(config, experts, index) else dense))
        for index in range(config.num_hidden_layers)
    ]


def _latent_sizes(config: Any, length: int) -> dict[str, int]:
    """Products of DeepSeek's latent attention, which expands keys and values from one narrow vector."""
    hidden, heads, low = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    values = heads * config.v_head_dim
    return {
        "compressed_query": 2 * hidden * (config.q_lora_rank or 0),
        "query": 2 * (config.q_lora_rank or hidden) * queries,
        "compressed_key": 2 * hidden * (low + config.qk_rope_head_dim),
        "key": 2 * low * (heads * config.qk_nope_head_dim + values),
        "scores": 2 * length * queries,
        "mix": 2 * length * values,
        "output": 2 * values * hidden,
    }


def _is_sparse(config: Any, experts: int, index: int) -> bool:
    every = getattr(config, "decoder_sparse_step", 1)
    listed = index in (getattr(config, "mlp_only_layers", None) or ())
    late = index >= getattr(config, "first_k_dense_replace", 0)
    return experts > 0 and late and not listed and (index + 1) % every == 0


def forward_flops(config: Any, length: int, *, labels: int | None = None) -> int:
    """Operations of the forward pass over one row of `length` positions.

    `labels` positions reach the output head (all of them if None): the loss skips positions without a label.
    """
    through = _layer_of(config)
    decoder = 0
    for layer in layers(config, length):
        through(layer, tally := Tally(), False, lambda part: False)
        decoder += tally.forward
    return length * decoder + (length if labels is None else labels) * _head(config)


def training_flops(
    config: Any,
    length: int,
    *,
    labels: int | None = None,
    trainable: Trainable | Collection[str] = "all",
    activation_checkpointing: bool = False,
) -> int:
    """Operations of forward and backward over one row of `length` positions, of which `labels` have a label.

    `trainable`: all, experts, router, or the names of the parameters that are trained, as
    `model.named_parameters()` gives them (of which rows are trained makes no difference: the gradient of the
    whole weight is formed and cut). `activation_checkpointing` computes once more what backward wants of every
    decoder layer that it goes through.
    """
    trained = _Trained.of(trainable)
    through = _layer_of(config)
    stream = trained.embedding  # does the residual stream carry a gradient?
    decoder = 0
    for index, layer in enumerate(layers(config, length)):
        tally = Tally()
        stream = through(layer, tally, stream, trained.in_layer(index, layer.router > 0))
        decoder += tally.forward + tally.backward
        if activation_checkpointing:
            decoder += tally.recomputed
    tied = getattr(config, "tie_word_embeddings", False)
    head = trained.head or (tied and trained.embedding)
    products = 1 + (stream or trained.norm) + head
    return length * decoder + (length if labels is None else labels) * products * _head(config)


def _head(config: Any) -> int:
    return 2 * config.hidden_size * config.vocab_size


# Whether a parameter of the layer, or one below a module of it, is trained: "self_attn.q_proj", "mlp.gate.weight".
On = Callable[[str], bool]


@dataclass(frozen=True)
class _Trained:
    """What is trained: everything, a part of every MoE layer, or parameters by name."""

    embedding: bool = False
    norm: bool = False  # the last one
    head: bool = False
    everywhere: str | None = None  # "" is all, else a module of every MoE layer
    by_layer: dict[int, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, trainable: Trainable | Collection[str]) -> "_Trained":
        if isinstance(trainable, str):
            parts = {"all": "", "experts": "mlp.experts", "router": ROUTER}
            if trainable not in parts:
                raise ValueError(f"trainable is '{trainable}': it must be all, experts, router, or names")
            every = trainable == "all"
            return cls(every, every, every, parts[trainable])
        by_layer: dict[int, set[str]] = {}
        outside: set[str] = set()
        for name in trainable:
            if found := re.search(r"(?:^|\.)layers\.(\d+)\.(.+)$", name):
                parts = found[2].replace("mlp.router.", f"{ROUTER}.").split(".")
                below = by_layer.setdefault(int(found[1]), set())
                below.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
            else:
                outside.update(name.split("."))
        return cls(
            embedding=bool(outside & {"embed_tokens", "embed_in"}),
            norm=bool(outside & {"norm", "final_layer_norm"}),
            head="lm_head" in outside,
            by_layer=by_layer,
        )

    def in_layer(self, index: int, sparse: bool) -> On:
        if self.everywhere is None:
            below = self.by_layer.get(index, ())
            return lambda part: part in below
        if not self.everywhere:
            return lambda part: True
        return lambda part: sparse and f"{part}.".startswith(f"{self.everywhere}.")


def _layer_of(config: Any) -> Callable[[Layer, Tally, bool, On], bool]:
    if config.model_type == "gpt_neox":
        return _parallel_layer if config.use_parallel_residual else _neox_layer
    return functools.partial(_llama_layer, post_norm=config.model_type in POST_NORM)


def _linear(tally: Tally, operations: int, inputs: bool, on: On, name: str) -> bool:
    """A linear layer's product; a trained bias makes its output want a gradient, without a product."""
    product = tally.product(operations, inputs, on(f"{name}.weight"))
    return product or on(f"{name}.bias")


def _attend(layer: Layer, tally: Tally, query: bool, key: bool, value: bool, on: On, output: str) -> bool:
    scores = tally.product(layer.scores, query, key) or on("self_attn.sinks")
    mixed = tally.product(layer.mix, scores, value)
    tally.wanted(mixed or on(f"{output}.weight"))
    return _linear(tally, layer.output, mixed, on, output)


def _llama_layer(layer: Layer, tally: Tally, stream: bool, on: On, *, post_norm: bool) -> bool:
    """Layer of the Llama kind. `stream`: its input wants a gradient; returns whether its output does."""
    inputs = stream or on("input_layernorm")
    project = _latent if layer.compressed_key else _project
    query, key, value = project(layer, tally, inputs, on)
    stream = _attend(layer, tally, query, key, value, on, "self_attn.o_proj") or stream
    inputs = stream or on("post_attention_layernorm")
    tally.wanted(inputs)
    if post_norm:
        stream = inputs
    if not layer.router:
        output = _gated(tally, layer.up, layer.down, inputs, on, "mlp")
    else:
        output = _mixture(layer, tally, inputs, on)
    if post_norm:
        output = output or on("post_feedforward_layernorm")
        tally.wanted(output)
    return stream or output


def _project(layer: Layer, tally: Tally, inputs: bool, on: On) -> tuple[bool, bool, bool]:
    query = _linear(tally, layer.query, inputs, on, "self_attn.q_proj") or on("self_attn.q_norm")
    key = _linear(tally, layer.key, inputs, on, "self_attn.k_proj") or on("self_attn.k_norm")
    return query, key, _linear(tally, layer.key, inputs, on, "self_attn.v_proj")


def _latent(layer: Layer, tally: Tally, inputs: bool, on: On) -> tuple[bool, bool, bool]:
    """Latent attention: part of the key comes from the narrow vector itself."""
    narrow, name = inputs, "self_attn.q_proj"
    if layer.compressed_query:
        narrow = _linear(tally, layer.compressed_query, inputs, on, "self_attn.q_a_proj")
        narrow, name = narrow or on("self_attn.q_a_layernorm"), "self_attn.q_b_proj"
    query = _linear(tally, layer.query, narrow, on, name)
    narrow = _linear(tally, layer.compressed_key, inputs, on, "self_attn.kv_a_proj_with_mqa")
    value = _linear(tally, layer.key, narrow or on("self_attn.kv_a_layernorm"), on, "self_attn.kv_b_proj")
    return query, value or narrow, value


def _mixture(layer: Layer, tally: Tally, inputs: bool, on: On) -> bool:
    """Router, routed experts and shared ones (before them behind a gate, after them without)."""
    shared = gate = False
    if layer.shared_gate:
        shared = _gated(tally, layer.shared_up, layer.shared_down, inputs, on, "mlp.shared_expert")
    weights = tally.product(layer.router, inputs, on(f"{ROUTER}.weight")) or on(f"{ROUTER}.bias")
    hidden = tally.product(layer.experts_up, inputs, on("mlp.experts.gate_up_proj"))
    hidden = hidden or on("mlp.experts.gate_up_proj_bias")
    routed = tally.product(layer.experts_down, hidden, on("mlp.experts.down_proj")) or weights
    routed = routed or on("mlp.experts.down_proj_bias")
    tally.wanted(routed)
    if layer.shared_gate:
        gate = tally.product(layer.shared_gate, inputs, on("mlp.shared_expert_gate.weight"))
        tally.wanted(shared or gate)
    elif layer.shared_up:
        shared = _gated(tally, layer.shared_up, layer.shared_down, inputs, on, "mlp.shared_experts")
    return shared or routed or gate


def _gated(tally: Tally, up: int, down: int, inputs: bool, on: On, name: str) -> bool:
    """Gated linear unit: down(act(gate(x)) * up(x))."""
    gate = _linear(tally, up, inputs, on, f"{name}.gate_proj")
    hidden = _linear(tally, up, inputs, on, f"{name}.up_proj") or gate
    tally.wanted(hidden or on(f"{name}.down_proj.weight"))
    return _linear(tally, down, hidden, on, f"{name}.down_proj")


def _neox_layer(layer: Layer, tally: Tally, stream: bool, on: On) -> bool:
    stream = _neox_attention(layer, tally, stream or on("input_layernorm"), on) or stream
    tally.wanted(stream)
    return _neox_mlp(layer, tally, stream or on("post_attention_layernorm"), on) or stream


def _parallel_layer(layer: Layer, tally: Tally, stream: bool, on: On) -> bool:
    """Attention and MLP side by side, both from the layer's input (GPT-NeoX)."""
    attention = _neox_attention(layer, tally, stream or on("input_layernorm"), on)
    mlp = _neox_mlp(layer, tally, stream or on("post_attention_layernorm"), on)
    return stream or attention or mlp


def _neox_attention(layer: Layer, tally: Tally, inputs: bool, on: On) -> bool:
    together = _linear(tally, layer.query + 2 * layer.key, inputs, on, "attention.query_key_value")
    return _attend(layer, tally, together, together, together, on, "attention.dense")


def _neox_mlp(layer: Layer, tally: Tally, inputs: bool, on: On) -> bool:
    hidden = _linear(tally, layer.up, inputs, on, "mlp.dense_h_to_4h")
    tally.wanted(hidden or on("mlp.dense_4h_to_h.weight"))
    return _linear(tally, layer.down, hidden, on, "mlp.dense_4h_to_h")
