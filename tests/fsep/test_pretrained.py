"""Hugging Face checkpoints in and out of sharded models, in real processes."""

import json

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import fsep
from fsep.families import FAMILIES as SHARDED
from fsep.sharding import sharded_layers
from tests.bcd.ranks import run_ranks
from tests.disco.tiny_models import FAMILIES, load, same_bits, tiny_config, tiny_model
from tests.fsep.sharded import EXPERTS, attached, expected, start_engine, train

NAMES = [name for name, (model_type, _) in FAMILIES.items() if model_type in SHARDED]


def on_two_ranks(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {"same": [], "joined": [], "refused": []}
    for number, name in enumerate(NAMES):
        model = attached(name)
        counting = CountExperts(model)
        fsep.save_pretrained(model, f"{folder}/{number}", max_file_bytes=4000)
        found["joined"].append(counting.most)
        # What Hugging Face wrote, one file or many, per-expert or stacked, read into a model on the meta device.
        source = f"{folder}/huggingface{number}"
        if rank == 0:
            tiny_model(name, experts=EXPERTS).save_pretrained(
                source, max_shard_size="10KB" if number % 2 else "1GB", save_original_format=number != 1
            )
        dist.barrier()
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(tiny_config(name, experts=EXPERTS))
        fsep.load_pretrained(fsep.attach(empty, slots=EXPERTS), source)
        dense = tiny_model(name, experts=EXPERTS)
        found["same"].append(
            all(same_bits(p.data, expected(n, dense, p.shape)) for n, p in empty.named_parameters())
            and empty.eval()(input_ids=torch.arange(6)[None]).logits.isfinite().all().item()
        )
        found.setdefault("logits", []).append(
            (empty(input_ids=torch.arange(6)[None]).logits - dense(input_ids=torch.arange(6)[None]).logits)
            .abs()
            .max()
            .item()
        )
    model = attached("mixtral")
    engine = start_engine(model, 2, dtype="bf16")
    train(engine, 2)
    fsep.save_pretrained(engine, f"{folder}/trained")
    fsep.save_pretrained(engine, f"{folder}/half", dtype=torch.float16)
    engine.eval()
    with torch.no_grad():
        found["trained"] = engine(input_ids=torch.arange(6)[None]).logits
    found["refused"] = messages(folder, engine)
    return found


def messages(folder, engine):
    other = attached("qwen2_moe")
    damaged = f"{folder}/damaged"
    if dist.get_rank() == 0:
        tiny_model("qwen2_moe", experts=EXPERTS).save_pretrained(damaged)
        with open(f"{damaged}/model.safetensors", "r+b") as file:
            file.truncate(3000)
        open(f"{folder}/file", "w").close()
    dist.barrier()
    calls = (
        lambda: fsep.load_pretrained(other, folder),
        lambda: fsep.load_pretrained(other, f"{folder}/trained"),
        lambda: fsep.load_pretrained(other, damaged),
        lambda: fsep.load_pretrained(engine.module, f"{folder}/trained"),
        lambda: fsep.save_pretrained(other, f"{folder}/file"),
        lambda: other.save_pretrained(f"{folder}/other"),
        lambda: fsep.save_pretrained(tiny_model(), f"{folder}/other"),
        lambda: full_disk(other, folder),
    )
    found = []
    for call in calls:
        try:
            call()
            found.append("")
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    return found


def full_disk(model, folder):
    """Writing fails on rank 1 alone."""
    import fsep.files

    def fails(*_, **__):
        raise OSError("No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(fsep.files, "save_file", fails)
        fsep.save_pretrained(model, f"{folder}/trained")


class CountExperts:
    """The most experts of which this rank held all values at a time."""

    def __init__(self, model):
        self._rebuilder = sharded_layers(model)[0].runtime.rebuilder
        self._size = dist.get_world_size() * sharded_layers(model)[0].shard.shape[1]

    @property
    def most(self):
        return self._rebuilder.meter.peak / self._size


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    return folder, run_ranks(on_two_ranks, 2, str(folder), folder=folder)


@pytest.mark.parametrize("number, name", enumerate(NAMES))
def test_saved_model_is_the_dense_one(two, number, name):
    folder, ranks = two
    dense, again = tiny_model(name, experts=EXPERTS), load(folder / str(number))
    assert all(same_bits(a, b) for a, b in zip(dense.parameters(), again.parameters(), strict=True))
    index = json.loads((folder / str(number) / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in (folder / str(number)).glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) > 2
    assert not list((folder / str(number)).glob("*.partial"))
    assert all(found["joined"][number] <= 3 for found in ranks)  # of five, on two ranks


@pytest.mark.parametrize("number, name", enumerate(NAMES))
def test_a_model_on_the_meta_device_is_filled(two, number, name):
    for found in two[1]:
        assert found["same"][number]
        assert found["logits"][number] < 1e-5


def test_trained_engine_is_saved_and_survives_a_full_disk(two):
    folder, ranks = two
    model = load(folder / "trained")
    assert model.dtype == torch.bfloat16
    difference = model(input_ids=torch.arange(6)[None]).logits - ranks[0]["trained"]
    assert difference.abs().max() <= 0.02 * ranks[0]["trained"].abs().max()
    assert load(folder / "half").dtype == torch.float16


@pytest.mark.parametrize(
    "number, words",
    enumerate(
        [
            "holds no safetensors checkpoint",
            "has no tensor model.layers.0.mlp.experts.0.",
            "damaged",
            "before deepspeed.initialize",
            "is a file: give a folder",
            "call fsep.save_pretrained",
            "has no sharded experts",
            "rank 1 could not write to",
        ]
    ),
)
def test_refusals(two, number, words):
    assert all(words in found["refused"][number] for found in two[1])
