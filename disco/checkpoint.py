"""Hugging Face model folders, opened and written a tensor at a time.

Every tensor is known by its canonical key (`family.py`): the stacked and the per-expert layout of a checkpoint look
the same from here. The files themselves are `tensor_files.py`'s.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from disco.artifacts import MANIFEST, ArtifactError, file_hash, fingerprint, first_line, need_disk, read_json
from disco.family import Family, family_of, layout_of
from disco.tensor_files import Output, Stored, stored_tensors, weight_files, write_weights

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
# Old checkpoints hold this buffer; the models compute it.
ROTARY = r"rotary_emb\.inv_freq$"


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
        raise ArtifactError(f"{folder / 'config.json'}: cannot be read: {first_line(error)}") from None
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


def copy_side_files(source: Path, out: Path) -> None:
    """Copy tokenizer, chat template and generation config, as far as there are any."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


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
