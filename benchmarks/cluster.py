"""Balanced assignment: cost, time, memory; and how well clusters find the sources of real text.

    python benchmarks/cluster.py --documents 8000 --large 1000000 --json cluster.json
    python benchmarks/cluster.py --large 0 --texts data/eight_domains --passages 1000

The first table assigns points of 100 features to 8 clusters under equal tokens, as ours does it, by the linear
programme over all documents, and greedily (documents in random order to the nearest cluster with room). The
second refines centroids and assignment in turn at full size. The third clusters passages of the .jsonl files in
a folder, one source a file. Clocks are wall time, the minimum over rounds.
"""
# ruff: noqa: E402

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

# bcd.py lies beside this file: keep it from hiding the package.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent] + ["."]

import numpy as np
from threadpoolctl import threadpool_limits

from disco.balance import balanced_assignment
from disco.cluster import cluster
from disco.config import Experiment
from disco.corpus import Corpus, prepare
from disco.kmeans import balanced_kmeans, squared_distances


def points(documents: int, features: int, clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit vectors [D, S] around unevenly popular centres, the centres [K, S], token counts [D]."""
    rng = np.random.default_rng(seed)
    centre_KS = rng.normal(size=(clusters, features)).astype(np.float32)
    label_D = rng.choice(clusters, documents, p=rng.dirichlet(np.full(clusters, 2.0)))
    x_DS = rng.standard_normal((documents, features), np.float32)
    x_DS += centre_KS[label_D] * 0.7
    x_DS /= np.linalg.norm(x_DS, axis=1, keepdims=True)
    means_KS = np.stack([x_DS[label_D == k].mean(0) for k in range(clusters)])
    return x_DS, means_KS, rng.lognormal(5.5, 0.8, documents).astype(np.int64) + 1


def greedy(cost_DK: np.ndarray, weight_D: np.ndarray, seed: int) -> np.ndarray:
    label_D, room_K = np.empty(len(cost_DK), np.int64), np.full(cost_DK.shape[1], weight_D.sum() / cost_DK.shape[1])
    order_DK = np.argsort(cost_DK, axis=1)
    for document in np.random.default_rng(seed).permutation(len(cost_DK)):
        choice = next((k for k in order_DK[document] if room_K[k] > 0), order_DK[document, 0])
        label_D[document] = choice
        room_K[choice] -= weight_D[document]
    return label_D


def compare(documents: int, clusters: int, rounds: int) -> list[dict]:
    x_DS, centroids_KS, weight_D = points(documents, 100, clusters, seed=0)
    cost_DK = squared_distances(x_DS, centroids_KS)
    arms = {
        "nearest, not balanced": lambda: cost_DK.argmin(1),
        "linear programme, all documents": lambda: balanced_assignment(cost_DK, weight_D, contested=documents),
        "ours: prices, contested documents": lambda: balanced_assignment(cost_DK, weight_D),
        "greedy": lambda: greedy(cost_DK, weight_D, 0),
    }
    rows = []
    for name, arm in arms.items():
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            label_D = arm()
            seconds.append(time.perf_counter() - started)
        load_K = np.bincount(label_D, weight_D, clusters)
        rows.append(
            {
                "arm": name,
                "cost": float(weight_D @ cost_DK[np.arange(documents), label_D].astype(np.float64)),
                "largest / mean": float(load_K.max() / load_K.mean()),
                "off the mean, in largest documents": float(np.abs(load_K - load_K.mean()).max() / weight_D.max()),
                "seconds": min(seconds),
            }
        )
    for row in rows:
        row["cost / programme"] = row["cost"] / rows[1]["cost"]
    return rows


def scale(documents: int, clusters: int) -> list[dict]:
    x_DS, centroids_KS, weight_D = points(documents, 100, clusters, seed=1)
    rows = []
    for rounds in (1, 10):
        started = time.perf_counter()
        label_D, found_KS = balanced_kmeans(x_DS, centroids_KS, weight_D, rounds=rounds)
        seconds = time.perf_counter() - started
        load_K = np.bincount(label_D, weight_D, clusters)
        cost_DK = squared_distances(x_DS, found_KS)
        rows.append(
            {
                "documents": documents,
                "rounds at most": rounds,
                "cost": float(weight_D @ cost_DK[np.arange(documents), label_D].astype(np.float64)),
                "off the mean, in largest documents": float(np.abs(load_K - load_K.mean()).max() / weight_D.max()),
                "seconds": seconds,
                "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            }
        )
    return rows


def real(texts: Path, passages: int, seeds: list[int]) -> list[dict]:
    sources = [
        {"name": path.stem, "jsonl": [str(path)], "passage_chars": 1500, "max_documents": passages}
        for path in sorted(texts.resolve().glob("*.jsonl"))
    ]
    raw = {
        "name": "benchmark",
        "model": {"config": {"model_type": "mixtral"}},
        "corpus": {"sources": sources, "tokenizer": {"kind": "train", "vocab_size": 4096}},
    }
    rows = []
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "prepare").mkdir()
        prepare(Experiment.parse(raw), Path(name) / "prepare", progress=lambda message: None)
        corpus = Corpus.open(Path(name) / "prepare")
        for k in (4, 8):
            for balance in ("none", "tokens"):
                for seed in seeds:
                    out = Path(name) / f"{k}-{balance}-{seed}"
                    out.mkdir()
                    config = Experiment.parse(raw | {"seed": seed, "cluster": {"balance": balance}})
                    started = time.perf_counter()
                    cluster(config, corpus, out, k=k, model_folder=None, progress=lambda message: None)
                    notes = json.loads((out / "clusters.json").read_text())
                    keys = ("purity", "nmi", "largest", "moved", "silhouette")
                    row = {"k": k, "balance": balance, "seed": seed, "documents": len(corpus.split("train"))}
                    rows.append(
                        row | {key: notes[key] for key in keys} | {"seconds": time.perf_counter() - started}
                    )
    return rows


def show(title: str, rows: list[dict]) -> None:
    print(f"\n{title}\n\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print("| " + " | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8_000, help="size of the comparison; 0 leaves it out")
    parser.add_argument("--large", type=int, default=1_000_000, help="size of the large problem; 0 leaves it out")
    parser.add_argument("--clusters", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=Path, help="folder of <source>.jsonl files with a text column")
    parser.add_argument("--passages", type=int, default=1_000, help="at most so many a source")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    with threadpool_limits(1):
        if options.documents:
            found["assignment"] = compare(options.documents, options.clusters, options.rounds)
            show(f"{options.documents:,} documents, {options.clusters} clusters, 1 thread", found["assignment"])
        if options.large:
            found["large"] = scale(options.large, options.clusters)
            show(f"Balanced k-means, {options.clusters} clusters, 100 features, 1 thread", found["large"])
    if options.texts:
        found["sources"] = real(options.texts, options.passages, options.seeds)
        show(f"Passages of {options.texts.name} against their sources", found["sources"])
    if options.json:
        options.json.write_text(json.dumps(found | {"options": vars(options)}, default=str, indent=1))


if __name__ == "__main__":
    main()
