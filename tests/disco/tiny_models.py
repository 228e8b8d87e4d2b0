"""Tiny checkpoints of every family, for the tests of split, merge and router. One line makes a family tested."""

import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from disco.family import STAND_INS, with_experts

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
LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=10,
    q_lora_rank=11,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    moe_intermediate_size=8,
    n_shared_experts=1,
    routed_scaling_factor=2.5,
)
# name -> (model_type, keys of its own)
FAMILIES = {
    "qwen2_moe": ("qwen2_moe", QWEN),
    "qwen2_moe dense layers": (
        "qwen2_moe",
        dict(QWEN, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3]),
    ),
    "qwen2_moe tied": ("qwen2_moe", dict(QWEN, tie_word_embeddings=True)),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", dict(moe_intermediate_size=8, head_dim=10, mlp_only_layers=[0])),
    "flex_olmo": ("flex_olmo", {}),
    "gpt_oss": ("gpt_oss", dict(head_dim=6, sliding_window=5)),
    "deepseek_v2": ("deepseek_v2", dict(LATENT, q_lora_rank=None, first_k_dense_replace=1)),
    "deepseek_v2 grouped": (
        "deepseek_v2",
        dict(LATENT, topk_method="group_limited_greedy", tie_word_embeddings=True),
    ),
    "deepseek_v3": ("deepseek_v3", dict(LATENT, first_k_dense_replace=1, n_group=1, topk_group=1)),
    "olmoe": ("olmoe", dict(tie_word_embeddings=True, norm_topk_prob=True)),
}
EXPERTS = {
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


def tiny_config(name: str = "qwen2_moe", experts: int = 3, **keys):
    model_type, own = FAMILIES[name]
    count = {EXPERTS.get(model_type, "num_experts"): experts}
    if "topk_method" in own:  # each expert a group
        count |= {"n_group": experts, "topk_group": min(2, experts)}
    return AutoConfig.for_model(model_type, **{**COMMON, **own, **count, **keys})


def tiny_model(name: str = "qwen2_moe", experts: int = 3, dtype=torch.float32, seed: int = 0, **keys):
    """A model with weights far from their small initial values, so that nothing is close by accident."""
    return filled(tiny_config(name, experts, **keys), dtype, seed)


def tiny_single(name: str, dtype=torch.float32, seed: int = 0):
    """A model with one expert, as all submodels of a start from scratch begin from."""
    return filled(with_experts(tiny_config(name, 3), 1, 1), dtype, seed)


def filled(config, dtype=torch.float32, seed: int = 0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
        for name, buffer in model.named_buffers():
            if "score" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.3)
                if hasattr(config, STAND_INS):
                    buffer[1:] = -1e4
    return cast(model, dtype).eval()


def cast(model, dtype):
    """The model in another dtype, but for what transformers loads as float32."""
    strict = model._keep_in_fp32_modules_strict or ()
    loose = model._keep_in_fp32_modules or () if dtype == torch.float16 else ()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        of = [any(re.search(rf"(^|\.){part}($|\.)", name) for part in parts) for parts in (strict, loose)]
        if not of[0] and "inv_freq" not in name:
            tensor.data = tensor.data.to(dtype)
        if of[1]:
            tensor.data = tensor.data.float()
    return model


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
