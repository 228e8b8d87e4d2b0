"""Sharded experts against DeepSpeed's expert parallelism and replicated experts: step time and balance.

    python benchmarks/fsep.py [TRACE.npz ...] [--ranks 2 4] [--rounds 5] [--json FILE]
    python benchmarks/fsep.py --gpu

Measured: processes on this machine's CPU (gloo) train one small Qwen2-MoE whose routers favour a few experts, in
every way, in one interleaved run. Modelled: step times of recorded load traces on 8 to 1,024 devices of the
hardware table, the traces' devices repeated. With --gpu instead: one layer of Mixtral-8x7B's shape, forward and
backward, Hugging Face's block against sharded experts on one GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# This file is named like the package it measures.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

SIZES = dict(hidden=128, width=256, layers=4, experts=8, vocabulary=512)
LENGTH, ROWS = 128, 4
HOT = (1.0, 0.7, 0.4, 0.2)  # by how much the routers favour the first experts
WAYS = {
    "replicated": None,
    "autoep": None,
    "fsep": {},
    "fsep, fixed layouts": {"planner": "fixed"},
    "fsep, no prefetch": {"prefetch": 0},
    "fsep, no late reshard": {"delay_reshard": False},
}
MODELLED = ("static", "eplb", "laer", "fsep")
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)


def skewed_model(seed: int):
    """A Qwen2-MoE whose tokens have a direction in common, which its routers reward."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2_moe",
        hidden_size=SIZES["hidden"],
        intermediate_size=SIZES["width"],
        moe_intermediate_size=SIZES["width"],
        shared_expert_intermediate_size=SIZES["width"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=SIZES["experts"],
        num_experts_per_tok=2,
        norm_topk_prob=True,
        vocab_size=SIZES["vocabulary"],
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    common_H = torch.nn.functional.normalize(torch.randn(SIZES["hidden"]), dim=0)
    with torch.no_grad():
        model.get_input_embeddings().weight += 0.5 * common_H
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(std=0.1)
            for expert, favour in enumerate(HOT):
                layer.mlp.gate.weight[expert] += 0.1 * favour * common_H
    return model.train()


def engine_of(way: str, seed: int):
    """A DeepSpeed engine, ZeRO 1 and fp32, that trains the model in one of the ways."""
    import deepspeed
    from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer

    import fsep

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.ERROR)
    model, ranks = skewed_model(seed), dist.get_world_size()
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    if way == "autoep":
        settings["expert_parallel"] = {"enabled": True, "autoep_size": ranks, "route_norm": True}
        for module in model.modules():  # see disco/autoep.py
            if isinstance(getattr(module, "_can_record_outputs", None), dict):
                module._can_record_outputs = {}
    elif way != "replicated":
        options = dict(WAYS[way])
        slots = min(SIZES["experts"], -(-3 * SIZES["experts"] // (2 * ranks)))
        if options.pop("planner", None):
            layout = fsep.plan(np.ones((ranks, SIZES["experts"])), fsep.Topology(ranks, ranks), slots)
            options["planner"] = [layout] * SIZES["layers"]
        fsep.attach(model, slots=slots, topology=fsep.Topology(ranks, ranks), **options)

    def optimizer(_):
        groups = [{"params": list(model.parameters()), "name": "all"}]
        if any(is_moe_param(parameter) for parameter in groups[0]["params"]):
            groups = split_params_into_different_moe_groups_for_optimizer(groups)
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-5)

    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def train_step(engine, ids: torch.Tensor) -> float:
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def imbalance_of(engine, way: str) -> float:
    """Mean over layers of the busiest rank's tokens over the mean, of the last step (autoep: of all steps)."""
    import fsep

    if way == "replicated":
        return 1.0  # every rank computes its own, equally many
    if way != "autoep":
        return statistics.mean(layer["imbalance"] for layer in fsep.stats(engine))
    ratios = []
    for layer in engine.module.modules():
        if getattr(layer, "_is_autoep_layer", False):
            counts_E = layer.tokens_per_expert.clone()
            dist.all_reduce(counts_E)
            device_N = counts_E.unflatten(0, (dist.get_world_size(), -1)).sum(1)
            ratios.append(float(device_N.max() / device_N.mean()))
    return statistics.mean(ratios)


def as_rank(rank: int, ranks: int, store: str, arguments, results) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    engines = {way: engine_of(way, arguments.seed) for way in WAYS}
    generator = torch.Generator().manual_seed(arguments.seed * 1000 + rank)
    times = {way: [] for way in WAYS}
    cpu = {way: [] for way in WAYS}
    losses = {way: [] for way in WAYS}
    for round in range(arguments.warmup + arguments.rounds):
        batches = [
            torch.randint(0, SIZES["vocabulary"], (ROWS, LENGTH), generator=generator)
            for _ in range(arguments.steps)
        ]
        order = list(WAYS)[round % len(WAYS) :] + list(WAYS)[: round % len(WAYS)]
        for way in order:
            dist.barrier()
            wall, own = time.perf_counter(), time.process_time()
            found = [train_step(engines[way], ids) for ids in batches]
            dist.barrier()
            if round >= arguments.warmup:
                times[way].append((time.perf_counter() - wall) / arguments.steps)
                used = torch.tensor((time.process_time() - own) / arguments.steps)
                dist.all_reduce(used)
                cpu[way].append(float(used))
            losses[way] += found
    rows = []
    for way, engine in engines.items():
        row = {
            "ranks": ranks,
            "way": way,
            "step_ms": 1e3 * statistics.median(times[way]),
            "cpu_ms": 1e3 * statistics.median(cpu[way]),
            "imbalance": imbalance_of(engine, way),
            "loss_difference": max(
                abs(a - b) / abs(b) for a, b in zip(losses[way], losses["replicated"], strict=True)
            ),
        }
        rows.append(row)
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def measured(arguments, folder: Path) -> list[dict]:
    rows = []
    for ranks in arguments.ranks:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(as_rank, (ranks, str(folder / f"store-{ranks}"), arguments, results), nprocs=ranks)
        rows += results.get()
    return rows


def repeated(trace, devices: int):
    """The trace as it were on so many devices: its own in turn, each copy's node after node."""
    from fsep import LoadTrace

    index_N = np.arange(devices) % trace.devices
    return LoadTrace(trace.tokens[:, :, :, index_N], trace.iteration, trace.layer)


def modelled(path: str, hardware: str, snapshots: int, stale: list[int]) -> list[dict]:
    """Modelled milliseconds a layer and step, planned on the load of so many recorded steps before."""
    from fsep import LoadTrace, Topology, simulate

    trace, rows = LoadTrace.load(path), []
    for devices in DEVICES:
        slots = max(2, -(-2 * trace.experts // devices))
        topology = Topology.from_hardware(hardware, devices)
        results = simulate(
            repeated(trace, devices),
            topology,
            slots,
            planners=MODELLED,
            stale=stale,
            snapshots=max(3, min(snapshots, snapshots * 64 // devices)),
            bound=False,
        )
        for planner, age in itertools.product(MODELLED, stale):
            arms = [row for row in results if (row.planner, row.stale) == (planner, age)]
            best = min(arms, key=lambda row: row.step_ms)
            rows.append(
                {
                    "trace": Path(path).name,
                    "devices": devices,
                    "slots": slots,
                    "stale": age,
                    "planner": planner,
                    "routing": best.routing,
                    "imbalance": best.imbalance,
                    "inter_node_fraction": best.inter_node_fraction,
                    "step_ms": best.step_ms,
                }
            )
    return rows


def on_gpu(arguments, device: str = "cuda", hidden: int = 4096, width: int = 14336, dtype=torch.bfloat16):
    """Forward and backward of one MoE layer: tokens a second, and peak memory over the layer's own weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import fsep

    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = AutoConfig.for_model(
        "mixtral", hidden_size=hidden, intermediate_size=width, num_hidden_layers=1, vocab_size=64
    )
    blocks = {}
    for way in ("grouped_mm", "batched_mm", "eager", "fsep"):
        if way == "batched_mm" and arguments.tokens > 512:
            continue  # copies every token's experts: hundreds of gigabytes
        torch.manual_seed(0)
        implementation = {} if way == "fsep" else {"experts_implementation": way}
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **implementation).train()
        if way == "fsep":
            fsep.attach(model, slots=8)
        blocks[way] = model.model.layers[0].mlp
    x = torch.randn(1, arguments.tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    times, peaks, outputs = {way: [] for way in blocks}, dict.fromkeys(blocks, 0), {}
    for round in range(2 + arguments.rounds):
        for way, block in blocks.items():
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            begin = time.perf_counter()
            y = block(x)
            y = y[0] if isinstance(y, tuple) else y
            y.sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()
                peaks[way] = torch.cuda.max_memory_allocated() - before
            if round >= 2:
                times[way].append(time.perf_counter() - begin)
            outputs[way] = y.detach()
            del y
            block.zero_grad(set_to_none=True)
            x.grad = None
    dist.destroy_process_group()
    return [
        {
            "way": way,
            "tokens_per_s": arguments.tokens / statistics.median(times[way]),
            "peak_gb": peaks[way] / 1e9,
            "largest_difference": float((outputs[way] - outputs["grouped_mm"]).abs().max()),
        }
        for way in blocks
    ]


def show(title: str, rows: list[dict]) -> None:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", help="load traces to model step times on")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="processes; none to measure nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="training steps a round and way")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hardware", default="a100", help="device of the modelled cluster, in fsep's table")
    parser.add_argument("--snapshots", type=int, default=20, help="snapshots of a trace to model, up to 64 devices")
    parser.add_argument("--stale", type=int, nargs="*", default=[0], help="recorded steps from planning to use")
    parser.add_argument("--gpu", action="store_true", help="one layer on one CUDA GPU instead")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the layer, with --gpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict = {"command": sys.argv, "load_average": os.getloadavg()}
    if arguments.gpu:
        if not torch.cuda.is_available():
            sys.exit("benchmarks/fsep.py: --gpu needs a CUDA GPU and PyTorch finds none here: leave --gpu out")
        found["gpu"] = on_gpu(arguments)
        show(f"One Mixtral-8x7B layer, bf16, {torch.cuda.get_device_name()}", found["gpu"])
    else:
        import tempfile

        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores before the measurement")
        if arguments.ranks:
            with tempfile.TemporaryDirectory() as folder:
                found["measured"] = measured(arguments, Path(folder))
            show("Measured on this CPU: median step", found["measured"])
        if arguments.traces:
            found["modelled"] = [
                row
                for path in arguments.traces
                for row in modelled(path, arguments.hardware, arguments.snapshots, arguments.stale)
            ]
            show(f"Modelled, not measured: {arguments.hardware}, ms a layer and step", found["modelled"])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
