"""Tiny models for the tests of bcd. V vocabulary, H width, L layers."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2MoeConfig

VOCABULARY = 72


def llama_config(layers=2, width=32, tied=False):
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )


def moe_config(layers=2, width=32, experts=4):
    return Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )


def build(config, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def batch(seed, size=2, length=16):
    """Token ids [size, length], labels the same."""
    tokens = torch.randint(0, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}
