"""The one training loop of the project. It drives anything with DeepSpeed's engine interface.

A step is a global batch: the next `batch_size` rows, cut into micro-batches over processes and accumulation.
Rows come in the order of consumption and random numbers are derived from (seed, step, rank), so the step
counter and the engine's checkpoint are all that a resumed run needs.
"""

import contextlib
import functools
import math
import re
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from disco.artifacts import SCRATCH, first_line
from disco.config import Optimizer
from disco.engine import make_engine, start_process_group
from disco.experts import Replicated, way_of, whole_names
from disco.family import set_trainable
from disco.job import Job
from disco.loads import Loads
from disco.loss import CausalLoss
from disco.operations import step_flops, update_flops
from disco.packing import IGNORED, Rows
from disco.record import LEDGER_SECONDS, Recorder


class TrainingError(RuntimeError):
    """Training that must not go on: the message says why and what to change."""


def train(job: Job) -> None:
    """Run the job, resuming from its last checkpoint; leaves a Hugging Face checkpoint in `job.out`.

    Raises TrainingError on a loss that is not finite and on collapsed routing; the last checkpoint stays.
    """
    section, out = job.section, Path(job.out)
    checkpoints = out / SCRATCH / "checkpoints"
    rank, world, device = start_process_group()
    record = Recorder(job, rank, world, device)
    torch.manual_seed(job.seed)
    rows = Rows.load(Path(job.rows))
    validation = Rows.load(Path(job.validation)) if job.validation else None
    precision = {"fp32": "float32", "bf16": "bfloat16"}[section.precision]
    experts = way_of(job, device)
    model = experts.load(precision)
    set_trainable(model, job.trainable)
    if section.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.disable_input_require_grads()
    module = CausalLoss(model, chunk=section.loss_chunk, aux=job.aux_loss, z=job.z_loss)
    engine = make_engine(module, section, job.bcd, job.seed, experts.settings(model))
    experts.begin(engine)
    flops_of = functools.cache(functools.partial(step_flops, model.config, rows.sequence_length, section))
    state = {"step": 0, "tokens": 0, "flops": 0, "seconds": 0.0}
    resume(engine, experts, checkpoints, state)
    loads = Loads(model, out, state["step"]) if job.record_loads else None
    record.begin(state)
    steps, labels, collapsed = -(-len(rows) // section.batch_size), rows.labels(), 0

    while state["step"] < steps:
        started = time.perf_counter()
        step = state["step"]
        torch.manual_seed((job.seed * 1_000_003 + step * world + rank) % 2**63)
        indices = np.arange(step * section.batch_size, min(len(rows), (step + 1) * section.batch_size))
        tokens = int(labels[indices].sum())
        with loads.of_step(step) if loads else contextlib.nullcontext():
            sums = forward_backward(engine, micro_batches(rows, indices, section, rank, device), tokens, loads)
        if not math.isfinite(sums["loss"]):
            raise TrainingError(
                f"{job.phase}: the loss of step {step} is {sums['loss']}: lower {job.stage}.learning_rate "
                f"(now {section.learning_rate:g}) or look at the data; the last checkpoint is kept in {out}"
            )
        rate = learning_rate(step, steps, section)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        trained, above = trained_names(model), expanded_names(engine)  # before the step, which may change them
        engine.step()
        if module.route:
            module.set_share(sums["counts_LE"], tokens)
        state["step"] += 1
        state["tokens"] += tokens
        state["flops"] += update_flops(flops_of, trained, above, labels[indices], section)
        state["seconds"] += time.perf_counter() - started

        validate = validation is not None and state["step"] in job.validate_at
        if state["step"] % section.log_every == 0 or state["step"] == steps or validate:
            row = state | {"loss": sums["loss"] / tokens, "lr": rate, "grad_norm": gradient_norm(engine)}
            if module.route:
                share_LE = sums["counts_LE"] / tokens  # of the tokens, so that each layer's sum is top_k
                row |= {name: sums[name] / tokens for name in ("balance", "z")}
                row["expert_share"] = share_LE.tolist()
                if state["step"] % section.log_every == 0:
                    collapsed = collapsed + 1 if module.selects and share_LE.max() > job.collapse_share else 0
            row |= experts.figures(engine, sums.get("counts_LE"))
            if validate:
                row["validation_loss"] = evaluate_loss(engine, validation, section, rank, device)
            record.log(row, steps)
            if collapsed >= job.collapse_logs and state["step"] < steps:
                raise TrainingError(
                    f"{job.phase}: routing has collapsed: one expert held over {job.collapse_share:.0%} of a "
                    f"layer's tokens in {collapsed} logs running: raise finetune.aux_loss "
                    f"(now {job.aux_loss:g}) or lower the learning rate; the last checkpoint is kept in {out}"
                )
        if section.checkpoint_every and state["step"] % section.checkpoint_every == 0:
            with writing_to(checkpoints, job.phase):
                if loads:  # first, so that a checkpoint's steps are in it
                    loads.save()
                checkpoint(engine, experts, checkpoints, state)
        record.held(state, at_least=LEDGER_SECONDS)

    with writing_to(out, job.phase):
        experts.export(engine, out)
        if loads:
            loads.save()
    experts.close()
    record.finish(state)
    dist.barrier()
    dist.destroy_process_group()


def trained_names(model) -> frozenset[str]:
    """Names of the parameters that are trained now; rows that bcd trains of one, and slices of experts, go by
    the names that they have in the whole model."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return frozenset(whole for name in trained for whole in whole_names(re.sub(r"_rows\d+$", "", name)))


def expanded_names(engine) -> frozenset[str]:
    """Names of the parameters that bcd's expansion updates at this update."""
    return frozenset(name.removeprefix("model.") for name in getattr(engine, "expanded", ()))


def learning_rate(step: int, steps: int, section: Optimizer) -> float:
    """Rate of update `step` (0-based) of `steps`: linear warm-up, then cosine, linear or constant decay."""
    warmup = math.ceil(section.warmup * steps)
    if step < warmup:
        return section.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if section.schedule == "constant":
        return section.learning_rate
    decay = 1 - progress if section.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return section.learning_rate * (section.min_learning_rate + (1 - section.min_learning_rate) * decay)


def micro_batches(rows: Rows, indices: np.ndarray, section: Optimizer, rank: int, device) -> list[dict]:
    """This rank's micro-batches of a global batch: equally many on every rank, a short last batch cut evenly."""
    batches = []
    for part in np.array_split(indices, section.accumulation * section.processes)[rank :: section.processes]:
        batch = rows.batch(part if len(part) else indices[:1])
        if not len(part):
            batch["labels"].fill_(IGNORED)
        batches.append({name: tensor.to(device) for name, tensor in batch.items()})
    return batches


def forward_backward(engine, batches: list[dict], tokens: int, loads: Loads | None = None) -> dict:
    """Accumulate the gradients of a global batch of `tokens` labels.

    Returns sums over the global batch: loss (cross-entropy), and for routed models balance, z, counts_LE.
    """
    # The engine averages over micro-batches and processes; our loss is already a share of the global sum.
    scale = len(batches) * dist.get_world_size()
    sums = {}
    for batch in batches:
        output = engine(**batch, tokens=tokens / scale)
        if loads:
            loads.end_microbatch()
        engine.backward(output.loss)
        if batch is not batches[-1]:
            engine.step()  # not a boundary: only counts the micro-batch
        for name in ("cross_entropy", "balance", "z", "counts_LE"):
            if (value := getattr(output, name)) is not None:
                sums[name] = sums.get(name, 0) + value.double()
    flat = torch.cat([value.reshape(-1) for value in sums.values()])
    if dist.get_world_size() > 1:
        dist.all_reduce(flat)
    sums = dict(zip(sums, flat.cpu().split([value.numel() for value in sums.values()]), strict=True))
    counts = sums.pop("counts_LE", None)
    result = {name.replace("cross_entropy", "loss"): float(value) for name, value in sums.items()}
    if counts is not None:
        result["counts_LE"] = counts.view_as(output.counts_LE)
    return result


@torch.no_grad()
def evaluate_loss(engine, rows: Rows, section: Optimizer, rank: int, device) -> float:
    """Cross-entropy a token over `rows`, spread over processes."""
    engine.eval()
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for begin in range(0, len(rows), section.batch_size):
        indices = np.arange(begin, min(len(rows), begin + section.batch_size))
        for batch in micro_batches(rows, indices, section, rank, device):
            loss += engine(**batch, tokens=1).cross_entropy.double()
    if dist.get_world_size() > 1:
        dist.all_reduce(loss)
    engine.train()
    return float(loss) / int(rows.labels().sum())


def gradient_norm(engine) -> float | None:
    norm = engine.get_global_grad_norm()
    return None if norm is None else float(norm)


@contextlib.contextmanager
def writing_to(folder: Path, phase: str):
    """Say in words what PyTorch's own errors do not: that a model could not be written, and where."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(folder.parent).free
        raise TrainingError(
            f"{phase}: the model could not be written to {folder} ({free / 1e6:,.0f} MB free there): "
            f"{first_line(error)}: free some space and run again; what was written before is kept"
        ) from error


def checkpoint(engine, experts: Replicated, folder: Path, state: dict) -> None:
    """Write `step-<n>`, whole or not at all, and drop the older ones."""
    name = f"step-{state['step']:08d}"
    client = {"state": dict(state), "share_LE": getattr(engine.module, "share_LE", None)}
    experts.save(engine, folder, name, client)
    dist.barrier()
    if dist.get_rank() == 0:
        for old in folder.glob("step-*"):
            if old.name != name:
                shutil.rmtree(old)
    dist.barrier()


def resume(engine, experts: Replicated, folder: Path, state: dict) -> None:
    """Load the newest whole checkpoint in `folder`, if any, and bring `state` to where it was."""
    found = sorted(path for path in folder.glob("step-*") if not path.name.endswith(".partial"))
    if not found:
        return
    client = experts.resume(engine, folder, found[-1].name)
    if client is None:
        raise TrainingError(f"{found[-1]}: cannot be loaded: delete it to start this stage again")
    state.update(client["state"])
    if client["share_LE"] is not None:
        engine.module.share_LE = client["share_LE"]
