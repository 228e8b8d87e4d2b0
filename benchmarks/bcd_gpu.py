"""A model of Llama-2-7B's shape on a card capped at 24 GB, by blocks, against full AdamW on the uncapped card.

    python benchmarks/bcd_gpu.py --json bcd_gpu.json

Random bf16 weights, micro-batch 1 x 1024, layer blocks with their state kept in host memory. After one cycle that
fills moments and caches, a second is timed, switches included. AdamW is one block that holds everything: bit for
bit torch's AdamW with fp32 master weights; it needs about 110 GB and is left out on a smaller card. Needs CUDA.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path

# A file beside this one is called bcd.py: keep its folder from hiding the package.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent] + ["."]

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PretrainedConfig

import bcd
from bcd.memory import shape

GB = 1e9


def measure(config: PretrainedConfig, settings: dict, device: torch.device, sequence: int, updates: int) -> dict:
    """Milliseconds an update over `updates` of them after as many untimed, and bytes at the highest."""
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    engine = bcd.initialize(model=model, config=settings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (1, sequence), generator=generator).to(device)

    def run() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(updates):
            engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
            engine.step()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    run()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = run()
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    blocks = len(engine.schedule.current_order)
    predicted = bcd.memory(config, config=settings, dtype="bf16", sequence=sequence, fused=on_gpu).total
    return {"blocks": blocks, "ms_per_update": 1e3 * seconds / updates, "predicted": predicted, "measured": peak}


def compare(config: PretrainedConfig, options: argparse.Namespace, device: torch.device) -> dict[str, dict]:
    """Figures of both methods; AdamW's are absent where the card is too small for it."""
    shared = {"lr": 1e-5, "activation_checkpointing": options.activation_checkpointing}
    blocks = shared | {"steps_per_block": options.steps_per_block, "prefetch": options.prefetch}
    everything = shared | {"granularity": {"all": ("*",)}}
    turns = config.num_hidden_layers + 2
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    if total:
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_gb * GB / total), device)
    rows = {"BCD": measure(config, blocks, device, options.sequence, turns * options.steps_per_block)}
    if total:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    needed = bcd.memory(config, config=everything, dtype="bf16", sequence=options.sequence).total
    if total is None or needed < 0.95 * total:
        rows["AdamW"] = measure(config, everything, device, options.sequence, options.updates)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-2-7b", help="shape by name, or folder with a config.json")
    parser.add_argument("--memory-gb", type=float, default=24.0, help="cap of the BCD run")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps-per-block", type=int, default=4)
    parser.add_argument("--updates", type=int, default=20, help="timed updates of AdamW")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--prefetch", action="store_true", help="copy the next block's state ahead of the switch")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs CUDA and torch finds no GPU; benchmarks/bcd.py runs on CPUs")
    config = shape(options.model)
    rows = compare(config, options, torch.device("cuda"))
    table = Table(title=f"{options.model}, bf16, 1 x {options.sequence}, on {torch.cuda.get_device_name()}")
    for column in ("method", "blocks", "predicted GB", "measured GB", "ms an update"):
        table.add_column(column)
    for name, row in rows.items():
        sizes = (f"{row[key] / GB:.2f}" for key in ("predicted", "measured"))
        table.add_row(name, str(row["blocks"]), *sizes, f"{row['ms_per_update']:.0f}")
    Console().print(table)
    if "AdamW" in rows:
        print(f"BCD's update takes {rows['BCD']['ms_per_update'] / rows['AdamW']['ms_per_update']:.2f} of AdamW's")
    else:
        print("AdamW does not fit on this card: no comparison")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "options": vars(options)}, default=str, indent=1))


if __name__ == "__main__":
    main()
