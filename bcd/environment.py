"""What DeepSpeed needs to start in a plain process."""

from __future__ import annotations

import os
import socket

import torch


def prepare_environment() -> None:
    """Set what DeepSpeed reads at import and at its first initialisation, where nothing set it before.

    Without a GPU: the CPU accelerator, and no compilation of its shared-memory operator. Without a launcher:
    the variables of a group of one process, or it looks for MPI.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        from deepspeed.ops import __compatible_ops__

        __compatible_ops__["deepspeed_shm_comm"] = False
