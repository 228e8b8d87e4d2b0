"""A run folder with made-up but plausible figures: what report and curves read, without any training."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from disco.config import Experiment
from disco.pictures import Figure
from disco.routing import summary

PRICES = {"rtx4090": 0.35, "a100": 2.28}
SOURCE = "MoE-DisCo, arXiv 2601.06857, table of costs"


def experiment(root: Path, sources: list[str], **changes) -> Experiment:
    return Experiment.parse(
        {
            "name": "fabricated",
            "runs": str(root),
            "model": {"config": {"model_type": "qwen2_moe", "num_experts": 4}},
            "corpus": {"sources": [{"name": name, "files": ["*.txt"]} for name in sources]},
            "baselines": ["joint", "random_split"],
        }
        | changes
    )


def fabricate(
    root: Path,
    *,
    k: int = 4,
    sources: tuple[str, ...] = ("speech", "fiction", "kernel", "mathematics", "religion"),
    phases: tuple[str, ...] = ("start", "train", "finetune_router", "finetune", "joint", "random_split"),
    validation: bool = True,
    clusters: bool = True,
    killed: bool = True,
    gap: float = 0.16,
    terms: tuple[str, ...] = ("senate", "congress", "whale", "ahab", "kernel", "driver", "matrix", "lord"),
    **changes,
) -> Experiment:
    """Write the run folder and return its experiment. `gap` is DisCo's final loss minus joint's, in nats."""
    config = experiment(root, list(sources), **changes)
    folder = config.folder
    for name in ("prepare", "cluster", "evaluate", "report"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    _corpus(folder / "prepare", sources)
    if clusters:
        _clusters(folder / "cluster", k, sources, terms)
    metrics, ledger = [], []
    for phase in _expand(phases, k):
        _train(phase, metrics, ledger, validation, killed, gap, k)
    for name, rows in (("metrics", metrics), ("ledger", ledger)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = _results(phases, k, sources, gap)
    (folder / "evaluate" / "results.json").write_text(json.dumps(results))
    (folder / "merge").mkdir(exist_ok=True)
    layers = [{"layer": n, "accuracy": 0.6 + 0.02 * n, "held_out_accuracy": 0.5 + 0.02 * n} for n in range(4)]
    router = {"method": "probe", "positions": 20000, "chance": 1 / k, "layers": layers}
    (folder / "merge" / "router.json").write_text(json.dumps(router))
    for stage, seconds in (("prepare", 21.0), ("cluster", 9.5), ("merge", 4.0), ("evaluate", 33.0)):
        note = {"stage": stage, "inputs": {}, "section": {}, "seed": 0, "key": "k", "fingerprint": "f", "files": {}}
        note |= {"packages": {}, "finished_at": "-", "started": 1e9, "finished": 1e9 + seconds}
        (folder / stage / "manifest.json").write_text(json.dumps(note))
    return config


def _expand(phases, k):
    for phase in phases:
        if phase == "train":
            yield from (f"train/{n}" for n in range(k))
        elif phase == "joint":
            yield "baselines/joint"
        elif phase == "random_split":
            yield from (f"baselines/random_split/train/{n}" for n in range(k))
            yield from ("baselines/random_split/finetune",)
        else:
            yield phase


# phase: steps, loss before and after, seconds a step
SHAPES = {
    "start": (200, 8.3, 5.25, 0.36),
    "train": (100, 5.2, 4.9, 0.34),
    "finetune_router": (20, 5.1, 5.06, 0.40),
    "finetune": (120, 5.05, 4.79, 0.45),
    "joint": (740, 8.3, 4.63, 0.45),
}


def _train(phase, metrics, ledger, validation, killed, gap, k):
    last = phase.rpartition("/")[2]
    kind = "train" if last.isdigit() else last
    steps, high, low, pace = SHAPES[kind]
    if kind == "finetune":
        low = SHAPES["joint"][2] + gap + (0.03 if "random" in phase else 0.0)
    cheap = kind in ("start", "train")
    priced_as = "rtx4090" if cheap else "a100"
    generator = np.random.default_rng(len(phase) + (int(last) if last.isdigit() else 0))
    attempts = [(0, steps)]
    if killed and phase == "train/1":
        attempts = [(0, 55), (50, steps)]  # killed at 55, resumed from the checkpoint at 50
    for attempt, (begin, end) in enumerate(attempts, start=1):
        row = {
            "time": 1.79e9,
            "phase": phase,
            "stage": kind,
            "submodel": int(last) if last.isdigit() else None,
            "attempt": attempt,
            "device": "cpu",
            "devices": 1,
            "peak_memory_bytes": int(1.1e9),
            "priced_as": priced_as,
            "price_per_hour": PRICES[priced_as],
            "price_source": SOURCE,
            "price_as_of": "2026-01",
            "kind": "simulated",
        }
        for status, step, seconds in (("startup", begin, 8.0), ("held", end, (end - begin) * pace)):
            done = "done" if status == "held" and end == steps else status
            trained = {"tokens": 0, "flops": 0} if status == "startup" else {}
            ledger.append(
                row
                | {"tokens": (end - begin) * 4000, "flops": (end - begin) * 8 * 10**11}
                | trained
                | {"status": done, "step": step, "seconds": seconds}
                | {"dollars": seconds * PRICES[priced_as] / 3600}
            )
        for step in range(begin + 5, end + 1, 5):
            share = step / steps
            loss = low + (high - low) * (np.exp(-6 * share) - np.exp(-6)) / (1 - np.exp(-6))
            seconds = step * pace
            entry = {
                "phase": phase,
                "attempt": attempt,
                "step": step,
                "tokens": step * 4000,
                "flops": step * 8 * 10**11,
                "seconds": seconds,
                "dollars": seconds * PRICES[priced_as] / 3600,
                "loss": loss + 0.08 * generator.standard_normal(),
                "lr": 1e-3,
                "grad_norm": None,
            }
            if validation and kind in ("finetune", "joint") and step % (steps // 10 // 5 * 5) == 0:
                entry["validation_loss"] = loss + 0.02
            metrics.append(entry)


def _results(phases, k, sources, gap):
    joint = SHAPES["joint"][2] + 0.02
    losses = {"start": 5.27}
    if "train" in phases:
        losses |= {f"submodel {n}": 5.15 + 0.03 * n for n in range(k)} | {"merged": 5.11}
    losses |= {"router tuned": 5.08} if "finetune_router" in phases else {}
    losses |= {"tuned": joint + gap} if "finetune" in phases else {}
    losses |= {"joint": joint} if "joint" in phases else {}
    if "random_split" in phases:
        losses |= {"random_split merged": 5.14, "random_split tuned": joint + gap + 0.03}
    models, routing = {}, {}
    generator = np.random.default_rng(0)
    for name, value in losses.items():
        own = int(name.split()[1]) if name.startswith("submodel") else None
        by_cluster = {
            str(c): _entry(value + 0.1 * (c - k / 2) - (0.4 if c == own else 0.0), 20000 + c) for c in range(k)
        }
        by_source = {s: _entry(value + 0.07 * n, 9000) for n, s in enumerate(sources)}
        models[name] = _entry(value, sum(part["tokens"] for part in by_cluster.values())) | {
            "by_cluster": by_cluster,
            "by_source": by_source,
        }
        if name not in ("start",) and own is None:
            counts = generator.integers(20, 400, (4, k, k)) + (300 * np.eye(k)).astype(int)
            routing[name] = summary(counts * (0 if k == 1 else 1))
    return {
        "models": models,
        "routing": routing,
        "tasks": {},
        "differences": {
            "tuned - joint": {"nats": gap, "standard_error": 0.004},
            "random_split tuned - tuned": {"nats": 0.03, "standard_error": 0.003},
        },
        "validation": {"documents": 400, "rows": 210, "rows_used": 210},
    }


def _entry(value, tokens):
    return {"cross_entropy": value, "perplexity": float(np.exp(value)), "tokens": tokens}


def _corpus(folder, sources, documents=400):
    """What Split reads: parquet and token files of the right size, and corpus.json."""
    generator = np.random.default_rng(1)
    source = np.array(sources)[np.arange(documents) * len(sources) // documents]
    tokens = generator.integers(20, 60, documents)
    offset = np.concatenate([[0], np.cumsum(tokens + 1)[:-1]])
    for name in ("train", "validation"):
        table = {"source": source, "text": ["x"] * documents, "tokens": tokens, "offset": offset}
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
        np.zeros((tokens + 1).sum(), dtype=np.uint16).tofile(folder / f"{name}.tokens")
    meta = {
        "sources": {name: {} for name in sources},
        "dtype": "uint16",
        "pad": 0,
        "tokens_sha256": {"train": "", "validation": ""},
    }
    (folder / "corpus.json").write_text(json.dumps(meta))


def _clusters(folder, k, sources, terms, documents=400):
    generator = np.random.default_rng(2)
    labels = (np.arange(documents) * k // documents + (generator.random(documents) < 0.1)) % k
    for name in ("train", "validation"):
        table = {"document": np.arange(documents), "cluster": labels.astype(np.int32)}
        table["distance"] = generator.random(documents, dtype=np.float32)
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    names = [[f"{term}" for term in np.roll(terms, -2 * n)] for n in range(k)]
    notes = {"terms": names, "silhouette": 0.084, "nmi": 0.713, "purity": 0.88}
    (folder / "clusters.json").write_text(json.dumps(notes))
    figure = Figure(figsize=(5, 4))
    points = generator.normal(size=(documents, 2)) + 4 * np.stack([np.cos(labels * 1.6), np.sin(labels * 1.6)], 1)
    figure.add_subplot().scatter(*points.T, c=labels, s=8, cmap="tab10")
    figure.savefig(folder / "map.png", dpi=110)
