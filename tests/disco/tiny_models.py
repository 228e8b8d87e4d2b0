"""Tiny checkpoints of every family, for the tests of split, merge and router. One line makes a family tested."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
    num_experts_per_tok=2,
)
QWEN = dict(moe_intermediate_size=8, shared_expert_intermediate_size=14)
# name -> (model_type, keys of its own)
FAMILIES = {
    "qwen2_moe": ("qwen2_moe", QWEN),
    "qwen2_moe dense layers": (
        "qwen2_moe",
        dict(QWEN, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3]),
    ),
    "qwen2_moe tied": ("qwen2_moe", dict(QWEN, tie_word_embeddings=True)),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", dict(tie_word_embeddings=True, norm_topk_prob=True)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


def tiny_config(name: str = "qwen2_moe", experts: int = 3, **keys):
    model_type, own = FAMILIES[name]
    count = {"num_local_experts" if model_type == "mixtral" else "num_experts": experts}
    return AutoConfig.for_model(model_type, **{**COMMON, **own, **count, **keys})


def tiny_model(name: str = "qwen2_moe", experts: int = 3, dtype=torch.float32, seed: int = 0, **keys):
    """A model with weights far from their small initial values, so that nothing is close by accident."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(name, experts, **keys), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return model.to(dtype).eval()


def save(model, folder: Path, **keys) -> Path:
    model.save_pretrained(folder, **keys)
    return folder


def load(folder: Path, dtype=None, experts: str = "eager"):
    """The model in `folder`, asserting that no key is missing or unexpected.

    Weights are copied out of the memory-mapped file: the last bits of a matrix product depend on alignment.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or "auto", output_loading_info=True, experts_implementation=experts
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def same_tensors(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
