"""Upcycled models against Hugging Face's dense ones."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from disco import pipeline
from disco.checkpoint import Checkpoint
from disco.config import ConfigError, Experiment
from disco.family import family_of, moe_blocks, num_experts, renormalizes, top_k
from disco.model_section import Upcycle
from disco.start import described_model, model_config
from disco.tensor_files import Output, write_weights
from disco.upcycle import TARGETS, upcycle, upcycled_config
from tests.disco.tiny_experiment import corpus, tiny_experiment
from tests.disco.tiny_models import COMMON, filled, load, same_bits, save

DENSE = {key: value for key, value in COMMON.items() if key != "num_experts_per_tok"} | {"intermediate_size": 40}
OWN = {
    "llama": {
        "tie_word_embeddings": True,
        "head_dim": 10,
        "rope_parameters": {"rope_theta": 5e3, "rope_type": "default"},
    },
    "mistral": {"sliding_window": 5},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 10, "attention_bias": True},
    "olmo2": {"num_hidden_layers": 1},
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def dense_config(name, **keys):
    return AutoConfig.for_model(name, **{**DENSE, **OWN[name], **keys})


def dense(folder, name="llama", dtype=torch.float32, **keys):
    return save(filled(dense_config(name, **keys), dtype), folder)


def logits(folder, implementation="eager"):
    model = load(folder, experts=implementation) if family(folder) else load_dense(folder)
    tokens = torch.arange(42).reshape(2, 21)
    positions = torch.arange(21).remainder(8).expand(2, 21)
    with torch.no_grad():
        return model(tokens, position_ids=positions, use_cache=False).logits.float()


def family(folder):
    return AutoConfig.from_pretrained(folder).model_type not in TARGETS


def load_dense(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def upcycled(tmp_path, name="out", seed=0, dtype=torch.float32, single=False, **section):
    section = Upcycle(**({"experts": 3} | section))
    upcycle(tmp_path / "dense", tmp_path / name, section, seed=seed, dtype=dtype, single_expert=single)
    return tmp_path / name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OWN)
def test_identical_experts_are_the_dense_model(tmp_path, name, dtype):
    wanted = logits(dense(tmp_path / "dense", name, dtype))
    for top in (1, 2, 3):
        out = upcycled(tmp_path, str(top), top_k=top, dtype=dtype)
        config = Checkpoint.open(out).config
        assert (config.model_type, num_experts(config), top_k(config)) == (TARGETS[name].model_type, 3, top)
        assert renormalizes(config)
        for implementation in ("eager", "grouped_mm"):
            found = logits(out, implementation)
            assert (found - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max(), (top, implementation)
    single = upcycled(tmp_path, "single", dtype=dtype, single=True)
    assert num_experts(Checkpoint.open(single).config) == 1
    assert (logits(single) - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("name", OWN)
def test_split_experts_sum_to_the_dense_model(tmp_path, name):
    wanted = logits(dense(tmp_path / "dense", name))
    out = upcycled(tmp_path, experts=5, top_k=5, method="split")
    model = load(out)
    assert all(block.experts.down_proj.shape == (5, 24, 8) for block in moe_blocks(model))
    for block in moe_blocks(model):  # equal weights
        block.router.weight.data.zero_()
    save(model, tmp_path / "even")
    assert (logits(tmp_path / "even") - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_split_deals_out_each_neuron_once(tmp_path):
    dense(tmp_path / "dense")
    whole = load_dense(tmp_path / "dense").model.layers[1].mlp
    block = moe_blocks(load(upcycled(tmp_path, experts=5, method="split")))[1].experts
    neurons = [row for e in range(5) for row in block.gate_up_proj[e, :8]]
    found = [int((whole.gate_proj.weight == row).all(1).nonzero()) for row in neurons]
    assert sorted(found) == list(range(40)) and found != sorted(found)
    for e in range(5):
        mine = found[8 * e : 8 * e + 8]
        assert torch.equal(block.gate_up_proj[e, 8:], whole.up_proj.weight[mine])
        assert torch.equal(block.down_proj[e], 5 * whole.down_proj.weight[:, mine])


def test_drop_draws_a_share_of_each_experts_neurons_anew(tmp_path):
    dense(tmp_path / "dense", intermediate_size=200)
    whole = load_dense(tmp_path / "dense").model.layers[0].mlp
    block = moe_blocks(load(upcycled(tmp_path, method="drop", drop=0.3)))[0].experts
    kept = []
    for e in range(3):
        same = (block.gate_up_proj[e, :200] == whole.gate_proj.weight).all(1)
        assert same.sum() == 140
        assert torch.equal((block.gate_up_proj[e, 200:] == whole.up_proj.weight).all(1), same)
        assert torch.equal((block.down_proj[e] == whole.down_proj.weight).all(0), same)
        assert block.down_proj[e][:, ~same].std().item() == pytest.approx(
            whole.down_proj.weight.std().item(), rel=0.1
        )
        kept.append(same)
    assert not torch.equal(kept[0], kept[1])


def test_noise_is_relative_and_seeded(tmp_path):
    dense(tmp_path / "dense", intermediate_size=200)
    whole = load_dense(tmp_path / "dense").model.layers[0].mlp.down_proj.weight
    folders = [upcycled(tmp_path, str(i), seed=seed, noise=0.1) for i, seed in enumerate([1, 1, 2])]
    experts = moe_blocks(load(folders[0]))[0].experts.down_proj
    for e in range(3):
        assert (experts[e] - whole).std().item() == pytest.approx(0.1 * whole.std().item(), rel=0.05)
    assert not torch.equal(experts[0], experts[1])
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]


def test_shared_part_and_companions_are_kept_bit_for_bit(tmp_path):
    dense(tmp_path / "dense", "qwen3", torch.bfloat16)
    (tmp_path / "dense" / "chat_template.jinja").write_text("x")
    out = upcycled(tmp_path, dtype=torch.bfloat16)
    before, after = Checkpoint.open(tmp_path / "dense", dense=True).tensors, Checkpoint.open(out).tensors
    kept = [key for key in before if ".mlp." not in key]
    assert len(kept) > 15 and all(same_bits(before[key].read(), after[key].read()) for key in kept)
    assert (out / "chat_template.jinja").exists() and (out / "generation_config.json").exists()
    rows = [after[key].read() for key in after if family_of(Checkpoint.open(out).config).role(key).kind == "router"]
    assert all(0.01 < row.float().std() < 0.03 and not torch.equal(row[0], row[1]) for row in rows)


def test_shards_of_the_dense_model(tmp_path):
    dense(tmp_path / "dense")
    tensors = Checkpoint.open(tmp_path / "dense", dense=True).tensors
    (tmp_path / "dense" / "model.safetensors").rename(tmp_path / "dense" / "old.safetensors")
    moved = {
        key: vars(stored) | {"path": stored.path.with_name("old.safetensors")} for key, stored in tensors.items()
    }
    outputs = [Output.copy(key, type(tensors[key])(**moved[key])) for key in tensors]
    write_weights(tmp_path / "dense", outputs, 9000)
    upcycled(tmp_path)


@pytest.mark.parametrize(
    "name, keys, section, match",
    [
        ("llama", {"attention_bias": True}, {}, "llama with attention_bias = True has no counterpart: mixtral is"),
        ("llama", {"mlp_bias": True}, {}, "llama with mlp_bias = True"),
        ("qwen2", {"use_sliding_window": True}, {}, "qwen2 with use_sliding_window = True"),
        (
            "llama",
            {},
            {"experts": 3, "method": "split"},
            "experts is 3, which does not divide intermediate_size 40",
        ),
    ],
)
def test_settings_without_a_counterpart(name, keys, section, match):
    with pytest.raises(ConfigError, match=match):
        upcycled_config(dense_config(name, **keys), Upcycle(**({"experts": 3} | section)))


@pytest.mark.parametrize(
    "name, match",
    [
        ("olmo", "'olmo' cannot be upcycled: its layer norms have no weights"),
        ("gpt2", "'gpt2' cannot be upcycled: .*one of llama, mistral, olmo2, qwen2, qwen3 can"),
        ("mixtral", "'mixtral' cannot be upcycled"),
    ],
)
def test_families_without_a_counterpart(name, match):
    with pytest.raises(ConfigError, match=match):
        upcycled_config(AutoConfig.for_model(name), Upcycle(experts=3))


@pytest.mark.parametrize(
    "section, match",
    [
        ({"experts": 1}, "experts"),
        ({"experts": 2, "top_k": 3}, "top_k is 3 but there are 2 experts"),
        ({"experts": 2, "drop": 0.5}, "drop is for method drop, not copy"),
    ],
)
def test_bad_section(section, match):
    raw = {
        "name": "t",
        "model": {"source": "x", "upcycle": section},
        "corpus": {"sources": [{"name": "a", "text": ["a"]}]},
    }
    with pytest.raises(ConfigError, match=match):
        Experiment.parse(raw)


def test_experts_that_differ_are_no_single_expert(tmp_path):
    dense(tmp_path / "dense")
    with pytest.raises(ConfigError, match="experts that differ cannot begin as one"):
        upcycled(tmp_path, method="drop", single=True)


def test_config_that_is_no_dense_family():
    with pytest.raises(ConfigError, match="is 'mixtral': dense families that can be upcycled are llama, mistral"):
        model_config({"model_type": "mixtral"}, dense=True)


@pytest.mark.parametrize(
    "section",
    [
        {"experts": 2, "top_k": 2},
        pytest.param({"experts": 2, "top_k": 1, "method": "drop"}, marks=pytest.mark.slow),
    ],
    ids=["copy", "drop"],
)
def test_the_pipeline_runs_from_a_dense_config(tmp_path, section):
    corpus(tmp_path / "corpus")
    name = "qwen2" if len(section) == 2 else "llama"
    config = {key: value for key, value in OWN[name].items()} | {
        "model_type": name,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    raw = tiny_experiment(tmp_path, seed_phase={"tokens": 0}, baselines=["joint"])
    raw["finetune"] |= {"tokens": 0, "router_tokens": 0}
    raw["model"] = {"config": config, "upcycle": section}
    experiment = Experiment.parse(raw)
    assert num_experts(described_model(experiment)) == 2
    pipeline.run(experiment, until="evaluate", say=lambda text: None)
    singles = Checkpoint.open(experiment.folder / "train" / "1").config
    assert num_experts(singles) == 1
    assert (experiment.folder / "split").exists() == (len(section) == 3)
    joint = Checkpoint.open(experiment.folder / "baselines" / "joint").config
    tuned = Checkpoint.open(experiment.folder / "merge").config
    assert tuned.to_diff_dict() == joint.to_diff_dict() and num_experts(tuned) == 2
