"""Safetensors files written by many ranks into one folder, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

PARTIAL = ".partial"
CHUNK = 1 << 31  # bytes gathered before a file is written


class WriteError(RuntimeError):
    """A checkpoint that could not be written; what was there before is kept."""


class Writer:
    """Collects this rank's tensors and writes a file whenever ``limit`` bytes are there.

    Errors are kept until ``finish``, so that this rank goes on taking part in collectives.
    """

    def __init__(self, folder: Path, limit: int = CHUNK) -> None:
        self._folder, self._limit = folder, limit
        self._rank = dist.get_rank()
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0
        self.files: dict[str, dict[str, int]] = {}  # file: key: bytes
        self.error: str | None = None

    def add(self, key: str, tensor: Tensor) -> None:
        """Take a copy of ``tensor``."""
        if self._waiting and self._bytes + tensor.nbytes > self._limit:
            self._flush()
        self._waiting[key] = tensor.detach().to("cpu", copy=True).contiguous()
        self._bytes += tensor.nbytes

    def finish(self) -> list[dict[str, dict[str, int]]]:
        """Write the rest; what every rank wrote, ``[rank][file][key] = bytes``. A collective call.

        Raises:
            WriteError: on all ranks, when one could not write; nothing of the new files is left.
        """
        self._flush()
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, (self.error, self.files))
        failed = [(rank, error) for rank, (error, _) in enumerate(found) if error]
        if failed:
            for file in self.files:
                (self._folder / file).unlink(missing_ok=True)
            rank, error = failed[0]
            raise WriteError(f"rank {rank} could not write to {self._folder}: {error}: make room or choose another")
        return [files for _, files in found]

    def _flush(self) -> None:
        if not self._waiting:
            return
        name = f"rank-{self._rank:05d}-{len(self.files):05d}.safetensors{PARTIAL}"
        try:
            if self.error is None:
                save_file(self._waiting, self._folder / name, metadata={"format": "pt"})
                self.files[name] = {key: tensor.nbytes for key, tensor in self._waiting.items()}
        except (OSError, SafetensorError) as error:
            self.error = str(error).splitlines()[0]
        self._waiting, self._bytes = {}, 0


class Reader:
    """Slices of tensors that are spread over the safetensors files of a folder; files are opened once."""

    def __init__(self, folder: Path, file_of: dict[str, str]) -> None:
        self._folder, self._file_of = folder, file_of
        self._open: dict[str, safe_open] = {}

    @classmethod
    def of_model(cls, folder: str | os.PathLike) -> Reader:
        """The reader of a Hugging Face checkpoint.

        Raises:
            ValueError: no safetensors checkpoint there, or one that can't be read.
        """
        folder = Path(folder)
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        try:
            if index.exists():
                return cls(folder, json.loads(index.read_text())["weight_map"])
            if single.exists():
                with safe_open(single, "pt") as file:
                    return cls(folder, dict.fromkeys(file.keys(), single.name))
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise ValueError(f"{folder} can't be read as a checkpoint ({error}): give another") from None
        raise ValueError(f"{folder} holds no safetensors checkpoint: give a folder that save_pretrained wrote")

    def __contains__(self, key: str) -> bool:
        return key in self._file_of

    def slice_of(self, key: str, shape: tuple[int, ...]):
        """A tensor to be indexed, of which only what is indexed is read.

        Raises:
            ValueError: no such tensor, another shape, or a file that is damaged.
        """
        if key not in self._file_of:
            raise ValueError(f"{self._folder} has no tensor {key}: give a checkpoint of this model")
        name = self._file_of[key]
        try:
            if name not in self._open:
                self._open[name] = safe_open(self._folder / name, "pt")
            found = self._open[name].get_slice(key)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self._folder / name} can't be read ({error}): the checkpoint is damaged") from None
        if tuple(found.get_shape()) != tuple(shape):
            raise ValueError(
                f"{key} in {self._folder} has shape {found.get_shape()} but the model's has {list(shape)}: "
                "give a checkpoint of this model"
            )
        return found

    def read(self, key: str, shape: tuple[int, ...]) -> Tensor:
        """The whole tensor; a scalar too."""
        found = self.slice_of(key, shape)
        return found[:] if shape else self._open[self._file_of[key]].get_tensor(key)


def replace_text(path: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    partial = path.with_name(path.name + PARTIAL)
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def first_rank_says(call):
    """``call()`` on rank 0; its ValueError or OSError is raised on all ranks. A collective call."""
    said: list = [None]
    if dist.get_rank() == 0:
        try:
            call()
        except (ValueError, OSError) as error:
            said = [str(error)]
    dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise ValueError(said[0])
