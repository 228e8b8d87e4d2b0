import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig

from bcd.blocks import Piece, matches, partition, row_view
from tests.bcd.models import build, llama_config, moe_config


def elements(part):
    """Every element of every piece, as (name, flat index), one entry an occurrence."""
    found = []
    for piece in [p for block in part.blocks for p in block.pieces] + list(part.always_on):
        rows = range(*(piece.rows or (0, piece.shape[0])))
        width = math.prod(piece.shape[1:])
        found += [(piece.name, row * width + i) for row in rows for i in range(width)]
    return found


def expected(model):
    return {(name, i) for name, p in model.named_parameters() if p.requires_grad for i in range(p.numel())}


def assert_exact_cover(model, part):
    found = elements(part)
    assert len(found) == len(set(found)) and set(found) == expected(model)


def names(part):
    return [block.name for block in part.blocks]


def test_layer_granularity_in_forward_order():
    part = partition(build(llama_config(layers=3)))
    assert names(part) == ["embeddings", "layers.0", "layers.1", "layers.2", "head"]
    assert [block.depth for block in part.blocks] == [0, 1, 2, 3, 4]
    assert [p.name for p in part.blocks[-1].pieces] == ["model.norm.weight", "lm_head.weight"]
    assert part.layer_count == 3 and part.layers == "model.layers"


@pytest.mark.parametrize("granularity", ["layer", "module"])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_parameter_in_exactly_one_block(granularity, groups):
    model = build(moe_config(experts=5))
    assert_exact_cover(model, partition(model, granularity, expert_groups=groups))


def test_moe_layer_is_cut_in_dense_part_with_router_and_experts():
    part = partition(build(moe_config(experts=5)), expert_groups=2)
    assert names(part)[1:4] == ["layers.0.dense", "layers.0.experts.0", "layers.0.experts.1"]
    dense = {p.name for p in part.blocks[1].pieces}
    assert "model.layers.0.mlp.gate.weight" in dense
    assert "model.layers.0.mlp.shared_expert.up_proj.weight" in dense
    assert [p.rows for p in part.blocks[2].pieces] == [(0, 2), (0, 2)]
    assert [p.rows for p in part.blocks[3].pieces] == [(2, 5), (2, 5)]


def test_experts_as_module_list():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.Linear(4, 4)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Layer(), Layer()])})
    part = partition(model)
    assert names(part) == ["layers.0.dense", "layers.0.experts", "layers.1.dense", "layers.1.experts"]
    with pytest.raises(ValueError, match="not packed"):
        partition(model, expert_groups=2)


def test_module_granularity_keeps_vectors_with_a_matrix():
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16))
    part = partition(model, "module")
    assert names(part)[:3] == ["embeddings", "layers.0.attn", "layers.0.mlp"]
    first = {p.name for p in part.blocks[1].pieces}
    assert {"transformer.h.0.ln_1.weight", "transformer.h.0.ln_2.bias"} <= first
    assert_exact_cover(model, part)


def test_tied_weights_count_once():
    model = build(llama_config(tied=True))
    part = partition(model)
    assert [p.name for p in part.blocks[0].pieces] == ["model.embed_tokens.weight"]
    assert [p.name for p in part.blocks[-1].pieces] == ["model.norm.weight"]
    assert_exact_cover(model, part)


def test_layer_1_is_not_layer_10_or_11():
    model = build(llama_config(layers=12, width=8))
    rest = [f"model.layers.{i}" for i in (0, *range(2, 12))]
    part = partition(
        model, {"one": ["model.layers.1"], "rest": [*rest, "model.embed_tokens", "model.norm", "lm_head"]}
    )
    assert {p.name.split(".")[2] for p in part.blocks[0].pieces} == {"1"}
    assert len(partition(model).blocks) == 14


@pytest.mark.parametrize(
    ("pattern", "name", "result"),
    [
        ("model.layers.1", "model.layers.1.mlp.up_proj.weight", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj.weight", False),
        ("model.layers.1*", "model.layers.10.mlp.up_proj.weight", True),
        ("*norm*", "model.norm.weight", True),
        ("lm_head", "lm_head.weight", True),
        ("head", "lm_head.weight", False),
    ],
)
def test_matches(pattern, name, result):
    assert matches(pattern, name) is result


def test_patterns_overlap_miss_and_leave_out():
    model = build(llama_config())
    with pytest.raises(ValueError, match="'model.layers.0.*' is in blocks 'model.layers.0' and 'model.layers'"):
        partition(model, ["model.layers.0", "model.layers", "model.embed_tokens", "model.norm", "lm_head"])
    with pytest.raises(ValueError, match="'model.layer.0' matches no parameter"):
        partition(model, ["model.layer.0", "model"])
    with pytest.raises(ValueError, match="no pattern covers parameter 'lm_head.weight'"):
        partition(model, ["model"])
    with pytest.raises(ValueError, match="twice"):
        partition(model, ["model", "model", "lm_head"])
    with pytest.raises(ValueError, match="'layer', 'module'"):
        partition(model, "layers")


def test_frozen_stays_frozen():
    model = build(llama_config())
    model.model.embed_tokens.weight.requires_grad_(False)
    part = partition(model)
    assert "embeddings" not in names(part)
    assert_exact_cover(model, part)
    with pytest.raises(ValueError, match="only frozen"):
        partition(model, always_on=["model.embed_tokens"])
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        partition(model)


def test_always_on():
    model = build(llama_config())
    part = partition(model, always_on=["*norm*", "lm_head"])
    assert names(part) == ["embeddings", "layers.0", "layers.1"]
    assert "model.norm.weight" in {p.name for p in part.always_on}
    assert_exact_cover(model, part)
    with pytest.raises(ValueError, match="covers every"):
        partition(model, always_on=["*"])
    with pytest.raises(ValueError, match="block 'lm_head' is empty"):
        partition(model, ["model", "lm_head"], always_on=["lm_head"])


@settings(deadline=None, max_examples=25)
@given(limit=st.integers(40, 6000), granularity=st.sampled_from(["layer", "module"]), groups=st.integers(1, 3))
def test_row_cuts_cover_and_respect_the_limit(limit, granularity, groups):
    model = build(moe_config(layers=1, width=8, experts=3))
    cut = dict(max_block_gb=limit * 14 / 1e9, expert_groups=groups)
    biggest_row = 256  # one expert: 2 * 16 rows of width 8
    if limit < biggest_row:
        with pytest.raises(ValueError, match="one row of"):
            partition(model, granularity, **cut)
        return
    part = partition(model, granularity, **cut)
    assert max(block.numel for block in part.blocks) <= limit
    assert_exact_cover(model, part)
    assert all(block.pieces for block in part.blocks)


def test_digest_tells_partitions_apart():
    model = build(llama_config())
    one, same, other = partition(model), partition(build(llama_config(), seed=1)), partition(model, "module")
    assert one.digest == same.digest != other.digest
    assert partition(model, max_block_gb=1e-5).digest != one.digest


def test_model_without_layers_is_one_block():
    assert names(partition(torch.nn.Linear(3, 4))) == ["all"]


def test_meta_device_and_mixtral():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            MixtralConfig(
                hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=1, vocab_size=16, num_local_experts=2,
            )
        )  # fmt: skip
    assert names(partition(model)) == ["embeddings", "layers.0.dense", "layers.0.experts", "head"]


def test_expert_groups_bounds():
    with pytest.raises(ValueError, match="has 4 experts"):
        partition(build(moe_config(experts=4)), expert_groups=5)
    with pytest.raises(ValueError, match="at least 1"):
        partition(build(moe_config()), expert_groups=0)


def test_row_view_is_a_view():
    tensor = torch.arange(6.0).reshape(3, 2)
    view = row_view(tensor, Piece("w", (3, 2), (1, 2)))
    assert view.tolist() == [[2.0, 3.0]] and view.data_ptr() == tensor[1].data_ptr()
    assert row_view(tensor, Piece("w", (3, 2))) is tensor
