"""How good each model is: cross-entropy by cluster and source, routing, and lm_eval tasks.

Perplexity is exp of the token-weighted cross-entropy and of nothing else. Shape suffixes: B rows of a batch,
S positions, D documents, C cluster codes; -1 marks positions without a label.
"""

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from disco.artifacts import write_json
from disco.cluster import assignments
from disco.config import ConfigError, Experiment, Task
from disco.corpus import Corpus, Split
from disco.engine import load_model
from disco.loss import token_losses
from disco.packing import Rows
from disco.routing import RouterCounts, summary
from disco.train import rows_of

RESULTS = "results.json"


def models(run: Path, submodels: int, stages: Collection[str] | None = None) -> dict[str, Path]:
    """Name and folder of every model that the run has, in the order in which the report shows them.

    With `stages` only theirs: a folder may hold models of an earlier form of the experiment too.
    """
    named = {"start": "start"}
    named |= {f"submodel {k}": f"train/{k}" for k in range(submodels)}
    named |= {"merged": "merge", "router tuned": "finetune_router", "tuned": "finetune"}
    named |= {"joint": "baselines/joint"}
    named |= {
        f"random_split {name}": f"baselines/random_split/{folder}"
        for name, folder in (("merged", "merge"), ("router tuned", "finetune_router"), ("tuned", "finetune"))
    }
    return {
        name: run / folder
        for name, folder in named.items()
        if (run / folder / "config.json").exists() and (stages is None or folder in stages)
    }


def final(named: dict[str, Any], prefix: str = "") -> str | None:
    """Name of the last model of a pipeline (`prefix` "" or "random_split "), or None."""
    names = (f"{prefix}{name}" for name in ("tuned", "router tuned", "merged"))
    return next((name for name in names if name in named), None)


@torch.no_grad()
def losses(
    model: nn.Module,
    rows: Rows,
    batch_size: int,
    documents: int,
    *,
    chunk: int = 1024,
    watch: Callable[[np.ndarray], None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Cross-entropy summed over each document's labels, float64 [D], and how many those are, int64 [D].

    `documents` is D. `watch` is called after each batch with the document of each position [B x S].
    """
    model.eval()
    device = next(model.parameters()).device
    sums_D, labels_D = np.zeros(documents), np.zeros(documents, dtype=np.int64)
    for begin in range(0, len(rows), batch_size):
        indices = np.arange(begin, min(len(rows), begin + batch_size))
        batch = {name: tensor.to(device) for name, tensor in rows.batch(indices).items()}
        hidden = model.base_model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        )[0]
        head = model.get_output_embeddings().weight
        loss_N = token_losses(hidden.flatten(0, 1), head, batch["labels"].flatten(), chunk)
        document_N = rows.documents(indices).ravel()
        kept_N = document_N >= 0
        of_document = document_N[kept_N]
        sums_D += np.bincount(of_document, loss_N.double().cpu().numpy()[kept_N], minlength=documents)
        labels_D += np.bincount(of_document, minlength=documents)
        if watch:
            watch(document_N)
    return sums_D, labels_D


class Measured(NamedTuple):
    """A model's entry in the results, its routing (None with fewer than two experts), and per document the
    summed loss, float64 [D], and the labels, int64 [D]."""

    entry: dict
    routing: dict | None
    sums_D: np.ndarray
    labels_D: np.ndarray


def measure(
    model: nn.Module, rows: Rows, split: Split, clusters_D: np.ndarray, clusters: int, batch_size: int
) -> Measured:
    """All that is measured of a model, in one pass over `rows`."""
    with RouterCounts(model, clusters) as routers:
        padded_D = np.append(clusters_D, -1)  # document -1 is in cluster -1
        sums_D, labels_D = losses(
            model, rows, batch_size, len(split), watch=lambda document_N: routers.add(padded_D[document_N])
        )
    entry = loss_of(sums_D, labels_D)
    entry["by_cluster"] = by_group(sums_D, labels_D, clusters_D, [str(k) for k in range(clusters)])
    entry["by_source"] = by_group(sums_D, labels_D, split.source, split.sources)
    experts = routers.counts_LKE.shape[2]
    return Measured(entry, summary(routers.counts_LKE) if experts > 1 else None, sums_D, labels_D)


def loss_of(sums: np.ndarray, labels: np.ndarray) -> dict:
    """Token-weighted cross-entropy in nats, its exp, and the tokens; None where there is no finite value."""
    tokens = int(labels.sum())
    mean = float(sums.sum()) / tokens if tokens else math.nan
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return {
        "cross_entropy": mean if math.isfinite(mean) else None,
        "perplexity": perplexity if math.isfinite(perplexity) else None,
        "tokens": tokens,
    }


def difference(one: Measured, other: Measured) -> dict:
    """How much higher the cross-entropy of `one` is, in nats a token, with its standard error over documents.

    Both models saw the same documents, so the error is that of the paired differences: of a ratio of sums over
    documents (Cochran, Sampling Techniques, 1977, eq. 2.46). It says nothing about other seeds.
    """
    gap_D, labels_D = one.sums_D - other.sums_D, one.labels_D
    documents, tokens = np.count_nonzero(labels_D), labels_D.sum()
    mean = gap_D.sum() / tokens
    residual_D = gap_D - mean * labels_D
    error = math.sqrt((residual_D**2).sum() * documents / max(documents - 1, 1)) / tokens
    return {"nats": float(mean), "standard_error": float(error)}


def by_group(sums_D: np.ndarray, labels_D: np.ndarray, group_D: np.ndarray, names: Sequence[str]) -> dict:
    return {name: loss_of(sums_D[group_D == g], labels_D[group_D == g]) for g, name in enumerate(names)}


def evaluate(
    config: Experiment,
    run: Path,
    out: Path,
    progress: Callable[[str], None] = print,
    stages: Collection[str] | None = None,
) -> None:
    """Measure every model of the run (of its `stages`, if given) on the validation split; write results.json.

    {"models": {name: {cross_entropy, perplexity, tokens, by_cluster, by_source}}, "routing": {name: {counts
    [layer][cluster][expert], entropy, specialisation, dead}}, "tasks": {name: {task: {metric: value}}},
    "differences": {"name - other": {nats, standard_error}}, "validation": {documents, rows, rows_used}}.
    The clusters are those of `run`/cluster for every model.
    """
    section = config.evaluate
    tasks = find_tasks(section.tasks) if section.tasks else None
    corpus = Corpus.open(run / "prepare")
    split = corpus.split("validation")
    clusters_D = assignments(run / "cluster", "validation")
    clusters = 1 + int(assignments(run / "cluster", "train").max())
    everything = rows_of(config, split)
    rows = everything.take(np.arange(min(len(everything), section.max_rows or len(everything))))
    named = models(run, clusters, stages)
    results: dict[str, Any] = {
        "models": {},
        "routing": {},
        "tasks": {},
        "stages": None if stages is None else sorted(stages),
        "differences": {},
        "validation": {"documents": len(split), "rows": len(everything), "rows_used": len(rows)},
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mine, random = final(named), final(named, "random_split ")
    on_tasks, measured = {mine, random, "start", "joint"}, {}
    for name, folder in named.items():
        model = load_model(folder, config.model.dtype, config.model.experts).to(device)
        found = measured[name] = measure(model, rows, split, clusters_D, clusters, section.batch_size)
        results["models"][name] = found.entry
        if found.routing is not None:
            results["routing"][name] = found.routing
        progress(f"evaluate: {name:<24} cross-entropy {_shown(found.entry['cross_entropy'])}")
        if tasks and name in on_tasks:
            scores = run_tasks(model, corpus.tokenizer(), section.tasks, tasks, section.batch_size, config.seed)
            results["tasks"][name] = scores
            progress(f"evaluate: {name:<24} {scores}")
        del model
    for name, other in ((mine, "joint"), (random, mine)):
        both = [measured[model] for model in (name, other) if model in measured]
        if len(both) == 2 and all(found.entry["cross_entropy"] is not None for found in both):
            results["differences"][f"{name} - {other}"] = difference(*both)
    write_json(out / RESULTS, results)


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def find_tasks(tasks: Sequence[Task]) -> dict[str, Any]:
    """The lm_eval task manager of each task. Raises ConfigError if the package, a folder or a task is missing."""
    for task in tasks:
        if task.include_path is not None and not Path(task.include_path).is_dir():
            raise ConfigError(
                f"evaluate.tasks: {task.name}: include_path is '{task.include_path}', which is no folder"
            )
    try:
        import lm_eval.models.huggingface  # noqa: F401  needs accelerate, which lm_eval leaves to its user
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        missing = "" if (error.name or "lm_eval").startswith("lm_eval") else f" with {error.name}"
        raise ConfigError(
            f"evaluate.tasks needs the package lm_eval{missing}: pip install 'moe-disco[eval]'"
        ) from None
    managers: dict[str | None, Any] = {}
    for task in tasks:
        if task.include_path not in managers:
            managers[task.include_path] = TaskManager(include_path=task.include_path)
        if task.name not in managers[task.include_path].all_tasks:
            where = f" or below {task.include_path}" if task.include_path else ""
            raise ConfigError(f"evaluate.tasks: no task is called '{task.name}' in lm_eval{where}")
    return {task.name: managers[task.include_path] for task in tasks}


def run_tasks(
    model: nn.Module, tokenizer, tasks: Sequence[Task], managers: dict[str, Any], batch_size: int, seed: int
) -> dict[str, dict[str, float]]:
    """lm_eval's metrics of each task, as {task: {metric: value}}. Local tasks with local data need no network."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    scores = {}
    for task in tasks:
        result = lm_eval.simple_evaluate(
            model=wrapped,
            tasks=[task.name],
            task_manager=managers[task.name],
            num_fewshot=task.num_fewshot,
            limit=task.limit,
            bootstrap_iters=0,
            log_samples=False,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
        values = result["results"][task.name]
        scores[task.name] = {
            key.removesuffix(",none"): value
            for key, value in values.items()
            if isinstance(value, (int, float)) and "stderr" not in key and key != "sample_len"
        }
    return scores
