"""Block coordinate descent against AdamW and the memory-saving optimizers, at equal model, data and threads.

    OMP_NUM_THREADS=1 python benchmarks/bcd.py --setting scratch --texts data/eight_domains --json bcd.json
    OMP_NUM_THREADS=1 python benchmarks/bcd.py --smoke

Settings: `scratch` trains a Llama-shaped model, `finetune` goes on with one that was first trained by AdamW on
the other half of the sources, `moe` trains a small mixture of experts. Every arm runs at each learning rate; all
runs take their steps in turn, so that a busy machine slows all alike, and the best one an arm is reported.
Seconds are CPU time of training steps alone. State is parameters + gradients + optimizer state at its highest,
saved is what autograd keeps between forward and backward at its highest. Without --texts the text is drawn from
random bigram tables, one a source. BAdam, GaLore, APOLLO and LoRA take part if badam, galore_torch, apollo_torch
and peft are installed.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# This file is called bcd.py too: keep its folder from hiding the package.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent] + ["."]

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2MoeConfig

import bcd

HEAD = ("lm_head", "model.norm")
BCD = {
    "BCD": {},
    "BCD state reset": {"state": "reset"},
    "BCD descending": {"order": "descending"},
    "BCD shuffled": {"order": "shuffled"},
    "BCD importance": {"order": "importance"},
    "BCD head on": {"always_on": HEAD},
    "BCD head on, two blocks": {"always_on": HEAD, "active_blocks": 2},
    "BCD expansion": {"expansion": {"lr_ratio": 0.1}},
    "BCD head on, expansion": {"always_on": HEAD, "expansion": {"lr_ratio": 0.1}},
    "BCD module": {"granularity": "module"},
    # Embeddings and head in every block, two random layers, state cleared (Pan et al. 2024, arXiv 2403.17919).
    "LISA": {
        "always_on": ("model.embed_tokens", *HEAD),
        "order": "shuffled",
        "active_blocks": 2,
        "state": "reset",
    },
}


def corpus(texts: Path | None, vocabulary: int, seed: int) -> list[np.ndarray]:
    """Token ids of each source."""
    if texts is None:
        rng = np.random.default_rng(seed)
        sources = []
        for _ in range(4):
            steps_VK = rng.integers(0, vocabulary, (vocabulary, 4))  # four equally likely successors a token
            tokens = np.empty(200_000, np.int64)
            tokens[0] = 0
            choice = rng.integers(0, 4, len(tokens))
            for i in range(1, len(tokens)):
                tokens[i] = steps_VK[tokens[i - 1], choice[i]]
            sources.append(tokens)
        return sources
    files = sorted(texts.glob("*.jsonl"))
    if len(files) < 2:
        raise SystemExit(f"{texts} has {len(files)} .jsonl files: two sources or more are needed")
    joined = ["\n".join(json.loads(line)["text"] for line in path.open())[:4_000_000] for path in files]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator((text[:1_000_000] for text in joined), vocab_size=vocabulary)
    return [np.array(tokenizer.encode(text).ids) for text in joined]


def batches(sources: list[np.ndarray], size: int, length: int, seed: int, *, held_out: bool) -> Iterator[dict]:
    """Random windows, a source drawn for each row; the last twentieth of a source is held out."""
    rng = np.random.default_rng(seed)
    while True:
        rows = []
        for source in rng.integers(0, len(sources), size):
            tokens, cut = sources[source], len(sources[source]) * 19 // 20
            low, high = (cut, len(tokens)) if held_out else (0, cut)
            start = rng.integers(low, high - length)
            rows.append(tokens[start : start + length])
        ids = torch.from_numpy(np.stack(rows))
        yield {"input_ids": ids, "labels": ids}


def build(setting: str, options: argparse.Namespace, seed: int):
    torch.manual_seed(seed)
    shared = dict(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=options.length,
        use_cache=False,
    )
    if setting == "moe":
        shape = Qwen2MoeConfig(
            **shared,
            intermediate_size=2 * options.width,
            moe_intermediate_size=options.width,
            shared_expert_intermediate_size=2 * options.width,
            num_experts=8,
            num_experts_per_tok=2,
        )
    else:
        shape = LlamaConfig(**shared, intermediate_size=3 * options.width)
    return AutoModelForCausalLM.from_config(shape)


class TorchArm:
    """A model and an optimizer that trains all of what requires a gradient."""

    def __init__(self, model, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def step(self, batch: dict) -> None:
        self.model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 1.0)
        self.gradients = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> int:
        inner = getattr(self.optimizer, "base_optimizer", self.optimizer)
        moments = sum(_bytes(value) for state in inner.state.values() for value in state.values())
        return sum(p.nbytes for p in self.model.parameters()) + self.gradients + moments

    def set_lr(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate


class BcdArm:
    def __init__(self, model, settings: dict):
        self.engine, self.model = bcd.initialize(model=model, config=settings), model

    def step(self, batch: dict) -> None:
        engine = self.engine
        engine.backward(engine(**batch).loss)
        gradients = sum(p.grad.nbytes for p in engine._backend.parameters if p.grad is not None)
        # AdamW makes its moments at the first update: two fp32 tensors a gradient, and a counter.
        self.highest = sum(p.nbytes for p in self.model.parameters()) + 3 * gradients
        engine.step()

    def state(self) -> int:
        return self.highest

    def set_lr(self, rate: float) -> None:
        self.engine.set_lr(rate)


def _bytes(value) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    inner = vars(value).values() if hasattr(value, "__dict__") else ()
    return sum(item.nbytes for item in inner if isinstance(item, torch.Tensor))


def arms(options: argparse.Namespace) -> dict[str, Callable]:
    """Name to a function of (model, learning rate) that gives an arm."""
    made: dict[str, Callable] = {
        "AdamW": lambda model, lr: TorchArm(model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01))
    }
    for name, settings in BCD.items():
        base = {"steps_per_block": options.steps_per_block, "gradient_clipping": 1.0, **settings}
        made[name] = lambda model, lr, base=base: BcdArm(model, {"lr": lr, **base})
    if importlib.util.find_spec("badam"):
        made["BAdam"] = _badam(options.steps_per_block)
    for package, name in (("galore_torch", "GaLore"), ("apollo_torch", "APOLLO")):
        if importlib.util.find_spec(package):
            made[name] = _low_rank(package, name)
    if importlib.util.find_spec("peft"):
        made["LoRA"] = _lora
    return made


def _badam(steps: int) -> Callable:
    def arm(model, lr):
        from badam import BlockOptimizer

        inner = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
        return TorchArm(
            model,
            BlockOptimizer(
                inner,
                named_parameters_list=list(model.named_parameters()),
                switch_block_every=steps,
                switch_mode="random",
                include_embedding=True,
                include_lm_head=True,
            ),
        )

    return arm


def _low_rank(package: str, name: str) -> Callable:
    def arm(model, lr):
        module = importlib.import_module(package)
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
        rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
        special = {"rank": 32, "update_proj_gap": 200, "scale": 1.0, "proj_type": "std"}
        if name == "APOLLO":
            special |= {"rank": 1, "proj": "random", "scale_type": "tensor", "scale": 128**0.5}
        groups = [{"params": rest}, {"params": matrices, **special}]
        optimizer = module.GaLoreAdamW if name == "GaLore" else module.APOLLOAdamW
        return TorchArm(model, optimizer(groups, lr=lr, weight_decay=0.01))

    return arm


def _lora(model, lr):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return TorchArm(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr))


@torch.no_grad()
def evaluate(model, held_out: list[dict]) -> float:
    model.eval()
    loss = sum(model(**batch).loss.item() for batch in held_out) / len(held_out)
    model.train()
    return loss


def saved_bytes(arm, batch: dict) -> int:
    """What autograd keeps for backward beside the weights, in one forward pass."""
    weights = {p.untyped_storage()._cdata for p in arm.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = arm.model(**batch).loss  # alive while storages are counted
    del loss
    return sum(kept.values())


def run(setting: str, options: argparse.Namespace, seed: int) -> list[dict]:
    """Rows of the table: the best learning rate of each arm."""
    sources = corpus(options.texts, options.vocabulary, seed)
    start = build(setting, options, seed)
    train = sources
    if setting == "finetune":
        half = len(sources) // 2
        train, base = sources[:half], TorchArm(start, torch.optim.AdamW(start.parameters(), lr=1e-3))
        stream = batches(sources[half:], options.batch, options.length, seed + 1, held_out=False)
        for _ in range(options.base_steps):
            base.step(next(stream))
    held_out_stream = batches(train, options.batch, options.length, seed + 2, held_out=True)
    held_out = [next(held_out_stream) for _ in range(options.evaluation_batches)]

    chosen = arms(options)
    if options.arms:
        chosen = {name: chosen[name] for name in options.arms}
    runs = []
    for name, make in chosen.items():
        for lr in options.lr:
            arm = make(copy.deepcopy(start), lr)
            stream = batches(train, options.batch, options.length, seed + 3, held_out=False)
            runs.append(
                dict(arm=name, lr=lr, seed=seed, stream=stream, object=arm, seconds=0.0, saved=0, state=0, curve=[])
            )
    for step in range(options.steps):
        rate = min(1.0, (step + 1) / options.warmup) * (1.0 - 0.9 * step / options.steps)
        for each in runs:
            arm, batch = each["object"], next(each["stream"])
            if step % max(1, options.steps // 40) == 0:
                each["saved"] = max(each["saved"], saved_bytes(arm, batch))
            arm.set_lr(each["lr"] * rate)
            began = time.thread_time()
            arm.step(batch)
            each["seconds"] += time.thread_time() - began
            each["state"] = max(each["state"], arm.state())
            if (step + 1) % options.every == 0:
                each["curve"].append((step + 1, each["seconds"], evaluate(arm.model, held_out)))
    best = {}
    for each in runs:
        del each["stream"], each["object"]
        if each["arm"] not in best or each["curve"][-1][2] < best[each["arm"]]["curve"][-1][2]:
            best[each["arm"]] = each
    return list(best.values())


def at_time(curve: list[tuple[int, float, float]], seconds: float) -> float | None:
    """Loss after `seconds`, between the two evaluations around it; None if the curve ends before."""
    points = [(s, loss) for _, s, loss in curve]
    return float(np.interp(seconds, *zip(*points, strict=True))) if seconds <= points[-1][0] else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=("scratch", "finetune", "moe"), default="scratch")
    parser.add_argument("--texts", type=Path, help="folder of <source>.jsonl files with a text column")
    parser.add_argument("--arms", nargs="+", help="names of arms; all if not given")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--steps-per-block", type=int, default=10)
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--evaluation-batches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--smoke", action="store_true", help="a minute: a tiny model, few steps, one seed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.smoke:
        small = dict(
            seeds=1, steps=48, steps_per_block=4, base_steps=20, every=12, evaluation_batches=2, batch=4, length=64,
            width=64, layers=4, vocabulary=256, lr=[3e-3], warmup=4,
        )  # fmt: skip
        vars(options).update(small)
    rows = [row for seed in range(options.seeds) for row in run(options.setting, options, seed)]
    table = Table(title=f"{options.setting}: loss of held-out text, {options.steps} steps, {options.seeds} seed(s)")
    for column in ("arm", "lr", "state MB", "of AdamW", "saved MB", "ms/step", "loss", "AdamW loss at this time"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        reference = next(r for r in rows if r["arm"] == "AdamW" and r["seed"] == row["seed"])
        rival = at_time(reference["curve"], row["seconds"])
        table.add_row(
            row["arm"],
            f"{row['lr']:g}",
            f"{row['state'] / 1e6:.2f}",
            f"{row['state'] / reference['state']:.2f}",
            f"{row['saved'] / 1e6:.2f}",
            f"{1e3 * row['seconds'] / options.steps:.1f}",
            f"{row['curve'][-1][2]:.4f}",
            "-" if rival is None else f"{rival:.4f}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "options": vars(options)}, default=str, indent=1))


if __name__ == "__main__":
    main()
