import pytest
import torch
from transformers import LlamaConfig

from disco.config import ConfigError
from disco.family import (
    expert_parameters,
    family_of,
    moe_blocks,
    num_experts,
    renormalizes,
    router_parameters,
    set_trainable,
    top_k,
    with_experts,
)
from tests.disco.tiny_models import FAMILIES, tiny_config, tiny_model


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_are_found_front_to_back(name):
    model = tiny_model(name, 3)
    blocks = moe_blocks(model)
    dense = name == "qwen2_moe dense layers"
    assert [block.layer for block in blocks] == ([1] if dense else [0, 1])
    for block in blocks:
        assert block.router.weight.shape == (3, 24)
        assert block.experts.down_proj.shape[0] == 3
    assert len(router_parameters(model)) == len(blocks)
    assert len(expert_parameters(model)) == 2 * len(blocks)


def test_layers_are_in_numeric_order():
    blocks = moe_blocks(tiny_model("olmoe", 2, num_hidden_layers=11))
    assert [block.layer for block in blocks] == list(range(11))


@pytest.mark.parametrize("name", FAMILIES)
def test_only_experts_train_when_the_shared_part_is_frozen(name):
    model = tiny_model(name, 1, num_experts_per_tok=1)
    set_trainable(model, "experts")
    training = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert training and all(".mlp.experts." in name for name in training)
    model(torch.arange(9)[None], labels=torch.arange(9)[None], use_cache=False).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in expert_parameters(model))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_stored_and_every_loaded_name_has_the_same_canonical_pieces(name, tmp_path):
    from safetensors.torch import load_file

    model = tiny_model(name, 3)
    model.save_pretrained(tmp_path)
    family = family_of(model.config)
    pieces = {}
    for key, tensor in model.state_dict().items():
        for piece in family.pieces(key, tensor.shape):
            count = torch.Size(piece.shape).numel()
            pieces[piece.key] = tensor.reshape(-1)[piece.start : piece.start + count].view(piece.shape)
    stored = load_file(tmp_path / "model.safetensors")
    assert set(pieces) - set(stored) <= {"lm_head.weight"}
    assert all(torch.equal(pieces[key], tensor) for key, tensor in stored.items())
    kinds = [family.role(key).kind for key in stored]
    blocks = len(moe_blocks(model))
    assert kinds.count("router") == blocks and kinds.count("expert") == 3 * 3 * blocks


@pytest.mark.parametrize(
    "key, kind",
    [
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "shared"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "shared"),
        ("model.layers.0.mlp.shared_expert.gate_proj.weight", "shared"),
        ("model.layers.0.mlp.experts.12.up_proj.weight", "expert"),
        ("lm_head.weight", "shared"),
    ],
)
def test_roles(key, kind):
    assert family_of(tiny_config("qwen2_moe")).role(key).kind == kind


def test_mixtral_names_of_both_layouts_are_one():
    family = family_of(tiny_config("mixtral"))
    for block in ("mlp", "block_sparse_moe"):
        assert family.role(f"model.layers.3.{block}.gate.weight").template == (
            "model.layers.3.block_sparse_moe.gate.weight"
        )
        assert family.role(f"model.layers.3.{block}.experts.7.w2.weight") == (
            "expert",
            "model.layers.3.block_sparse_moe.experts.{e}.w2.weight",
            7,
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_with_experts(name):
    config = tiny_config(name, 4)
    changed = with_experts(config, 7, 3)
    assert (num_experts(changed), top_k(changed)) == (7, 3)
    assert (num_experts(config), top_k(config)) == (4, 2)
    assert renormalizes(changed) == renormalizes(config)
    assert renormalizes(with_experts(config, 7, 3, renormalize=True))
    if name == "mixtral":
        with pytest.raises(ConfigError, match="mixtral always renormalises"):
            with_experts(config, 7, 3, renormalize=False)
    else:
        assert not renormalizes(with_experts(config, 7, 3, renormalize=False))
    for bad in (0, 8):
        with pytest.raises(ConfigError, match=f"num_experts_per_tok is {bad} but the model has 7 experts"):
            with_experts(config, 7, bad)


def test_unknown_family():
    with pytest.raises(ConfigError, match="'llama' is not .* known are mixtral, olmoe, qwen2_moe"):
        family_of(LlamaConfig())
