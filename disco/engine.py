"""A model folder to a DeepSpeed engine, on CPU (gloo) or GPUs (nccl), with one or several processes."""

import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from disco.artifacts import ArtifactError
from disco.checkpoint import expected, load_config
from disco.config import BlockDescent, Optimizer
from disco.descent import engine_config
from disco.family import FAMILIES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def start_process_group() -> tuple[int, int, torch.device]:
    """Join the process group that torchrun described, or make one of a single process.

    Returns (rank, world size, device). Must run before DeepSpeed is imported: it settles the accelerator.
    """
    gpu = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if gpu else "cpu")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    local = int(os.environ.setdefault("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if gpu else "gloo"
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group(backend)
        else:  # a store in this process needs no port, so that any number of submodels can run side by side
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size(), device


def make_engine(
    model: nn.Module,
    section: Optimizer,
    blocks: BlockDescent | None = None,
    seed: int = 0,
    more: dict | None = None,
):
    """Wrap `model` in an engine; its parameters that require grad are trained with AdamW: by DeepSpeed all at
    once, or with `blocks` by bcd on DeepSpeed a block at a time.

    `more` are further keys of DeepSpeed's configuration. Weight decay touches matrices only. The engine averages
    gradients over processes and micro-batches.
    """
    import deepspeed

    # Compiling the shared-memory collective takes a minute and serves only many ranks of one host.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    settings = {
        "train_micro_batch_size_per_gpu": section.micro_batch,
        "gradient_accumulation_steps": section.accumulation,
        "gradient_clipping": section.clip,
        "zero_optimization": {"stage": section.zero_stage},
        "bf16": {"enabled": section.precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    } | (more or {})
    if blocks is None:
        engine, *_ = deepspeed.initialize(model=model, optimizer=lambda _: _adamw(model, section), config=settings)
    else:
        import bcd

        engine = bcd.initialize(model=model, config=engine_config(blocks, section, model, seed), ds_config=settings)
    if section.zero_stage == 3:
        deepspeed.zero.register_external_parameter(model, model.model.get_output_embeddings().weight)
    return engine


def _adamw(model: nn.Module, section: Optimizer) -> torch.optim.Optimizer:
    from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if any(is_moe_param(parameter) for parameter in trained):  # divided among processes: groups of their own
        for group, name in zip(groups, ("matrices", "vectors"), strict=True):
            group["name"] = name
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.learning_rate,
        betas=section.betas,
        fused=section.zero_stage == 0 and section.precision == "fp32",
    )


def load_model(folder: Path, dtype: str, experts: str) -> nn.Module:
    """The Hugging Face model in `folder`. A missing or unexpected weight raises ArtifactError."""
    from transformers import AutoModelForCausalLM

    routed = load_config(folder).model_type in FAMILIES  # dense models have no experts to implement
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=DTYPES[dtype],
        output_loading_info=True,
        **({"experts_implementation": experts} if routed else {}),
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            names = ", ".join(sorted(str(key) for key in info[kind])[:5])
            raise ArtifactError(f"{folder}: {kind.replace('_', ' ')}: {names}: not the weights of its config.json")
    return model


def export_model(engine, folder: Path, dtype: str) -> None:
    """Write the engine's model as a Hugging Face checkpoint of `dtype` (rank 0 writes; all ranks must call)."""
    model = engine.module.model
    gathered = contextlib.nullcontext()
    if engine.zero_optimization_stage() == 3:
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(model.parameters()))
    with gathered:
        if dist.get_rank() == 0:
            known = expected(model.config)
            state = {
                name: tensor.detach().to("cpu", known.dtype(name, DTYPES[dtype]))
                for name, tensor in model.state_dict().items()
            }
            model.config.dtype = DTYPES[dtype]
            model.save_pretrained(folder, state_dict=state)
    dist.barrier()
