"""Experts added to a finished MoE: each trained on a new domain beside the old model's frozen shared part.

The shared part, the old experts and their rows of every router keep their bits. New rows are fitted so that a token
of a new domain goes to its expert and a token of what the model knew already to the old ones, which a row can do
that has learnt from both: beside the new domains' text the model is shown old text, or text that it draws itself
(pseudo-rehearsal, Robins 1995). Layers are fitted front to back in one forward pass, as in `router.py`.

Shapes: N positions, O old experts, n new ones, H hidden, B rows, S positions of a row.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize, minimize_scalar
from scipy.special import log_softmax, logsumexp
from threadpoolctl import threadpool_limits
from transformers import AutoTokenizer

from disco.artifacts import ArtifactError, write_json
from disco.checkpoint import Checkpoint, copy_side_files, write_model
from disco.config import ConfigError
from disco.engine import load_model
from disco.family import num_experts, top_k, with_experts
from disco.merge import Submodel, finite, open_submodels
from disco.packing import Rows
from disco.router import ITERATIONS, REPORT, Fit, Probe, choose, fit_front_to_back
from disco.routing import RouterCounts
from disco.tensor_files import FLOATS, Output, Stored, as_bytes, seeded

NOTE = "extend.json"
BATCH = 64  # rows drawn at once


def favourite(old: Path, rows: Rows, positions: int = 20_000) -> int:
    """The expert that the routers of the model in `old` choose most for the first of `rows`, over all layers."""
    model = load_model(old, _dtype(old), "eager").eval()
    enough = np.arange(min(len(rows), -(-positions // rows.sequence_length)))
    with RouterCounts(model, 1) as routers, torch.no_grad():
        for part in np.array_split(enough, -(-len(enough) // 16)):
            batch = rows.batch(part)
            model.base_model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
            routers.add(np.where(rows.documents(part).ravel() >= 0, 0, -1))
    return int(routers.counts_LKE.sum((0, 1)).argmax())


def extend(
    old: Path, submodels: list[Path], out: Path, *, seed: int = 0, max_shard_bytes: int = 2_000_000_000
) -> None:
    """Write to the folder `out` the MoE in `old` with the experts of `submodels` after its own, streamed.

    Old tensors are copied bit for bit; of a router so are the old rows. New rows are N(0, initializer_range), new
    entries of biases the mean of the old ones. Top-k and its renormalisation stay as they are.

    Raises ConfigError or ArtifactError, before anything is written, where submodels do not belong to `old` or
    their number does not fit its groups; ArtifactError naming tensor and folder where a weight is not finite, or
    where a submodel's shared part is not that of `old`.
    """
    old, out = Path(old), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    base = Checkpoint.open(old)
    count = num_experts(base.config)
    config = with_experts(base.config, count + len(submodels), top_k(base.config))
    parts = open_submodels(base, [Path(folder) for folder in submodels], config)
    for part in parts:
        if num_experts(part.checkpoint.config) != 1:
            raise ArtifactError(f"{part.checkpoint.folder}: has several experts: an extension adds one each")
    outputs = []
    for key, stored in base.tensors.items():
        role = base.family.role(key)
        if role.kind == "shared":
            outputs.append(Output(key, stored.dtype, stored.shape, partial(_unchanged, key, base, parts)))
        elif role.kind == "router":
            chunks = partial(_rows, key, stored, len(parts), config.initializer_range, seed)
            outputs.append(Output(key, stored.dtype, (count + len(parts), *stored.shape[1:]), chunks))
        else:
            outputs.append(Output.copy(key, stored))
            if role.expert == count - 1:
                for index, part in enumerate(parts):
                    new, single = role.template.format(e=count + index), role.template.format(e=0)
                    outputs.append(
                        Output(new, stored.dtype, stored.shape, partial(finite, single, part.checkpoint))
                    )
    write_model(out, config, outputs, "the extended model", max_shard_bytes)
    copy_side_files(old, out)
    note = {"base": parts[0].note.base, "clustering": parts[0].note.clustering, "old": count, "new": len(parts)}
    write_json(out / NOTE, note)


def _unchanged(key: str, base: Checkpoint, parts: list[Submodel]) -> Iterator[bytearray]:
    folders = [part.checkpoint.folder for part in parts]
    sources = (base, *(part.checkpoint for part in parts))
    for chunk, *others in zip(*(source.tensors[key].chunks() for source in sources), strict=True):
        for folder, other in zip(folders, others, strict=True):
            if other != chunk:
                raise ArtifactError(
                    f"{folder}: {key} is not that of {base.folder}: train it with a frozen shared part "
                    "(train.mode=expert)"
                )
        yield chunk


def _rows(key: str, stored: Stored, new: int, std: float, seed: int) -> Iterator:
    yield from stored.chunks()
    dtype = FLOATS[stored.dtype]
    for index in range(new):
        if len(stored.shape) == 1:
            yield as_bytes(stored.read().double().mean().reshape(1).to(dtype))
        else:
            row = (
                torch.randn(stored.shape[1:], generator=seeded(seed, key, "new", index), dtype=torch.float64) * std
            )
            yield as_bytes(row.to(dtype))


def fit_new_rows(
    extended: Path,
    rows: list[Rows],
    *,
    method: str,
    tokens: int,
    l2: float,
    seed: int,
    old: Path,
    old_text: list[Path] = (),
) -> dict:
    """Fit the rows of the new experts in the routers of the model in `extended`, in place; `rows[j]` are rows of
    the domain of new expert j. Old rows are not touched.

    method: "probe", maximum likelihood of the right expert given the old logits, or "centroid", unit directions
        from the mean of all to the new domains' means and one length for them; both begin from the mean of the old
        rows, and count each expert for as many positions as another. "random" fits nothing.
    tokens: positions captured, as many of old text (of the files, or drawn by the model in `old`) as of each
        domain. l2: scikit-learn's C.

    Returns, and writes to router.json, per layer the share of positions that go first to their new expert, or to
    any old one, on text fitted and held out; `kept` is that of held-out old text alone.
    """
    extended = Path(extended)
    if method == "random":
        report = {"method": method, "layers": []}
        write_json(extended / REPORT, report)
        return report
    checkpoint = Checkpoint.open(extended)
    new = len(rows)
    experts = num_experts(checkpoint.config)
    probe = choose(rows, tokens * new // (new + 1), seed)
    known_BS = known_text(old, probe.inputs["input_ids"].shape[1], -(-tokens // (new + 1)), seed, old_text)
    held_B = np.arange(len(known_BS)) % 5 == 4
    first = len(probe.cluster)
    place_BS = first + np.arange(known_BS.numel()).reshape(known_BS.shape)
    positions_BS = torch.arange(known_BS.shape[1]).expand(known_BS.shape)
    seen = Probe(
        {
            "input_ids": torch.cat([probe.inputs["input_ids"], known_BS]),
            "position_ids": torch.cat([probe.inputs["position_ids"], positions_BS]),
        },
        np.concatenate([probe.fitted_N, place_BS[~held_B].ravel()]),
        np.concatenate([probe.held_out_N, place_BS[held_B].ravel()]),
        np.concatenate([probe.cluster, np.full(known_BS.numel(), new)]),
    )
    tensors, layers = fit_front_to_back(extended, seen, fit_rows(new, SOLVERS[method], l2), kept=new)
    for key, tensor in tensors.items():
        role = checkpoint.family.role(key)
        if role.kind == "router" and tensor.dim() == 2:
            stored = checkpoint.tensors[role.template]
            for row in range(experts - new, experts):
                stored.row(row).write(tensor[row : row + 1].to("cpu", FLOATS[stored.dtype]))
    report = {
        "method": method,
        "positions": len(seen.fitted_N) + len(seen.held_out_N),
        "chance": 1 / (new + 1),
        "old_text": "files" if old_text else "drawn",
        "layers": layers,
    }
    write_json(extended / REPORT, report)
    return report


def fit_rows(new: int, solve, l2: float) -> Fit:
    """Rows for the last `new` experts of a router, beside the others' as they are; class `new` is old text."""

    def fit(router: torch.nn.Module, features_NH: np.ndarray, class_N: np.ndarray):
        weight_EH = router.weight.cpu().double().numpy()
        bias_E = getattr(router, "bias", None)  # of logits; corrections of the choice have another name
        bias_E = np.zeros(len(weight_EH)) if bias_E is None else bias_E.cpu().double().numpy()
        old = len(weight_EH) - new
        mean_H, known_N = weight_EH[:old].mean(0), features_NH @ weight_EH[:old].T + bias_E[:old]
        # What a class has to be likelier than: logits relative to those of the rows that new ones begin from.
        offset_N = logsumexp(known_N, axis=1) - features_NH @ mean_H
        offset_N -= bias_E[-1]
        added_nH = solve(features_NH, class_N, offset_N, new, float(old), l2)
        router.weight[old:] = torch.from_numpy(mean_H + added_nH)
        kept_EH = router.weight.cpu().double().numpy()

        def choice(x_NH: np.ndarray) -> np.ndarray:
            first_N = (x_NH @ kept_EH.T + bias_E).argmax(1) - old
            return np.where(first_N < 0, new, first_N)

        return choice

    return fit


def _likelihood(
    logits_Nn: np.ndarray, offset_N: np.ndarray, class_N: np.ndarray, weight_N: np.ndarray
) -> tuple[float, np.ndarray]:
    """Weighted negative log-likelihood of the classes, and its gradient with respect to the new logits [N, n]."""
    log_p = log_softmax(np.concatenate([logits_Nn, offset_N[:, None]], axis=1), axis=1)
    right = (np.arange(len(class_N)), class_N)
    slope = np.exp(log_p)
    loss = -(weight_N * log_p[right]).sum()
    slope[right] -= 1
    return loss, weight_N[:, None] * slope[:, :-1]


def fit_probe(
    features_NH: np.ndarray, class_N: np.ndarray, offset_N: np.ndarray, new: int, old: float, l2: float
) -> np.ndarray:
    """Rows [n, H] of a logistic regression on features scaled to a mean square of one; the logit of class n (old
    text, whose positions count `old` times) is given: `offset_N`."""
    scale_H = np.sqrt((features_NH**2).mean(0))
    scale_H[scale_H == 0] = 1
    x_NH, weight_N = features_NH / scale_H, np.where(class_N == new, old, 1.0)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        rows_nH = flat.reshape(new, -1)
        loss, slope_Nn = _likelihood(x_NH @ rows_nH.T, offset_N, class_N, weight_N)
        return loss + (flat @ flat) / (2 * l2), (slope_Nn.T @ x_NH + rows_nH / l2).ravel()

    with threadpool_limits(1):  # as in router.py: last bits do not depend on the number of threads
        found = minimize(
            objective, np.zeros(new * x_NH.shape[1]), jac=True, method="L-BFGS-B", options={"maxiter": ITERATIONS}
        )
    return found.x.reshape(new, -1) / scale_H


def fit_centroid(
    features_NH: np.ndarray, class_N: np.ndarray, offset_N: np.ndarray, new: int, old: float, l2: float
) -> np.ndarray:
    """Rows [n, H]: unit directions from the mean of old text's mean and the new domains' to each of those, times
    the length of largest likelihood."""
    means = np.stack([features_NH[class_N == c].mean(0) for c in range(new + 1)])
    means = (means - means.mean(0))[:new]
    length = np.linalg.norm(means, axis=1, keepdims=True)
    direction_nH = means / np.where(length == 0, 1, length)
    logits_Nn, weight_N = features_NH @ direction_nH.T, np.where(class_N == new, old, 1.0)

    def loss(log_scale: float) -> float:
        return _likelihood(np.exp(log_scale) * logits_Nn, offset_N, class_N, weight_N)[0]

    return direction_nH * np.exp(minimize_scalar(loss, bounds=(-12, 6), method="bounded").x)


SOLVERS = {"probe": fit_probe, "centroid": fit_centroid}


@torch.no_grad()
def known_text(old: Path, width: int, tokens: int, seed: int, files: list[Path] = ()) -> torch.Tensor:
    """Rows of `width` token ids, `tokens` or a few more in all, of text that the model in `old` knows.

    From `files`, in equal parts as far as they reach; without files the model draws them, at temperature 1.
    """
    count = max(5, -(-tokens // width))  # every fifth is held out
    tokenizer = AutoTokenizer.from_pretrained(old)
    if files:
        each = -(-count * width // len(files))
        ids: list[int] = []
        for file in files:
            with open(file, encoding="utf-8", errors="replace") as stream:
                ids += tokenizer(stream.read(20 * each))["input_ids"][:each]
        if len(ids) < 5 * width:
            raise ConfigError(
                f"model.extend.old_text: {len(files)} files hold {len(ids)} tokens, {5 * width} are needed at least"
            )
        kept = min(count, len(ids) // width)
        return torch.tensor(ids[: kept * width]).reshape(kept, width)
    model = load_model(old, _dtype(old), "eager").eval().to("cuda" if torch.cuda.is_available() else "cpu")
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    begin_B1 = torch.full((count, 1), first or 0, device=model.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drawn = [
            model.generate(
                part,
                attention_mask=torch.ones_like(part),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                min_new_tokens=width - 1,  # an end of text would end the row
                max_new_tokens=width - 1,
                pad_token_id=first or 0,
            ).cpu()
            for part in begin_B1.split(BATCH)
        ]
    return torch.cat(drawn)


def _dtype(folder: Path) -> str:
    return str(Checkpoint.open(folder).config.dtype or torch.float32).removeprefix("torch.")
