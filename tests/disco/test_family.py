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
    routed_like,
    router_parameters,
    set_trainable,
    top_k,
    with_experts,
)
from tests.disco.tiny_models import FAMILIES, tiny_config, tiny_model, tiny_single


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_are_found_front_to_back(name):
    model = tiny_model(name, 3)
    blocks = moe_blocks(model)
    dense = name in ("qwen2_moe dense layers", "qwen3_moe", "deepseek_v2", "deepseek_v3")
    assert [block.layer for block in blocks] == ([1] if dense else [0, 1])
    for block in blocks:
        assert block.router.weight.shape == (3, 24)
        assert block.experts.down_proj.shape[0] == 3
    biased = 2 if name == "gpt_oss" else 1
    assert len(router_parameters(model)) == biased * len(blocks)
    assert len(expert_parameters(model)) == biased * 2 * len(blocks)


def test_layers_are_in_numeric_order():
    blocks = moe_blocks(tiny_model("olmoe", 2, num_hidden_layers=11))
    assert [block.layer for block in blocks] == list(range(11))


@pytest.mark.parametrize("name", FAMILIES)
def test_only_experts_train_when_the_shared_part_is_frozen(name):
    model = tiny_single(name)
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
    kinds = [family.role(key).kind for key in pieces]
    blocks = len(moe_blocks(model))
    if name == "gpt_oss":  # stacked on disk too
        assert stored.keys() == model.state_dict().keys()
        assert kinds.count("router") == 2 * blocks and kinds.count("expert") == 4 * 3 * blocks
        return
    assert set(pieces) - set(stored) <= {"lm_head.weight"}
    assert all(torch.equal(pieces[key], tensor) for key, tensor in stored.items())
    assert kinds.count("router") == (2 if name == "deepseek_v3" else 1) * blocks
    assert kinds.count("expert") == 3 * 3 * blocks


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
    config = tiny_config(name, 3)
    changed = with_experts(config, 6, 3)
    assert (num_experts(changed), top_k(changed)) == (6, 3)
    assert (num_experts(config), top_k(config)) == (3, 2)
    assert renormalizes(changed) == renormalizes(config)
    habit = {"mixtral": "always", "gpt_oss": "always", "deepseek_v2": "never"}.get(name.split()[0])
    for wanted in (True, False):
        if habit == ("never" if wanted else "always"):
            with pytest.raises(ConfigError, match=f"is {str(wanted).lower()} but .* {habit} renormalises"):
                with_experts(config, 6, 3, renormalize=wanted)
        else:
            assert renormalizes(with_experts(config, 6, 3, renormalize=wanted)) == wanted
    for bad in (0, 7, None):
        with pytest.raises(ConfigError, match=f"num_experts_per_tok is {bad} but the model has 6 experts"):
            with_experts(config, 6, bad)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_with_one_expert_and_back(name):
    config = tiny_config(name, 3)
    single = with_experts(config, 1, 1)
    assert (num_experts(single), top_k(single)) == (1, 1)
    assert single.to_dict() != config.to_dict()
    assert routed_like(single, config).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    "name, groups, match",
    [
        ("deepseek_v3", (2, 1), "n_group is 2 and topk_group 1, which does not fit 3 experts"),
        ("deepseek_v3", (3, 2), "groups are equal, of at least 2"),
        ("deepseek_v3", (None, None), "n_group is 0"),
        ("deepseek_v2 grouped", (3, 1), "topk_group 1, .* the chosen ones hold 2 or more: set n_group=1"),
        ("deepseek_v2 grouped", (2, 2), "does not fit 3 experts"),
    ],
)
def test_groups_of_experts(name, groups, match):
    config = tiny_config(name, 3, n_group=groups[0], topk_group=groups[1])
    with pytest.raises(ConfigError, match=match):
        with_experts(config, 3, 2)


def test_unknown_family():
    with pytest.raises(
        ConfigError, match="'llama' is not .* known are deepseek_v2, deepseek_v3, flex_olmo, gpt_oss"
    ):
        family_of(LlamaConfig())
