"""Routers of a merged model, fitted to send a token where its cluster's expert is.

Shapes: B rows, S positions of a row, N captured positions, H hidden, E experts (= clusters).

What a router sees depends on the routers before it. All probe rows therefore go through the merged model as one
batch, once: when the forward pass reaches a router, a hook fits it on what has just arrived, and the pass goes on
with the fitted one. That costs one forward pass over the probe rows without logits, and the activations of one
layer for them.

`probe`: multinomial logistic regression on the router's input, without intercept, since few routers have a bias
(those that have one get 0).
Its logits are used as fitted: the softmax is then the calibrated posterior of the cluster given the token, and the
renormalised top-k weights are that posterior among the chosen experts, the mixture that c-BTM (arXiv 2303.14177)
forms of whole models. `centroid`: directions from the mean of all inputs to each cluster's mean, all of one length,
the one that maximises the likelihood of the cluster labels.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from transformers import AutoModelForCausalLM

from disco import prompts
from disco.artifacts import ArtifactError, write_json
from disco.checkpoint import Checkpoint
from disco.config import ConfigError
from disco.family import moe_blocks, num_experts
from disco.packing import Rows
from disco.tensor_files import FLOATS

REPORT = "router.json"
HELD_OUT = 0.2
ITERATIONS = 500


class Probe(NamedTuple):
    """The batch that goes through the model, and which of its positions, flattened, are fitted or held out."""

    inputs: dict[str, torch.Tensor]
    fitted_N: np.ndarray
    held_out_N: np.ndarray
    cluster: np.ndarray  # of every position of the batch, flattened


def initialise_router(
    merged: Path,
    rows: list[Rows],
    *,
    method: str,
    tokens: int,
    l2: float,
    seed: int,
    groups: list[int] | None = None,
    base: Path | None = None,
) -> dict:
    """Fit the routers of the model in `merged` in place; `rows[k]` are rows of the cluster of expert k.

    groups: how many consecutive experts each cluster has, one if absent. All experts of a cluster get its fitted
        row, and beside it how their own rows, as they are in `merged`, differ from the mean of the group's.

    method: "probe" or "centroid"; "hidden" or "cheap_embed" (`prompts.py`), of the model in `base` that the
        submodels began from; "original" and "random" leave what the merge has written.
    tokens: labelled positions to capture, in equal parts from the clusters. l2: scikit-learn's C.

    Returns, and writes to router.json, per layer the share of positions that the router sends to their cluster's
    expert first, on documents it was fitted on and on documents held out (null where a cluster has only one).
    Raises ConfigError where clusters and experts do not match, or a cluster has no row; ArtifactError where
    the model's activations are not finite.
    """
    merged = Path(merged)
    if method not in METHODS:
        report = {"method": method, "layers": []}
        write_json(merged / REPORT, report)
        return report
    checkpoint = Checkpoint.open(merged)
    experts = num_experts(checkpoint.config)
    groups = [1] * len(rows) if groups is None else groups
    if len(rows) != len(groups) or sum(groups) != experts:
        raise ConfigError(
            f"{len(rows)} clusters of {sum(groups)} experts but the merged model has {experts} experts"
        )
    cluster_E = np.repeat(np.arange(len(groups)), groups)
    if method in prompts.METHODS:
        prompts.write_prompt_rows(merged, base, rows, cluster_E, method=method, tokens=tokens)
        report = {"method": method, "layers": []}
        write_json(merged / REPORT, report)
        return report
    probe = choose(rows, tokens, seed)
    tensors, layers = fit_front_to_back(merged, probe, fit_rows(cluster_E, SOLVERS[method], l2))
    for key, tensor in tensors.items():
        role = checkpoint.family.role(key)
        if role.kind == "router":
            stored = checkpoint.tensors[role.template]
            stored.write(tensor.to("cpu", FLOATS[stored.dtype]))
    report = {
        "method": method,
        "positions": len(probe.fitted_N) + len(probe.held_out_N),
        "chance": 1 / experts,
        "layers": layers,
    }
    write_json(merged / REPORT, report)
    return report


def choose(rows: list[Rows], tokens: int, seed: int) -> Probe:
    """Rows of each cluster with about tokens / E labelled positions; documents are fitted or held out whole."""
    quota = -(-tokens // len(rows))
    batches, documents = [], []
    for cluster, part in enumerate(rows):
        if not part.total_labels:
            raise ConfigError(f"cluster {cluster} has no tokens to fit a router on: set merge.router=random")
        # Rows may repeat (several epochs); no two pieces start at the same token.
        _, first = np.unique(part.start[part.pointer[:-1]], return_index=True)
        distinct = np.sort(first)
        enough = np.searchsorted(np.cumsum(part.labels()[distinct]), quota) + 1
        batches.append(part.batch(distinct[:enough]))
        documents.append(part.documents(distinct[:enough]))
    lengths = {len(part[0]) for part in documents}
    if len(lengths) > 1:
        raise ConfigError(f"rows of {sorted(lengths)} positions cannot be one batch: pack them alike")
    document_BS = np.concatenate(documents)
    width = np.flatnonzero((document_BS >= 0).any(0))[-1] + 1  # short documents alone in long rows
    document = document_BS[:, :width].ravel()
    cluster = np.repeat(np.arange(len(rows)), [len(part) * width for part in documents])
    fitted, held_out = [], []
    for index, part in enumerate(rows):
        # Seeded by the cluster's own data, so that its sample does not depend on the order of the clusters.
        generator = np.random.default_rng([seed, int(part.start[0])])
        labelled = np.flatnonzero((cluster == index) & (document >= 0))
        labelled = generator.permutation(labelled)[:quota]
        held = np.isin(document[labelled], _held_out(document[labelled], generator))
        fitted.append(labelled[~held])
        held_out.append(labelled[held])
    inputs = {key: torch.cat([batch[key][:, :width] for batch in batches]) for key in ("input_ids", "position_ids")}
    return Probe(inputs, np.concatenate(fitted), np.concatenate(held_out), cluster)


def _held_out(document_N: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Documents that hold about a fifth of the positions, never most of them."""
    documents, count = np.unique(document_N, return_counts=True)
    chosen, held = [], 0
    for index in generator.permutation(len(documents)):
        if held < HELD_OUT * count.sum() and held + count[index] <= count.sum() / 2:
            chosen.append(documents[index])
            held += count[index]
    return np.array(chosen, dtype=document_N.dtype)


Solve = Callable[[np.ndarray, np.ndarray, int, float], np.ndarray]
Fit = Callable[[torch.nn.Module, np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]


@torch.no_grad()
def fit_front_to_back(folder: Path, probe: Probe, fit: Fit, kept: int | None = None) -> tuple[dict, list[dict]]:
    """Fit every router of the model in `folder`, each on what it sees behind the fitted ones.

    fit: given a router, features [N, H] float64 that arrived at it and their clusters [N], writes the router and
        returns what tells the cluster [N] whose expert it then chooses first for features [N, H].
    kept: a cluster whose share among held-out positions is reported too.

    Returns the model's tensors, and a row a layer: the share of right choices among fitted and held-out positions.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation="eager")
    model.requires_grad_(False).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    layers: list[dict] = []

    def share(right_N: np.ndarray) -> float | None:
        return float(right_N.mean()) if len(right_N) else None

    def hook(layer: int):
        def arrived(router: torch.nn.Module, args: tuple) -> None:
            captured = args[0].reshape(-1, args[0].shape[-1]).cpu()
            fitted_NH, held_NH = (
                captured[chosen].double().numpy() for chosen in (probe.fitted_N, probe.held_out_N)
            )
            if not np.isfinite(fitted_NH).all():
                raise ArtifactError(f"{folder}: the router input of layer {layer} is not finite")
            fitted_N, held_N = probe.cluster[probe.fitted_N], probe.cluster[probe.held_out_N]
            choice = fit(router, fitted_NH, fitted_N)
            right_N = choice(captured[probe.held_out_N].double().numpy()) == held_N
            row = {
                "layer": layer,
                "accuracy": share(choice(fitted_NH) == fitted_N),
                "held_out_accuracy": share(right_N),
            }
            layers.append(row if kept is None else row | {"kept": share(right_N[held_N == kept])})

        return arrived

    handles = [block.router.register_forward_pre_hook(hook(block.layer)) for block in moe_blocks(model)]
    inputs = {key: value.to(model.device) for key, value in probe.inputs.items()}
    model.base_model(**inputs, attention_mask=None, use_cache=False)
    for handle in handles:
        handle.remove()
    return model.state_dict(), layers


def fit_rows(cluster_E: np.ndarray, solve: Solve, l2: float) -> Fit:
    """A row for each expert, that of its cluster. cluster_E: the cluster of each expert."""

    def fit(router: torch.nn.Module, features_NH: np.ndarray, cluster_N: np.ndarray):
        weight_KH = solve(features_NH, cluster_N, 1 + cluster_E[-1], l2)
        own_EH = router.weight.cpu().double().numpy()
        for cluster in range(len(weight_KH)):
            own_EH[cluster_E == cluster] -= own_EH[cluster_E == cluster].mean(0)
        router.weight.copy_(torch.from_numpy(weight_KH[cluster_E] + own_EH))
        for name, tensor in router.state_dict().items():
            if name != "weight":  # biases, of logits or of the choice
                tensor.zero_()
        kept_EH = router.weight.cpu().double().numpy()
        return lambda x_NH: cluster_E[(x_NH @ kept_EH.T).argmax(1)]

    return fit


def fit_probe(features_NH: np.ndarray, cluster_N: np.ndarray, experts: int, l2: float) -> np.ndarray:
    """Weight [E, H] of a logistic regression without intercept, on features scaled to a mean square of one.

    The scale is folded back. A shift could not be, so the features are not centred.
    """
    if experts == 1:
        return np.zeros((1, features_NH.shape[1]))
    scale_H = np.sqrt((features_NH**2).mean(0))
    scale_H[scale_H == 0] = 1
    model = LogisticRegression(C=l2, fit_intercept=False, max_iter=ITERATIONS)
    # One thread: the products are small, and their last bits then do not depend on the number of threads.
    with warnings.catch_warnings(), threadpool_limits(1):
        # Stopping early only regularises a little more; the held-out accuracy tells what came of it.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(features_NH / scale_H, cluster_N)
    weight_EH = model.coef_ / scale_H
    # For two classes there is one row of log odds; halves of it have the same softmax.
    return weight_EH if experts > 2 else np.concatenate([-weight_EH, weight_EH]) / 2


def fit_centroid(features_NH: np.ndarray, cluster_N: np.ndarray, experts: int, l2: float) -> np.ndarray:
    """Weight [E, H]: unit directions of the clusters' means from the mean of those, times one scale.

    The scale maximises the likelihood of the clusters under the softmax of the logits.
    """
    means_EH = np.stack([features_NH[cluster_N == e].mean(0) for e in range(experts)])
    means_EH -= means_EH.mean(0)
    length_E1 = np.linalg.norm(means_EH, axis=1, keepdims=True)
    direction_EH = means_EH / np.where(length_E1 == 0, 1, length_E1)
    logits_NE = features_NH @ direction_EH.T

    def loss(log_scale: float) -> float:
        return -log_softmax(np.exp(log_scale) * logits_NE, axis=1)[np.arange(len(cluster_N)), cluster_N].mean()

    return direction_EH * np.exp(minimize_scalar(loss, bounds=(-12, 6), method="bounded").x)


SOLVERS: dict[str, Solve] = {"probe": fit_probe, "centroid": fit_centroid}
METHODS = (*SOLVERS, *prompts.METHODS)  # that give routers rows of their own
