"""Runs a function in several gloo processes and returns what each returned."""

import os
import socket

import torch


def run_ranks(function, world, *arguments, folder):
    """[function(*arguments) on rank r for each rank]; results pass through `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_start, (world, port, function, arguments, str(folder)), nprocs=world)
    return [torch.load(f"{folder}/result{rank}.pt", weights_only=False) for rank in range(world)]


def _start(rank, world, port, function, arguments, folder):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    torch.save(function(*arguments), f"{folder}/result{rank}.pt")
    torch.distributed.barrier()
    # gloo's threads now and then abort an interpreter that shuts down beside another; nothing is left to do.
    os._exit(0)
