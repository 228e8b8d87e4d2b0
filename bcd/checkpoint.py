"""Checkpoints of the engine: a folder that is whole or absent.

``<tag>/state_rank<r>.pt`` holds schedule, counters, random state and a rank's AdamW state;
``<tag>/weights_rank<r>.pt`` a rank's weights (one file unless ZeRO-3 has them apart); ``latest`` names a tag.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch


def save(folder: Path, tag: str, state: dict[str, Any], backend, latest: bool) -> None:
    """Write the checkpoint from all ranks, and make it the latest if asked to."""
    partial, final = folder / f"{tag}.partial", folder / tag
    weights = backend.weights()
    if backend.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    backend.barrier()
    torch.save(state, partial / f"state_rank{backend.rank}.pt")
    if weights:
        torch.save(weights, partial / f"weights_rank{backend.rank}.pt")
    backend.barrier()
    if backend.rank == 0:
        if final.exists():
            old = folder / f"{tag}.old"
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
            os.rename(partial, final)
            shutil.rmtree(old)
        else:
            os.rename(partial, final)
        if latest:
            (folder / "latest.partial").write_text(tag)
            os.replace(folder / "latest.partial", folder / "latest")
    backend.barrier()


def find(folder: Path, tag: str | None) -> Path | None:
    """Folder of the checkpoint `tag`, or of the latest; None without a tag if there is none yet."""
    if tag is None:
        if not (folder / "latest").is_file():
            return None
        tag = (folder / "latest").read_text().strip()
    for name in (tag, f"{tag}.old"):  # the old one stands in if a process died while it was being replaced
        if (folder / name).is_dir():
            return folder / name
    raise ValueError(f"no checkpoint {tag!r} in {folder}")


def read_state(path: Path, backend) -> dict[str, Any]:
    """This rank's state; rank 0's if this rank wrote none, so that the caller sees why."""
    own = path / f"state_rank{backend.rank}.pt"
    return torch.load(own if own.is_file() else path / "state_rank0.pt", map_location="cpu", weights_only=False)


def load_weights(path: Path, backend) -> None:
    """Load the weights while no block is active."""
    own = path / f"weights_rank{backend.rank}.pt"
    weights = torch.load(own if own.is_file() else path / "weights_rank0.pt", map_location="cpu", mmap=True)
    backend.load_weights(weights)
