"""Safetensors files read and written as byte ranges, one tensor or one chunk of it at a time.

Files are read with plain positioned reads instead of a memory map, so that resident memory does not grow with the
file, and copied tensors keep their bits whatever their dtype.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from disco.artifacts import ArtifactError, first_line, read_json, write_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK_BYTES = 1 << 19  # fits a processor's cache, in float64 too
ALIGNMENT = 64
BYTES_OF = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAME_OF = {dtype: name for name, dtype in FLOATS.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor on disk: `shape` elements of safetensors dtype `dtype` at byte `begin` of `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES_OF[self.dtype]

    def part(self, start: int, shape: tuple[int, ...]) -> "Stored":
        """The tensor of `shape` that begins at element `start`."""
        return replace(self, begin=self.begin + start * BYTES_OF[self.dtype], shape=tuple(shape))

    def row(self, index: int) -> "Stored":
        """Row `index` as a tensor of one row."""
        return self.part(index * math.prod(self.shape[1:]), (1, *self.shape[1:]))

    def chunks(self, size: int = CHUNK_BYTES) -> Iterator[bytearray]:
        """The raw bytes, at most `size` at a time (a multiple of every dtype's width)."""
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin)
            for done in range(0, self.bytes, size):
                buffer = bytearray(min(size, self.bytes - done))
                if file.readinto(buffer) != len(buffer):
                    raise ArtifactError(f"{self.path}: ends before byte {self.begin + self.bytes}: truncated")
                yield buffer

    def filled(self, value: float) -> Iterator[memoryview]:
        """Chunks of a tensor like this one (of a floating-point dtype) in which every element is `value`."""
        for done in range(0, self.bytes, CHUNK_BYTES):
            count = min(CHUNK_BYTES, self.bytes - done) // BYTES_OF[self.dtype]
            yield as_bytes(torch.full((count,), value, dtype=FLOATS[self.dtype]))

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of all elements (floating-point dtypes)."""
        total = squares = 0.0
        for chunk in self.chunks():
            values = as_tensor(chunk, self.dtype).double()
            total += values.sum().item()
            squares += values.square().sum().item()
        mean = total / math.prod(self.shape)
        return mean, math.sqrt(max(0.0, squares / math.prod(self.shape) - mean**2))

    def read(self) -> torch.Tensor:
        """The tensor itself (floating-point dtypes)."""
        flat = [as_tensor(chunk, self.dtype) for chunk in self.chunks()]
        return torch.cat(flat or [torch.empty(0, dtype=FLOATS[self.dtype])]).reshape(self.shape)

    def write(self, tensor: torch.Tensor) -> None:
        """Replace the values in place; shape and dtype must be those stored."""
        if tuple(tensor.shape) != self.shape or NAME_OF.get(tensor.dtype) != self.dtype:
            raise ValueError(
                f"{self.path}: holds {self.dtype} {self.shape}, not {tensor.dtype} {tuple(tensor.shape)}"
            )
        with open(self.path, "r+b") as file:
            file.seek(self.begin)
            file.write(as_bytes(tensor))


def seeded(*name) -> torch.Generator:
    """A generator whose numbers depend on the values in `name` alone."""
    digest = hashlib.sha256(" ".join(map(str, name)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def as_tensor(data: bytearray, dtype: str) -> torch.Tensor:
    return torch.frombuffer(data, dtype=FLOATS[dtype])


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a model folder by its name on disk, index and headers checked."""
    if not (folder / INDEX).is_file():
        if not (folder / WEIGHTS).is_file():
            raise ArtifactError(f"{folder}: has neither {WEIGHTS} nor {INDEX}: save it with safetensors")
        return read_header(folder / WEIGHTS)
    weight_map = weight_map_of(folder)
    tensors = {}
    for shard in sorted(set(weight_map.values())):
        path = folder / shard
        if not path.is_file():
            raise ArtifactError(f"{path}: missing, though {INDEX} names it")
        for key, stored in read_header(path).items():
            if weight_map.get(key) != shard:
                place = weight_map.get(key, "nowhere")
                raise ArtifactError(f"{path}: holds {key}, which {INDEX} places in {place}")
            tensors[key] = stored
    for key, shard in weight_map.items():
        if key not in tensors:
            raise ArtifactError(f"{folder / shard}: lacks {key}, which {INDEX} places there")
    return tensors


def weight_map_of(folder: Path) -> dict[str, str]:
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ArtifactError(f"{folder / INDEX}: damaged: it has no weight_map")
    return weight_map


def read_header(path: Path) -> dict[str, Stored]:
    """Where each tensor of a safetensors file lies. Raises ArtifactError where the file is damaged."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ArtifactError(f"{path}: damaged: {size} bytes do not hold its header")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            spans = sorted((entry["data_offsets"], key) for key, entry in header.items())
            tensors, end = {}, 0
            for (first, last), key in spans:
                entry = header[key]
                stored = Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + length + first)
                if first != end or last - first != stored.bytes:
                    raise ValueError(f"{key} has offsets {first}..{last}")
                tensors[key], end = stored, last
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{path}: damaged header: {first_line(error)}") from None
    if 8 + length + end != size:
        raise ArtifactError(f"{path}: {size} bytes, its header says {8 + length + end}: truncated or damaged")
    return {key: tensors[key] for key in header}


@dataclass(frozen=True)
class Output:
    """A tensor to be written: `chunks()` yields its bytes in order."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES_OF[self.dtype]

    @classmethod
    def copy(cls, key: str, stored: Stored) -> "Output":
        return cls(key, stored.dtype, stored.shape, stored.chunks)

    @classmethod
    def cast(cls, key: str, stored: Stored, dtype: torch.dtype) -> "Output":
        """The stored values in another floating-point dtype; anything else is copied."""
        if stored.dtype not in FLOATS or stored.dtype == NAME_OF[dtype]:
            return cls.copy(key, stored)

        def chunks() -> Iterator[memoryview]:
            for chunk in stored.chunks():
                yield as_bytes(as_tensor(chunk, stored.dtype).to(dtype))

        return cls(key, NAME_OF[dtype], stored.shape, chunks)


def write_weights(folder: Path, outputs: list[Output], max_shard_bytes: int = 2_000_000_000) -> None:
    """Write tensors as `model.safetensors`, or as shards of at most `max_shard_bytes` with an index.

    A shard bears its name only when whole, the index is written last, and the bytes depend on nothing but the
    outputs. A tensor larger than `max_shard_bytes` has a shard of its own.
    """
    shards: list[list[Output]] = [[]]
    filled = 0
    for output in outputs:
        if shards[-1] and filled + output.bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(output)
        filled += output.bytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / name, shard)
        weight_map |= {output.key: name for output in shard}
    if len(shards) > 1:
        total = sum(output.bytes for output in outputs)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_shard(path: Path, outputs: list[Output]) -> None:
    # The format allows no gaps; in this order no tensor is aligned worse than its size is divisible. Files are
    # memory-mapped by their readers, and both speed and last bits of matrix products depend on alignment.
    outputs = sorted(outputs, key=lambda output: -math.gcd(output.bytes, ALIGNMENT))
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in outputs:
        header[output.key] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [end, end + output.bytes],
        }
        end += output.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for output in outputs:
            for chunk in output.chunks():
                file.write(chunk)
        if file.tell() != 8 + len(text) + end:
            raise ArtifactError(f"{path}: {file.tell()} bytes written, {8 + len(text) + end} expected")
    os.replace(temporary, path)


def weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return [folder / name for name in sorted(set(weight_map_of(folder).values()))]
    return [folder / WEIGHTS]
