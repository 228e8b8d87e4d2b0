"""A LLaMA-MoE v1 checkpoint against its definition: a dense Llama whose feed-forward part is a scaled sum."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from disco.artifacts import ArtifactError
from disco.checkpoint import Checkpoint
from disco.cli import main
from disco.family import moe_blocks, num_experts, top_k
from disco.llama_moe import convert_llama_moe
from tests.disco.test_split import force
from tests.disco.tiny_models import filled, load, same_bits

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def checkpoint(folder, experts=3, scale=4.0, dtype=torch.float32, **changed):
    """A dense Llama cut into experts of equal width, as LLaMA-MoE stores it."""
    dense = filled(LlamaConfig(**SIZES), dtype)
    tensors = {}
    for key, tensor in dense.state_dict().items():
        if ".mlp." not in key:
            tensors[key] = tensor.clone()
            continue
        layer, part = key.split(".mlp.")[0], key.split(".mlp.")[1].split("_")[0]
        for e, piece in enumerate(tensor.chunk(experts, dim=1 if part == "down" else 0)):
            tensors[f"{layer}.mlp.calculator.experts.weight_{part}.{e}"] = piece.contiguous()
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.gate.gate_network.0.weight"] = torch.ones(experts, 24)
        tensors[f"model.layers.{layer}.mlp.gate.gate_network.2.weight"] = torch.ones(experts, experts)
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    folder.mkdir()
    save_file(tensors | changed, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama_moe", "num_experts": experts, "num_selects": 2, "score_scale_factor": scale}
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "gates": "mlp"}
    (folder / "config.json").write_text(json.dumps(SIZES | config))
    return dense


@pytest.mark.parametrize("scale", [4.0, [2.0, 0.5]], ids=["one scale", "a scale a layer"])
def test_each_expert_is_its_part_of_the_feed_forward_scaled(tmp_path, scale):
    dense = checkpoint(tmp_path / "in", scale=scale)
    convert_llama_moe(tmp_path / "in", tmp_path / "out")
    config = Checkpoint.open(tmp_path / "out").config
    assert (config.model_type, num_experts(config), top_k(config)) == ("mixtral", 3, 2)
    assert config.intermediate_size == 8 and config.sliding_window is None
    tokens = torch.arange(30).reshape(2, 15)
    for expert in range(3):
        converted = load(tmp_path / "out")
        force(converted, expert)
        masked = LlamaForCausalLM(dense.config).eval()
        masked.load_state_dict(dense.state_dict())
        for index, layer in enumerate(masked.model.layers):
            weight = layer.mlp.down_proj.weight.data
            weight *= scale[index] if isinstance(scale, list) else scale
            weight[:, : 8 * expert] = 0
            weight[:, 8 * expert + 8 :] = 0
        with torch.no_grad():
            wanted, found = (model(tokens, use_cache=False).logits for model in (masked, converted))
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    rows = moe_blocks(load(tmp_path / "out"))[0].router.weight
    assert rows.std().item() == pytest.approx(0.02, rel=0.3)


def test_the_command_and_dtype(tmp_path, monkeypatch, capsys):
    dense = checkpoint(tmp_path / "in", dtype=torch.bfloat16)
    monkeypatch.setattr("sys.argv", ["disco", "import-llama-moe", str(tmp_path / "in"), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    model = load(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert same_bits(model.model.embed_tokens.weight.detach(), dense.model.embed_tokens.weight.detach())


def test_refused(tmp_path):
    checkpoint(tmp_path / "in")
    with pytest.raises(ArtifactError, match="is LLaMA-MoE v1: convert it first: disco import-llama-moe"):
        Checkpoint.open(tmp_path / "in")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="is no LLaMA-MoE v1 checkpoint"):
        convert_llama_moe(tmp_path / "empty", tmp_path / "out")
    name = "model.layers.0.mlp.calculator.experts.weight_up.1"
    checkpoint(tmp_path / "uneven", **{name: torch.ones(7, 24)})
    with pytest.raises(ArtifactError, match=r"experts are \[7, 8\] wide"):
        convert_llama_moe(tmp_path / "uneven", tmp_path / "out")
    checkpoint(tmp_path / "more", **{"model.layers.0.mlp.calculator.norm": torch.ones(2)})
    with pytest.raises(ArtifactError, match="1 tensors have no place in the model, first .*calculator.norm"):
        convert_llama_moe(tmp_path / "more", tmp_path / "out")
