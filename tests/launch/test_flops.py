"""Formulas against PyTorch's own counter, to the last operation."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, MixtralConfig, OlmoeConfig, Qwen2MoeConfig

from bcd.blocks import partition
from bcd.rows import select
from launch.flops import forward_flops, layers, training_flops

SMALL = {"vocab_size": 53, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
LATENT = {
    "intermediate_size": 28,
    "moe_intermediate_size": 12,
    "kv_lora_rank": 10,
    "q_lora_rank": 11,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
}
OTHERS = {
    "qwen3_moe": {"intermediate_size": 28, "moe_intermediate_size": 12, "num_key_value_heads": 2, "head_dim": 10},
    "flex_olmo": {"intermediate_size": 12, "num_key_value_heads": 2, "pad_token_id": None},
    "gpt_oss": {"intermediate_size": 12, "num_key_value_heads": 2, "head_dim": 6},
    "deepseek_v2": LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": LATENT | {"first_k_dense_replace": 2},
}


def config_of(family, experts=4, top_k=2, **extra):
    if family == "qwen2_moe":
        sizes = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "intermediate_size": 28}
        sizes |= {"num_experts": experts, "num_key_value_heads": 2}
        kind = Qwen2MoeConfig
    elif family == "mixtral":
        sizes = {"intermediate_size": 12, "num_local_experts": experts, "num_key_value_heads": 1, "head_dim": 6}
        kind = MixtralConfig
    elif family in OTHERS:
        own = OTHERS[family]
        experts = max(experts, 2) if family == "deepseek_v3" else experts  # its router cannot do with one
        count = {"n_routed_experts" if family.startswith("deepseek") else "num_experts": experts}
        return AutoConfig.for_model(family, **(SMALL | own | count | {"num_experts_per_tok": top_k} | extra))
    else:
        sizes = {"intermediate_size": 12, "num_experts": experts, "num_key_value_heads": 4}
        kind = OlmoeConfig
    return kind(**(SMALL | sizes | {"num_experts_per_tok": top_k} | extra))


def count(config, rows, length, *, trainable=None, checkpointing=False, attention="eager", labels=None):
    """Operations that the counter sees in forward (and backward, if anything is trainable)."""
    model = build(config, attention)
    for name, parameter in model.named_parameters():
        kept = {"experts": r"\.experts\.", "router": r"mlp\.(gate|router)\."}.get(trainable, "")
        parameter.requires_grad_(trainable is not None and re.search(kept, name) is not None)
    return run(model, rows, length, trainable is not None, checkpointing, labels)


def build(config, attention="eager"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation="eager"
    ).train()


def run(model, rows, length, backward=True, checkpointing=False, labels=None):
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()
    ids = torch.randint(0, model.config.vocab_size, (rows, length))
    positions = torch.arange(length).expand(rows, length)
    with FlopCounterMode(display=False) as counter:
        hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False)[0]
        hidden = hidden.reshape(rows * length, -1)[:labels]
        loss = model.lm_head(hidden).logsumexp(-1).sum()
        if backward and loss.requires_grad:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "olmoe", *OTHERS])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("trainable", ["all", "experts", "router"])
@pytest.mark.parametrize("experts,top_k", [(4, 2), (1, 1), (3, 3)])
def test_training_equals_the_counter(family, trainable, checkpointing, experts, top_k):
    config = config_of(family, experts, top_k)
    counted = count(config, 2, 7, trainable=trainable, checkpointing=checkpointing)
    formula = training_flops(config, 7, trainable=trainable, activation_checkpointing=checkpointing)
    assert 2 * formula == counted


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "olmoe", *OTHERS])
def test_forward_equals_the_counter_and_training_is_three_times_it(family):
    config = config_of(family)
    assert count(config, 3, 5) == 3 * forward_flops(config, 5)
    assert training_flops(config, 5) == 3 * forward_flops(config, 5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("trainable", ["all", "experts", "router"])
@pytest.mark.parametrize("dense", [{"mlp_only_layers": [0]}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_dense_layers_between(dense, trainable, checkpointing):
    config = config_of("qwen2_moe", **dense)
    counted = count(config, 2, 6, trainable=trainable, checkpointing=checkpointing)
    assert counted == 2 * training_flops(config, 6, trainable=trainable, activation_checkpointing=checkpointing)


WIDE = {"intermediate_size": 28, "num_key_value_heads": 2}
NAMED = {
    "qwen2_moe": config_of("qwen2_moe", mlp_only_layers=[1]),
    "mixtral": config_of("mixtral"),
    "olmoe": config_of("olmoe", tie_word_embeddings=True),
    "llama": AutoConfig.for_model("llama", **SMALL, **WIDE),
    "llama with biases": AutoConfig.for_model("llama", **SMALL, **WIDE, attention_bias=True, mlp_bias=True),
    "mistral": AutoConfig.for_model("mistral", **SMALL, **WIDE, head_dim=6),
    "qwen2": AutoConfig.for_model("qwen2", **SMALL, **WIDE, tie_word_embeddings=True),
    "qwen3": AutoConfig.for_model("qwen3", **SMALL, **WIDE, head_dim=8),
    "olmo2": AutoConfig.for_model("olmo2", **SMALL, **WIDE, pad_token_id=None),
    **{name: config_of(name) for name in OTHERS},
    "gpt_neox": AutoConfig.for_model("gpt_neox", **SMALL, intermediate_size=28),
    "gpt_neox, one after the other": AutoConfig.for_model(
        "gpt_neox", **SMALL, intermediate_size=28, use_parallel_residual=False
    ),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "cut_as",
    [{}, {"granularity": "module", "always_on": ("*norm*",), "max_block_gb": 14 * 800 / 1e9}],
    ids=["layers", "modules cut by rows, norms always on"],
)
@pytest.mark.parametrize("name", NAMED)
def test_each_block_equals_the_counter(name, cut_as, checkpointing):
    config = NAMED[name]
    groups = 2 if hasattr(config, "num_experts_per_tok") else 1
    model = build(config)
    cut = partition(model, **cut_as, expert_groups=groups)
    assert not cut_as or any(piece.rows for block in cut.blocks for piece in block.pieces)
    for block in cut.blocks:
        pieces = [*cut.always_on, *block.pieces]
        _, rows = select(model, pieces)
        for item in rows:
            item.attach()
        counted = run(model, 1, 5, checkpointing=checkpointing)
        for item in rows:
            item.detach()
        names = {piece.name for piece in pieces}
        formula = training_flops(config, 5, trainable=names, activation_checkpointing=checkpointing)
        assert formula == counted, block.name


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(sorted(NAMED)),
    share=st.floats(0.02, 1.0),
    draw=st.randoms(use_true_random=False),
    checkpointing=st.booleans(),
)
def test_any_set_of_parameters(name, share, draw, checkpointing):
    config = NAMED[name]
    model = build(config)
    trained = set()
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(draw.random() < share)
        if parameter.requires_grad:
            trained.add(parameter_name)
    formula = training_flops(config, 4, trainable=trained, activation_checkpointing=checkpointing)
    assert run(model, 1, 4, checkpointing=checkpointing) == formula, sorted(trained)


@pytest.mark.parametrize("name", NAMED)
def test_all_names_are_all(name):
    config = NAMED[name]
    names = [parameter for parameter, _ in build(config).named_parameters()]
    assert training_flops(config, 6, trainable=names) == training_flops(config, 6) == 3 * forward_flops(config, 6)


def test_only_labelled_positions_reach_the_head():
    config = config_of("mixtral")
    assert count(config, 1, 8, trainable="all", labels=3) == training_flops(config, 8, labels=3)
    assert forward_flops(config, 8, labels=0) == forward_flops(config, 8) - 8 * 2 * 16 * 53


def test_sdpa_differs_by_the_scores_that_the_counter_does_not_know():
    config = config_of("olmoe")
    scores = sum(2 * layer.scores for layer in layers(config, 9))
    assert count(config, 1, 9, attention="sdpa") == forward_flops(config, 9) - 9 * scores


@settings(max_examples=8, deadline=None)
@given(
    length=st.integers(1, 20),
    rows=st.integers(1, 3),
    experts=st.integers(1, 6),
    hidden=st.sampled_from([4, 8, 20]),
    vocabulary=st.integers(2, 90),
    depth=st.integers(1, 3),
)
def test_any_size(length, rows, experts, hidden, vocabulary, depth):
    config = config_of(
        "mixtral",
        experts,
        min(2, experts),
        hidden_size=hidden,
        vocab_size=vocabulary,
        num_hidden_layers=depth,
    )
    assert count(config, rows, length, trainable="all") == rows * training_flops(config, length)


def test_unknown_family_and_unknown_mode_are_named():
    with pytest.raises(ValueError, match="model_type is 'gpt2'.*qwen2_moe, mixtral, olmoe"):
        forward_flops(GPT2Config(), 8)
    with pytest.raises(ValueError, match="trainable is 'backbone'"):
        training_flops(config_of("olmoe"), 8, trainable="backbone")


def test_qwen_of_the_paper():
    """Qwen1.5-MoE-A2.7B: six operations a token and active parameter in a matrix, plus the scores."""
    config = Qwen2MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=5632,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts=60,
        num_experts_per_tok=4,
    )
    attention = 4 * 2048**2
    mlp = 3 * 2048 * (4 * 1408 + 5632) + 2048 * 61
    active = 24 * (attention + mlp) + 2048 * 151936
    scores = 24 * 2 * 1024 * 2048
    assert training_flops(config, 1024) == 1024 * 6 * (active + scores)
