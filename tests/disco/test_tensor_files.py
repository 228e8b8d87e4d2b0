import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from disco.artifacts import ArtifactError
from disco.checkpoint import Checkpoint
from disco.tensor_files import Output, as_bytes, read_header, write_weights
from tests.disco.tiny_models import same_tensors, save, tiny_model


def outputs_of(tensors: dict[str, torch.Tensor]) -> list[Output]:
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
    return [
        Output(key, names[tensor.dtype], tuple(tensor.shape), lambda data=as_bytes(tensor): [data])
        for key, tensor in tensors.items()
    ]


@settings(deadline=None, max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8),
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64]), min_size=8, max_size=8
    ),
    limit=st.integers(1, 2000),
)
def test_written_files_are_read_by_safetensors_and_by_us(tmp_path_factory, shapes, dtypes, limit):
    folder = tmp_path_factory.mktemp("w")
    tensors = {
        f"t{i}": (torch.randn(shape) * 100).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    write_weights(folder, outputs_of(tensors), max_shard_bytes=limit)
    found, ours = {}, {}
    for path in folder.glob("*.safetensors"):
        part = load_file(path)
        size = sum(tensor.nbytes for tensor in part.values())
        assert size <= limit or len(part) == 1 or size == max(tensor.nbytes for tensor in part.values())
        found |= part
        for key, stored in read_header(path).items():
            ours[key] = b"".join(stored.chunks(16))
    assert same_tensors(found, tensors)
    assert ours == {key: bytes(as_bytes(tensor)) for key, tensor in tensors.items()}
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (not (folder / "model.safetensors").exists())
    if index.exists():
        recorded = json.loads(index.read_text())
        assert recorded["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        assert set(recorded["weight_map"]) == set(tensors)


def test_tensors_are_aligned_as_far_as_sizes_allow(tmp_path):
    tensors = {"a": torch.ones(3), "b": torch.ones(7, dtype=torch.float16), "c": torch.ones(16)}
    write_weights(tmp_path, outputs_of(tensors))
    begin = {key: stored.begin for key, stored in read_header(tmp_path / "model.safetensors").items()}
    assert begin["c"] % 64 == 0 and begin["a"] % 4 == 0 and begin["b"] % 2 == 0


def test_values_are_replaced_in_place(tmp_path):
    save(tiny_model("mixtral", 2), tmp_path)
    key = "model.layers.1.block_sparse_moe.gate.weight"
    stored = Checkpoint.open(tmp_path).tensors[key]
    before = load_file(tmp_path / "model.safetensors")
    stored.write(torch.full(stored.shape, 2.5))
    after = load_file(tmp_path / "model.safetensors")
    assert (after[key] == 2.5).all()
    assert all(torch.equal(after[other], before[other]) for other in before if other != key)
    for wrong in (torch.ones(2, 23), torch.ones(2, 24, dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"model.safetensors: holds F32 \(2, 24\), not"):
            stored.write(wrong)


def test_a_row_and_a_part_of_a_tensor(tmp_path):
    values = torch.arange(24.0).reshape(4, 3, 2)
    save_file({"a": values}, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")["a"]
    assert torch.equal(stored.row(2).read(), values[2:3])
    assert torch.equal(stored.part(6, (3, 2)).read(), values[1])
    assert stored.bytes == 96


def test_writer_notices_wrong_bytes(tmp_path):
    with pytest.raises(ArtifactError, match="bytes written, .* expected"):
        write_weights(tmp_path, [Output("a", "F32", (3,), lambda: [b"1234"])])
    assert not (tmp_path / "model.safetensors").exists()
