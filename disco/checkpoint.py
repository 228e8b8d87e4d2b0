"""Hugging Face checkpoints read and written as byte ranges, one tensor or one chunk of it at a time.

Safetensors files are read with plain positioned reads instead of a memory map, so that resident memory does not
grow with the file, and copied tensors keep their bits whatever their dtype. Every tensor is known by its
canonical key (`family.py`): the stacked and the per-expert layout of a checkpoint look the same from here.
"""

import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from disco.artifacts import MANIFEST, ArtifactError, file_hash, fingerprint, need_disk, read_json, write_json
from disco.family import Family, family_of, layout_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK_BYTES = 1 << 19  # fits a processor's cache, in float64 too
ALIGNMENT = 64
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
BYTES_OF = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAME_OF = {dtype: name for name, dtype in FLOATS.items()}
# Old checkpoints hold this buffer; the models compute it.
ROTARY = r"rotary_emb\.inv_freq$"


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


@dataclass(frozen=True)
class Checkpoint:
    """A model folder: its config, and where each canonical tensor lies. Made by `open`.

    Tensors that repeat another one they are tied to are left out.
    """

    folder: Path
    config: PretrainedConfig
    tensors: dict[str, Stored]

    @classmethod
    def open(cls, folder: str | Path, dense: bool = False) -> "Checkpoint":
        """Read config, index and headers; no weights. A dense model only where `dense` allows it.

        Raises ArtifactError naming the file that is missing, damaged or indexed wrongly, and the tensor that is
        missing, unexpected or of another shape than the config says.
        """
        folder = Path(folder)
        config = load_config(folder)
        family = layout_of(config) if dense else family_of(config)
        known = expected(config)
        tensors: dict[str, Stored] = {}
        for key, stored in stored_tensors(folder).items():
            if key not in known.shapes and any(re.search(pattern, key) for pattern in known.unused):
                continue
            for piece in family.pieces(key, stored.shape):
                if piece.key in tensors:
                    raise ArtifactError(f"{folder}: holds {piece.key} twice, in {stored.path.name} as {key}")
                tensors[piece.key] = stored.part(piece.start, piece.shape)
        check_keys(config, {key: stored.shape for key, stored in tensors.items()}, str(folder))
        return cls(folder, config, {key: stored for key, stored in tensors.items() if key not in known.tied})

    @property
    def family(self) -> Family:
        return family_of(self.config)


def load_config(folder: Path) -> PretrainedConfig:
    """The config of a model folder. Raises ArtifactError where it is missing or cannot be read."""
    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{folder}: has no config.json: it is not a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises whatever its parser meets
        if "llama_moe" in str(error):
            hint = f"convert it first: disco import-llama-moe {folder} OUT"
            raise ArtifactError(f"{folder}: is LLaMA-MoE v1: {hint}") from None
        raise ArtifactError(f"{folder / 'config.json'}: cannot be read: {_first_line(error)}") from None
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method", quantized) if isinstance(quantized, dict) else quantized
        raise ArtifactError(f"{folder}: its weights are quantised ({method}): save it dequantised first")
    return config


class Expected(NamedTuple):
    """What transformers' model of a config holds."""

    shapes: dict[str, tuple[int, ...]]  # by canonical key
    tied: frozenset[str]  # keys that may be absent
    in_float32: tuple[str, ...]  # endings of keys that stay float32 in a model of bfloat16 or float16
    unused: tuple[str, ...]  # patterns of keys that a checkpoint may hold and the model ignores

    def dtype(self, key: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a tensor in a model of `dtype`."""
        return torch.float32 if key.endswith(self.in_float32) else dtype


@lru_cache(maxsize=8)
def _shapes_of(config_json: str) -> Expected:
    config = AutoConfig.for_model(**json.loads(config_json))
    family = layout_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {
        piece.key: piece.shape
        for key, tensor in model.state_dict().items()
        for piece in family.pieces(key, tensor.shape)
    }
    tied = model._tied_weights_keys if config.tie_word_embeddings else {}
    strict = tuple(sorted(model._keep_in_fp32_modules_strict or ()))
    unused = (ROTARY, *(model._keys_to_ignore_on_load_unexpected or ()))
    return Expected(shapes, frozenset(tied or ()), strict, unused)


def expected(config: PretrainedConfig) -> Expected:
    return _shapes_of(config.to_json_string(use_diff=False))


def check_keys(config: PretrainedConfig, shapes: dict[str, tuple[int, ...]], where: str) -> None:
    """Raise ArtifactError unless `shapes` are those of the config's model, key by key."""
    wanted, tied, *_ = expected(config)
    missing = [key for key in wanted if key not in shapes and key not in tied]
    unexpected = [key for key in shapes if key not in wanted]
    wrong = [key for key in shapes if key in wanted and shapes[key] != wanted[key]]
    if missing:
        raise ArtifactError(f"{where}: {len(missing)} tensors are missing, first {missing[0]}")
    if unexpected:
        raise ArtifactError(f"{where}: {len(unexpected)} tensors have no place in the model, first {unexpected[0]}")
    if wrong:
        key = wrong[0]
        raise ArtifactError(f"{where}: {key} is {list(shapes[key])}, the config says {list(wanted[key])}")


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a model folder by its name on disk, index and headers checked."""
    if not (folder / INDEX).is_file():
        if not (folder / WEIGHTS).is_file():
            raise ArtifactError(f"{folder}: has neither {WEIGHTS} nor {INDEX}: save it with safetensors")
        return read_header(folder / WEIGHTS)
    weight_map = _weight_map(folder)
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


def _weight_map(folder: Path) -> dict[str, str]:
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
            raise ArtifactError(f"{path}: damaged header: {_first_line(error)}") from None
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


def write_model(
    folder: Path,
    config: PretrainedConfig,
    outputs: list[Output],
    what: str,
    max_shard_bytes: int = 2_000_000_000,
) -> None:
    """Write a model folder: the weights, given by canonical key, as the family has them on disk, and the config.

    Raises ArtifactError, before anything is written, where the tensors are not those of the config or the disk
    is too small; `what` names the model in messages.
    """
    check_keys(config, {output.key: output.shape for output in outputs}, what)
    need_disk(folder, sum(output.bytes for output in outputs), what)
    family = layout_of(config)
    write_weights(folder, _stacked(outputs, family) if family.stacked_on_disk else outputs, max_shard_bytes)
    config.save_pretrained(folder)


def _stacked(outputs: list[Output], family: Family) -> list[Output]:
    """Experts' tensors joined, in the order of the experts, into those that hold all of them."""
    whole, parts = [], {}
    for output in outputs:
        role = family.role(output.key)
        if role.kind == "expert":
            parts.setdefault(role.template.replace("{e}.", ""), {})[role.expert] = output
        else:
            whole.append(output)
    for key, of_expert in parts.items():
        ordered = [of_expert[e] for e in sorted(of_expert)]
        shape = (len(ordered), *ordered[0].shape)
        chunks = partial(_one_after_the_other, ordered)
        whole.append(Output(key, ordered[0].dtype, shape, chunks))
    return whole


def _one_after_the_other(outputs: list[Output]) -> Iterator:
    for output in outputs:
        yield from output.chunks()


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


def copy_side_files(source: Path, out: Path) -> None:
    """Copy tokenizer, chat template and generation config, as far as there are any."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return [folder / name for name in sorted(set(_weight_map(folder).values()))]
    return [folder / WEIGHTS]


def identity(folder: Path) -> str:
    """Fingerprint of a model's config and weights, by content; a stage's manifest saves reading them."""
    paths = [folder / "config.json", *weight_files(folder)]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ArtifactError(f"{missing[0]}: missing from the model folder")
    listed = {}
    if (folder / MANIFEST).is_file():
        listed = {name: entry["sha256"] for name, entry in read_json(folder / MANIFEST)["files"].items()}
    return fingerprint({path.name: listed.get(path.name) or _hash(path) for path in paths})


def _hash(path: Path) -> str:
    stat = path.stat()
    return _hash_once(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _hash_once(path: Path, size: int, mtime_ns: int) -> str:
    return file_hash(path)


def tokenizer_identity(folder: Path) -> str | None:
    """Fingerprint of what text becomes which token; None where the folder has no tokenizer.

    Settings that change no token (padding, truncation) do not count.
    """
    if (folder / "tokenizer.json").is_file():
        tokenizer = read_json(folder / "tokenizer.json")
        return fingerprint({key: tokenizer.get(key) for key in TOKENIZER_KEYS})
    names = [name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (folder / name).is_file()]
    return fingerprint({name: file_hash(folder / name) for name in names}) if names else None


TOKENIZER_KEYS = ("model", "normalizer", "pre_tokenizer", "added_tokens")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
