"""Block coordinate descent against AdamW and the memory-saving optimizers, at equal model, data and threads.

    OMP_NUM_THREADS=1 python benchmarks/bcd.py --setting scratch --texts data/eight_domains --json bcd.json
    OMP_NUM_THREADS=1 python benchmarks/bcd.py --smoke

Settings: `scratch` trains a Llama-shaped model, `finetune` goes on with one that was first trained by AdamW on
the other half of the sources (--base-steps at twice the batch; one base for all seeds, kept in the file --base if
given), `moe` trains a small mixture of experts. A short search with seed 0 gives each arm
its learning rate; then all arms and seeds take their steps in turn, so that a busy machine slows all alike.
Seconds are CPU time of training steps alone. "BCD, AdamW's time" takes as many more steps as fit into AdamW's
seconds, its schedule of the learning rate stretched alike. State is parameters + gradients + optimizer state on the
training device at its highest, host is state kept in host memory, saved is what autograd keeps between forward and
backward at its highest. Without --texts the text is drawn from random bigram tables, one a source. BAdam, GaLore,
APOLLO and LoRA take part if badam, galore_torch, apollo_torch and peft are installed. --steps-per-block is that of
cyclic BCD, LISA and BAdam.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
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
BEST = {
    "order": "ends",
    "expansion": {"active": "factored", "lr_ratio": 0.1},
    "steps_per_block": 4,
    "always_on": ("model.norm",),
}
LONGER = "BCD, AdamW's time"
BCD = {
    "BCD": BEST,
    LONGER: BEST,
    "BCD, layers at 0.3": {**BEST, "expansion": {"active": "factored", "lr_ratio": 0.3}},
    "BCD, AdamW at the ends": {**BEST, "expansion": {"lr_ratio": 0.1}, "steps_per_block": 1},
    "BCD, 1 update a visit": {**BEST, "steps_per_block": 1},
    "BCD cyclic": {},
    "BCD cyclic, expansion": {"expansion": {}},
    "BCD cyclic, head on": {"always_on": HEAD},
    "BCD shuffled": {"order": "shuffled"},
    "BCD importance": {"order": "importance"},
    # Embeddings and head in every block, two random layers, state cleared (Pan et al. 2024, arXiv 2403.17919).
    "LISA": dict(always_on=("model.embed_tokens", *HEAD), order="shuffled", active_blocks=2, state="reset"),
}


@cache
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

    host = 0

    def __init__(self, model, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def forward(self, batch: dict) -> torch.Tensor:
        return self.model(**batch).loss

    def step(self, batch: dict) -> None:
        self.forward(batch).backward()
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
            group["lr"] = rate * group.get("share", 1.0)


class BcdArm:
    host = 0

    def __init__(self, model, settings: dict):
        self.engine, self.model = bcd.initialize(model=model, config=settings), model

    def forward(self, batch: dict) -> torch.Tensor:
        return self.engine(**batch).loss

    def step(self, batch: dict) -> None:
        engine = self.engine
        freed = [] if engine._expansion is None else engine._expansion.names
        largest = max((self.model.get_parameter(name).nbytes for name in freed), default=0)
        engine.backward(self.forward(batch))
        active = [p for p in engine._backend.parameters if p.grad is not None]
        # AdamW makes its moments at the first update: two fp32 tensors a gradient, and a counter.
        self.highest = sum(p.nbytes for p in self.model.parameters()) + largest
        self.highest += sum(3 * p.nbytes + 4 for p in active)
        if engine._expansion is not None:
            self.highest += sum(_size(tensors) for tensors in engine._expansion.state.values())
        engine.step()
        self.host = sum(_size(state.values()) for states in engine._kept.values() for state in states)

    def state(self) -> int:
        return self.highest

    def set_lr(self, rate: float) -> None:
        self.engine.set_lr(rate)


def _size(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _bytes(value) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    inner = vars(value).values() if hasattr(value, "__dict__") else ()
    return sum(item.nbytes for item in inner if isinstance(item, torch.Tensor))


def arms(options: argparse.Namespace) -> dict[str, Callable]:
    """Name to a function of (model, learning rate) that gives an arm."""
    made: dict[str, Callable] = {
        "AdamW": lambda model, lr: TorchArm(model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)),
        "AdamW, two rates": _two_rates,
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
        blocks = dict(switch_mode="random", include_embedding=True, include_lm_head=True, verbose=0)
        optimizer = BlockOptimizer(inner, list(model.named_parameters()), switch_block_every=steps, **blocks)
        return TorchArm(model, optimizer)

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


def _two_rates(model, lr):
    """AdamW with BCD's ratio between the rate of the layers and that of embeddings and head."""
    share = bcd.config.Expansion().lr_ratio
    layers = [p for name, p in model.named_parameters() if ".layers." in name]
    ends = [p for name, p in model.named_parameters() if ".layers." not in name]
    groups = [{"params": ends}, {"params": layers, "share": share}]
    return TorchArm(model, torch.optim.AdamW(groups, lr=lr, weight_decay=0.01))


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
        return tensor.detach()  # an output that is saved with its history would keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = arm.forward(batch)  # alive while storages are counted
    del loss
    return sum(kept.values())


def run(setting: str, options: argparse.Namespace) -> list[dict]:
    """Rows of the table: an arm and a seed each."""
    chosen = arms(options)
    if options.arms:
        chosen = {name: chosen[name] for name in options.arms}
    starts = {seed: _start(setting, options, seed) for seed in range(options.seeds)}
    searched = {name: make for name, make in chosen.items() if name != LONGER}
    tried = [
        _run(name, make, lr, 0, options.search_steps, starts[0], options)
        for name, make in searched.items()
        for lr in options.lr
    ]
    _train(tried, starts, options, every=options.search_steps)
    best: dict[str, dict] = {}
    for each in tried:
        print(f"search: {each['arm']}, {each['lr']:g}: {each['curve'][-1][2]:.4f}", file=sys.stderr, flush=True)
        if each["arm"] not in best or each["curve"][-1][2] < best[each["arm"]]["curve"][-1][2]:
            best[each["arm"]] = each
    rates, steps = {name: each["lr"] for name, each in best.items()}, {}
    if LONGER in chosen:
        own = "BCD"
        rates[LONGER] = rates[own]
        steps[LONGER] = round(options.steps * best["AdamW"]["seconds"] / best[own]["seconds"])
    runs = [
        _run(name, make, rates[name], seed, steps.get(name, options.steps), starts[seed], options)
        for seed in starts
        for name, make in chosen.items()
    ]
    _train(runs, starts, options, every=options.every)
    for each in runs:
        del each["stream"], each["object"]
    return runs


def _start(setting: str, options: argparse.Namespace, seed: int) -> dict:
    """Model to start from, sources to train on, held-out batches."""
    sources = corpus(options.texts, options.vocabulary, 0 if options.texts else seed)
    model, train = build(setting, options, seed), sources
    if setting == "finetune":
        half = len(sources) // 2
        train, model = sources[:half], _base(sources[half:], options)
    held_out = batches(train, options.batch, options.length, seed + 2, held_out=True)
    return dict(model=model, train=train, held_out=[next(held_out) for _ in range(options.evaluation_batches)])


def _base(sources: list[np.ndarray], options: argparse.Namespace):
    """A model trained on `sources` by AdamW, or the one that was."""
    model = build("finetune", options, seed=0)
    if options.base and options.base.exists():
        model.load_state_dict(torch.load(options.base))
        return model
    arm, rate = TorchArm(model, torch.optim.AdamW(model.parameters())), 2e-3
    stream = batches(sources, 2 * options.batch, options.length, seed=1, held_out=False)
    for step in range(options.base_steps):
        arm.set_lr(rate * min(1.0, (step + 1) / 100) * (1.0 - 0.95 * step / options.base_steps))
        arm.step(next(stream))
    if options.base:
        partial = options.base.with_suffix(".partial")
        torch.save(model.state_dict(), partial)
        partial.rename(options.base)
    return model


def _run(name: str, make: Callable, lr: float, seed: int, steps: int, start: dict, options) -> dict:
    stream = batches(start["train"], options.batch, options.length, seed + 3, held_out=False)
    arm = make(copy.deepcopy(start["model"]), lr)
    return dict(
        arm=name, lr=lr, seed=seed, steps=steps, stream=stream, object=arm,
        seconds=0.0, saved=0, state=0, host=0, curve=[],
    )  # fmt: skip


def _train(runs: list[dict], starts: dict[int, dict], options: argparse.Namespace, every: int) -> None:
    gc.collect()
    gc.freeze()  # BAdam collects garbage at each switch: the other arms' objects shall not cost it time
    for step in range(max(each["steps"] for each in runs)):
        for each in runs:
            total = each["steps"]
            if step >= total:
                continue
            rate = min(1.0, (step + 1) / options.warmup) * (1.0 - 0.9 * step / total)
            arm, batch = each["object"], next(each["stream"])
            if step % max(1, total // 20) == 0:
                each["saved"] = max(each["saved"], saved_bytes(arm, batch))
            arm.set_lr(each["lr"] * rate)
            began = time.thread_time()
            arm.step(batch)
            each["seconds"] += time.thread_time() - began
            each["state"], each["host"] = max(each["state"], arm.state()), max(each["host"], arm.host)
            if (step + 1) % every == 0 or step + 1 == total:
                loss = evaluate(arm.model, starts[each["seed"]]["held_out"])
                each["curve"].append((step + 1, each["seconds"], loss))
                name, seed, seconds = each["arm"], each["seed"], each["seconds"]
                print(f"{step + 1} {name}, {seed}: {loss:.4f} {seconds:.1f} s", file=sys.stderr, flush=True)


def mean_rows(rows: list[dict]) -> list[list[str]]:
    """Cells of the table, a row an arm: means over seeds, and both seeds' losses."""
    adamw = [row for row in rows if row["arm"] == "AdamW"]
    mean = lambda rows, value: sum(map(value, rows)) / len(rows)  # noqa: E731
    per_step = lambda row: 1e3 * row["seconds"] / row["steps"]  # noqa: E731
    cells = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == name]
        losses = [row["curve"][-1][2] for row in own]
        share = ["-", "-"]
        if adamw:
            ratios = own[0]["state"] / adamw[0]["state"], mean(own, per_step) / mean(adamw, per_step)
            share = [f"{ratio:.3f}" for ratio in ratios]
        state, host, saved = (f"{own[0][key] / 1e6:.2f}" for key in ("state", "host", "saved"))
        seconds = mean(own, lambda row: row["seconds"])
        by_seed = ", ".join(f"{loss:.3f}" for loss in losses)
        cells.append([
            name, f"{own[0]['lr']:g}", state, share[0], host, saved, f"{mean(own, per_step):.0f}", share[1],
            f"{own[0]['steps']}", f"{seconds:.0f}", f"{sum(losses) / len(losses):.4f}", by_seed,
        ])  # fmt: skip
    return cells


COLUMNS = ("arm", "lr", "state MB", "of AdamW", "host MB", "saved MB", "ms/step", "of AdamW", "steps", "s", "loss",
           "by seed")  # fmt: skip


def draw(rows: list[dict], path: Path) -> None:
    """Held-out loss over steps and over seconds, means over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True)
    for name in dict.fromkeys(row["arm"] for row in rows):
        curve = np.mean([row["curve"] for row in rows if row["arm"] == name], axis=0)
        for axis, column in zip(axes, (0, 1), strict=True):
            axis.plot(curve[:, column], curve[:, 2], label=name, linewidth=2.5 if name.startswith("BCD") else 1.2)
    for axis, label in zip(axes, ("steps", "CPU seconds"), strict=True):
        axis.set_xlabel(label)
    axes[0].set_ylabel("held-out loss")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=("scratch", "finetune", "moe"), default="scratch")
    parser.add_argument("--texts", type=Path, help="folder of <source>.jsonl files with a text column")
    parser.add_argument("--base", type=Path, help="file for the model that `finetune` starts from, made if absent")
    parser.add_argument("--arms", nargs="+", help="names of arms; all if not given")
    parser.add_argument("--lr", type=float, nargs="+", default=[2e-3, 6e-3, 2e-2])
    sizes = dict(
        search_steps=40, seeds=2, steps=200, base_steps=3000, warmup=10, every=40, evaluation_batches=8, batch=4,
        length=64, width=128, layers=6, vocabulary=2048, steps_per_block=5,
    )  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"{value} if not given")
    parser.add_argument("--smoke", action="store_true", help="a minute: a tiny model, few steps, one seed")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    parser.add_argument("--picture", type=Path, help="file (.png) for loss over steps and over seconds")
    options = parser.parse_args()
    if options.smoke:
        small = dict(
            seeds=1, steps=48, steps_per_block=4, base_steps=20, every=12, evaluation_batches=2, batch=4, length=64,
            width=64, layers=4, vocabulary=256, lr=[3e-3], warmup=4, search_steps=12,
        )  # fmt: skip
        vars(options).update(small)
    rows = run(options.setting, options)
    cells = mean_rows(rows)
    table = Table(title=f"{options.setting}: loss of held-out text, {options.seeds} seed(s)")
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for row in cells:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    if options.markdown:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *cells]
        options.markdown.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    if options.picture:
        draw(rows, options.picture)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "options": vars(options)}, default=str, indent=1))


if __name__ == "__main__":
    main()
