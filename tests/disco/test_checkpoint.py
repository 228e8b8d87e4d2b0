import json
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from disco import artifacts
from disco.artifacts import ArtifactError
from disco.checkpoint import Checkpoint, expected, identity, tokenizer_identity, write_model
from disco.tensor_files import Output
from tests.disco.tiny_models import FAMILIES, load, same_tensors, save, tiny_config, tiny_model


@pytest.mark.parametrize("name", FAMILIES)
def test_load_save_load_is_byte_stable(tmp_path, name):
    save(tiny_model(name, 3), tmp_path / "a")
    previous = tmp_path / "a"
    written = []
    for step in ("b", "c"):
        (folder := tmp_path / step).mkdir()
        source = Checkpoint.open(previous)
        write_model(folder, source.config, [Output.copy(*item) for item in source.tensors.items()], "a model")
        written.append((folder / "model.safetensors").read_bytes())
        previous = folder
    assert written[0] == written[1]
    model = load(previous)
    assert same_tensors(load(tmp_path / "a").state_dict(), model.state_dict())
    for step, saved in (("d", model), ("e", None)):  # and so by transformers
        (saved or load(tmp_path / "d")).save_pretrained(tmp_path / step)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "e" / name).read_bytes()


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_from_the_config_alone_are_those_on_disk(tmp_path, name):
    save(tiny_model(name, 3), tmp_path / "m")
    shapes, tied, *_ = expected(tiny_config(name, 3))
    stored = {key: value.shape for key, value in Checkpoint.open(tmp_path / "m").tensors.items()}
    assert {key: shape for key, shape in shapes.items() if key not in tied} == stored


def test_a_tied_head_that_is_stored_too_is_left_out(tmp_path):
    save(tiny_model("qwen2_moe tied", 2), tmp_path)
    before = Checkpoint.open(tmp_path).tensors
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert Checkpoint.open(tmp_path).tensors.keys() == before.keys()


class TestDamaged:
    @pytest.fixture
    def folder(self, tmp_path):
        return save(tiny_model("qwen2_moe", 3), tmp_path / "m", max_shard_size="15KB")

    @pytest.fixture
    def single(self, tmp_path):
        return save(tiny_model("qwen2_moe", 3), tmp_path / "s")

    def refuse(self, folder, match):
        with pytest.raises(ArtifactError, match=match):
            Checkpoint.open(folder)

    def shard(self, folder, number=1):
        return sorted(folder.glob("model-*.safetensors"))[number]

    def test_not_a_model_folder(self, tmp_path):
        self.refuse(tmp_path, "has no config.json")
        tiny_config().save_pretrained(tmp_path)
        self.refuse(tmp_path, "has neither model.safetensors nor model.safetensors.index.json")
        (tmp_path / "config.json").write_text("{")
        self.refuse(tmp_path, "config.json: cannot be read")

    def test_shard_missing(self, folder):
        self.shard(folder).unlink()
        self.refuse(folder, "model-00002-of-.*: missing, though model.safetensors.index.json names it")

    @pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
    def test_shard_truncated(self, folder, keep):
        path = self.shard(folder)
        path.write_bytes(path.read_bytes()[:keep])
        self.refuse(folder, f"{path.name}: .*(damaged|truncated)")

    def test_shard_with_more_bytes(self, folder):
        path = self.shard(folder)
        path.write_bytes(path.read_bytes() + b"x")
        self.refuse(folder, f"{path.name}: .*truncated or damaged")

    def test_shards_swapped(self, folder):
        first, second = self.shard(folder, 0), self.shard(folder, 1)
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
        self.refuse(folder, f"{first.name}: holds .*, which model.safetensors.index.json places in {second.name}")

    def edit_index(self, folder, change):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        path.write_text(json.dumps(change(index)))

    def test_index_places_a_tensor_elsewhere(self, folder):
        def change(index):
            index["weight_map"]["model.norm.weight"] = self.shard(folder, 0).name
            return index

        self.edit_index(folder, change)
        self.refuse(folder, "model.norm.weight, which model.safetensors.index.json places ")

    def test_index_lacks_a_tensor(self, folder):
        def change(index):
            del index["weight_map"]["model.norm.weight"]
            return index

        self.edit_index(folder, change)
        self.refuse(folder, "holds model.norm.weight, which model.safetensors.index.json places in nowhere")

    def test_index_names_a_tensor_that_is_nowhere(self, folder):
        def change(index):
            index["weight_map"]["model.more"] = self.shard(folder, 0).name
            return index

        self.edit_index(folder, change)
        self.refuse(folder, "lacks model.more, which model.safetensors.index.json places there")

    @pytest.mark.parametrize("index", [{}, [], {"weight_map": {}}, {"weight_map": 3}])
    def test_index_without_a_map(self, folder, index):
        self.edit_index(folder, lambda _: index)
        self.refuse(folder, "index.json: damaged: it has no weight_map")
        with pytest.raises(ArtifactError, match="it has no weight_map"):
            identity(folder)

    def test_index_that_is_no_json(self, folder):
        (folder / "model.safetensors.index.json").write_text("{")
        self.refuse(folder, "index.json: damaged")

    @pytest.mark.parametrize(
        "header",
        [
            b"no json",
            b"[]",
            b'{"a": 3}',
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
            b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
            b'{"a": {"dtype": "F32", "data_offsets": [0, 4]}}',
            b"\xff\xfe",
        ],
    )
    def test_header(self, single, header):
        path = single / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
        self.refuse(single, "model.safetensors: (damaged|.*truncated)")

    def rewrite(self, folder, change):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    def test_missing_key(self, single):
        self.rewrite(single, lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
        self.refuse(single, "1 tensors are missing, first model.layers.1.mlp.experts.2.up_proj.weight")

    def test_unexpected_key(self, single):
        self.rewrite(single, lambda tensors: tensors.update(more=torch.ones(2)))
        self.refuse(single, "1 tensors have no place in the model, first more")

    def test_other_shape(self, single):
        self.rewrite(single, lambda tensors: tensors.update({"model.norm.weight": torch.ones(25)}))
        self.refuse(single, r"model.norm.weight is \[25\], the config says \[24\]")

    def test_both_layouts_of_an_expert(self, single):
        stacked = {"model.layers.1.mlp.experts.down_proj": torch.ones(3, 24, 8)}
        self.rewrite(single, lambda tensors: tensors.update(stacked))
        self.refuse(single, "holds model.layers.1.mlp.experts.0.down_proj.weight twice")

    def test_truncated_while_being_read(self, single):
        stored = Checkpoint.open(single).tensors["model.norm.weight"]
        path = single / "model.safetensors"
        path.write_bytes(path.read_bytes()[: stored.begin + 3])
        with pytest.raises(ArtifactError, match="ends before byte .*: truncated"):
            stored.read()


class TestIdentity:
    def test_content_decides(self, tmp_path):
        model = tiny_model("mixtral", 2)
        a, b = save(model, tmp_path / "a"), save(model, tmp_path / "b")
        assert identity(a) == identity(b)
        copied = shutil.copytree(a, tmp_path / "c")
        (copied / "generation_config.json").unlink()
        assert identity(copied) == identity(a)
        stored = Checkpoint.open(b).tensors["model.norm.weight"]
        stored.write(stored.read() * 2)
        assert identity(b) != identity(a)

    def test_a_manifest_saves_the_reading(self, tmp_path, monkeypatch):
        with artifacts.stage_folder(tmp_path / "s", stage="s", inputs={}, section=None, seed=0) as out:
            save(tiny_model("mixtral", 2), out)
        copied = shutil.copytree(tmp_path / "s", tmp_path / "c")
        (copied / "manifest.json").unlink()
        wanted = identity(copied)
        monkeypatch.setattr("disco.checkpoint.file_hash", None)
        assert identity(tmp_path / "s") == wanted

    def test_missing_file(self, tmp_path):
        with pytest.raises(ArtifactError, match="config.json: missing from the model folder"):
            identity(tmp_path)

    def test_tokenizer(self, tmp_path):
        assert tokenizer_identity(tmp_path) is None
        (tmp_path / "tokenizer.model").write_bytes(b"abc")
        pieces = tokenizer_identity(tmp_path)
        assert pieces is not None
        tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [], "padding": None}
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        first = tokenizer_identity(tmp_path)
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"padding": {"length": 9}}, indent=3))
        assert tokenizer_identity(tmp_path) == first != pieces
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"model": {"vocab": {"a": 1}}}))
        assert tokenizer_identity(tmp_path) != first


STREAMED = """
import resource, sys, torch
from disco.merge import merge
from disco.split import split
full, out, experts = sys.argv[1], sys.argv[2], int(sys.argv[3])
def run(layers, name):
    folders = [f"{out}/{name}{e}" for e in range(experts)]
    for e, folder in enumerate(folders):
        split(f"{full}{layers}", e, folder)
        with open(folder + "/model.safetensors", "r+b") as file:  # no two shared parts alike
            file.seek(-4, 2)
            file.write(bytes([0, 0, 128, 62 + e]))
    merge(f"{full}{layers}", folders, f"{out}/{name}", original=f"{full}{layers}")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = run(1, "small")
print((run(6, "large") - small) / 1024)
"""


def test_peak_memory_does_not_grow_with_the_model(tmp_path):
    keys = dict(hidden_size=256, moe_intermediate_size=512, vocab_size=500, num_experts_per_tok=1)
    for layers in (1, 6):
        model = tiny_model("qwen2_moe", 4, num_hidden_layers=layers, **keys)
        save(model, tmp_path / f"full{layers}")
    grown = (tmp_path / "full6" / "model.safetensors").stat().st_size / 2**20
    grown -= (tmp_path / "full1" / "model.safetensors").stat().st_size / 2**20
    command = [sys.executable, "-c", STREAMED, str(tmp_path / "full"), str(tmp_path), "4"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert grown > 30 and float(found.stdout) < grown / 3


def test_quantised_weights_are_refused(tmp_path):
    config = tiny_config("gpt_oss", 3)
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=r"its weights are quantised \(mxfp4\): save it dequantised first"):
        Checkpoint.open(tmp_path)


def test_layers_that_transformers_does_not_load_are_left_out(tmp_path):
    save(tiny_model("deepseek_v3", 3), tmp_path)
    before = Checkpoint.open(tmp_path).tensors
    tensors = load_file(tmp_path / "model.safetensors") | {"model.layers.61.eh_proj.weight": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert Checkpoint.open(tmp_path).tensors.keys() == before.keys()
