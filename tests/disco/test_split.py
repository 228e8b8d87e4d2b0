import json

import pytest
import torch

from disco.artifacts import ArtifactError
from disco.checkpoint import Checkpoint, identity
from disco.config import ConfigError
from disco.family import moe_blocks, num_experts, top_k
from disco.split import NOTE, groups_of, read_submodel_note, split, write_submodel_note
from tests.disco.tiny_models import DTYPES, FAMILIES, IMPLEMENTATIONS, load, same_bits, save, tiny_model


def force(model, expert: int) -> None:
    """Make every router send every token to one expert, at weight 1 (times DeepSeek's scaling)."""

    def forced(module, args, output):
        logits, scores, indices = output
        weight = getattr(model.config, "routed_scaling_factor", 1.0)
        return logits, torch.full_like(scores[:, :1], weight), torch.full_like(indices[:, :1], expert)

    for block in moe_blocks(model):
        block.router.register_forward_hook(forced)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_submodel_is_full_model_forced_to_its_expert(tmp_path, name, dtype):
    save(tiny_model(name, 3, dtype), tmp_path / "full")
    tokens = torch.arange(42).reshape(2, 21)
    positions = torch.arange(21).remainder(8).expand(2, 21)
    for expert in range(3):
        split(tmp_path / "full", expert, tmp_path / str(expert))
        full = load(tmp_path / "full")
        force(full, expert)
        submodel = load(tmp_path / str(expert))
        assert submodel.dtype == dtype
        for implementation in IMPLEMENTATIONS:
            full.set_experts_implementation(implementation)
            submodel.set_experts_implementation(implementation)
            assert submodel.config._experts_implementation == implementation
            with torch.no_grad():
                wanted = full(tokens, position_ids=positions, use_cache=False).logits
                found = submodel(tokens, position_ids=positions, use_cache=False).logits
            assert same_bits(found, wanted), implementation


@pytest.mark.parametrize("experts", [1, 5, 7, 24])
def test_odd_numbers_of_experts_and_one_equal_to_the_hidden_width(tmp_path, experts):
    model = tiny_model("qwen2_moe", experts, num_experts_per_tok=1)
    save(model, tmp_path / "full")
    out = tmp_path / "sub"
    split(tmp_path / "full", experts - 1, out)
    submodel = load(out)
    (kept, *_), (whole, *_) = moe_blocks(submodel), moe_blocks(model)
    assert same_bits(kept.router.weight, whole.router.weight[-1:])
    assert same_bits(kept.experts.gate_up_proj, whole.experts.gate_up_proj[-1:])
    assert same_bits(kept.experts.down_proj, whole.experts.down_proj[-1:])


@pytest.mark.parametrize("name", FAMILIES)
def test_submodel_config_and_note(tmp_path, name):
    save(tiny_model(name, 3), tmp_path / "full")
    out = tmp_path / "sub"
    split(tmp_path / "full", 2, out, clustering="abc")
    config = Checkpoint.open(out).config
    assert (num_experts(config), top_k(config)) == (1, 1)
    note = read_submodel_note(out)
    assert note == (identity(tmp_path / "full"), 2, 3, "abc", None, [2])
    assert (out / "generation_config.json").is_file()


def test_split_reads_stacked_experts_and_shards(tmp_path):
    model = tiny_model("mixtral", 3)
    save(model, tmp_path / "per_expert", max_shard_size="20KB")
    save(model, tmp_path / "stacked", save_original_format=False)
    assert any("gate_up_proj" in key for key in stored_keys(tmp_path / "stacked"))
    assert len(list((tmp_path / "per_expert").glob("*.safetensors"))) > 2
    for kind in ("per_expert", "stacked"):
        split(tmp_path / kind, 1, tmp_path / kind / "sub")
    weights = [(tmp_path / kind / "sub" / "model.safetensors") for kind in ("per_expert", "stacked")]
    tensors = [Checkpoint.open(path.parent).tensors for path in weights]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(same_bits(tensors[0][key].read(), tensors[1][key].read()) for key in tensors[0])


def stored_keys(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def only(model, group: list[int], top: int) -> None:
    """Make every router choose `top` experts among `group`, by softmax over the group, weights summing to one."""

    def chosen(module, args, output):
        logits = output[0][:, group]
        weights, indices = logits.softmax(-1).topk(top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * getattr(model.config, "routed_scaling_factor", 1.0)
        return output[0], weights.to(output[1].dtype), torch.tensor(group)[indices]

    for block in moe_blocks(model):
        block.router.register_forward_hook(chosen)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "olmoe"])
def test_a_group_of_experts_is_the_full_model_within_the_group(tmp_path, name):
    full = save(tiny_model(name, 7, num_experts_per_tok=4), tmp_path / "full")
    tokens = torch.arange(42).reshape(2, 21)
    for index, (group, top) in enumerate([([0, 1, 2], 2), ([3, 4], 1), ([5, 6], 1)]):
        out = tmp_path / str(index)
        renormalize = None if name in ("mixtral", "gpt_oss") else True
        split(full, index, out, submodels=3, renormalize=renormalize)
        assert read_submodel_note(out).group == group and read_submodel_note(out).of == 3
        submodel, whole = load(out), load(full)
        assert (num_experts(submodel.config), top_k(submodel.config)) == (len(group), top)
        only(whole, group, top)
        with torch.no_grad():
            found, wanted = (model(tokens, use_cache=False).logits for model in (submodel, whole))
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_groups_are_as_equal_as_can_be():
    assert groups_of(7, 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert groups_of(4, 4) == [[0], [1], [2], [3]]
    for bad in (0, 5):
        with pytest.raises(ConfigError, match=f"cluster.k is {bad} but the model has 4 experts: set it to 1..4"):
            groups_of(4, bad)


@pytest.mark.parametrize("expert", [-1, 3])
def test_expert_out_of_range(tmp_path, expert):
    save(tiny_model("olmoe", 3), tmp_path / "full")
    with pytest.raises(ConfigError, match=f"submodel {expert} does not exist: the model has 3 experts"):
        split(tmp_path / "full", expert, tmp_path)
    with pytest.raises(ConfigError, match=f"submodel {expert} does not exist"):
        write_submodel_note(tmp_path, base="b", expert=expert, experts=3, clustering="c")


def test_note_missing_or_damaged(tmp_path):
    with pytest.raises(ArtifactError, match="has no submodel.json"):
        read_submodel_note(tmp_path)
    (tmp_path / NOTE).write_text(json.dumps({"base": "x"}))
    with pytest.raises(ArtifactError, match="damaged: it needs the keys base, expert"):
        read_submodel_note(tmp_path)
