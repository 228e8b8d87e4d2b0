"""DisCo against joint training, a random split and the recipes of its relatives, at equal total tokens.

    OMP_NUM_THREADS=1 python benchmarks/disco.py --texts data/eight_domains --out runs/recipes --seeds 0 1

Settings: `continued` trains a dense base on every second passage, gives it experts and brings it to the other
passages; `scratch` begins with drawn weights. An arm is an experiment of its own in OUT; stages
that arms share are made once. With --search the learning rates of every arm are first multiplied by each of the
factors, on the first seed and a quarter of the tokens, and the best factor is kept. A run that was stopped goes on.

Work is of training steps alone: FLOPs by formula, device seconds measured, dollars of these at the prices of the
hardware table (simulated: everything runs here). "To joint's loss" is what an arm had used when the validation loss
along its fine-tuning came down to joint's last one, relative to all that joint used; "-" where it never did. State
is parameters, gradients and AdamW's moments on a cheap card, counted from the tensors' shapes.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

# This file is called disco.py too: keep its folder from hiding the package.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]
sys.path += [".", str(Path(__file__).resolve().parent)]  # last, for flexolmo.py

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from flexolmo import flexolmo

from disco import artifacts, evaluate, pipeline, single
from disco.checkpoint import Checkpoint
from disco.cluster import assignments
from disco.config import Experiment
from disco.corpus import Corpus
from disco.curves import JOINT, Curve, Used, path, reach, read_curves, total
from disco.engine import load_model
from disco.packing import Rows
from disco.stages import clusters, stages
from disco.train import price_of, rows_of, submodel_rows
from launch.ledger import append, phase_of, read

PASSAGE = 1500  # characters
JOINT_ARM, SMALL_JOINT_ARM, SEED_ARM = "joint", "joint, batch of 2", "seed model alone"
RECIPE, AVERAGED_ARM, ENSEMBLE = "DisCo", "DisCo, everything trained, averaged", "c-BTM, nearest submodel"
FLEXOLMO = "FlexOlmo, a public expert more"


class Arm(NamedTuple):
    """`shares` of the tokens for seed phase, submodels and fine-tuning; the other fields override sections."""

    shares: tuple[float, float, float]
    seed_phase: dict[str, Any] = {}
    train: dict[str, Any] = {}
    merge: dict[str, Any] = {}
    finetune: dict[str, Any] = {}
    cluster: dict[str, Any] = {}


# The default recipe, continued from a mature base: experts alone, from the base, in small steps at a low rate, then
# a short tuning at a lower one. From scratch a long seed phase comes first, and rates are ten times those.
EXPERTS = {"mode": "expert", "batch_size": 1, "learning_rate": 3e-4, "warmup": 0.05}
WHOLE = EXPERTS | {"mode": "full", "learning_rate": 1e-4}
SEED = {"batch_size": 8, "learning_rate": 3e-4, "warmup": 0.05}
TUNE = {"batch_size": 8, "learning_rate": 5e-5, "schedule": "linear", "warmup": 0.1, "min_learning_rate": 0.02}
LONG_TUNE = TUNE | {"learning_rate": 3e-4, "warmup": 0.03}
JOINT_RATE = 3e-4


def arms(setting: str) -> dict[str, Arm]:
    """The arms by name. BTX is arXiv 2403.07816 with its drawn router, the paper arXiv 2601.06857."""
    shares = (0.0, 0.96, 0.04) if setting == "continued" else (0.8, 0.12, 0.08)
    best = Arm(shares, seed_phase=SEED, train=EXPERTS, finetune=TUNE)
    drawn = {"router": "random"}
    return {
        JOINT_ARM: best,
        SMALL_JOINT_ARM: best,
        SEED_ARM: best,
        RECIPE: best,
        "DisCo, random split": best._replace(cluster={"method": "random"}),
        "DisCo, router by centroid": best._replace(merge={"router": "centroid"}),
        "DisCo, router drawn": best._replace(merge=drawn),
        AVERAGED_ARM: best._replace(train=WHOLE),
        "DisCo, seed phase 30 %": best._replace(shares=(0.3, 0.66, 0.04)),
        "DisCo, seed phase 60 %": best._replace(shares=(0.6, 0.36, 0.04)),
        "DisCo, a fifth for tuning": best._replace(shares=(0.0, 0.8, 0.2)),
        "BTX": Arm((0, 0.5, 0.5), train=WHOLE, merge=drawn, finetune=LONG_TUNE),
        "the paper's recipe": Arm((0, 0.8, 0.2), train=WHOLE, merge=drawn, finetune=LONG_TUNE),
    }


def halves(texts: Path, out: Path, characters: int, domains: list[str] | None) -> None:
    """Every second passage of each source, up to `characters`, to out/adapt; the others of `domains` to base."""
    files = sorted(texts.glob("*.jsonl"))
    if len(files) < 2:
        raise SystemExit(
            f"{texts}: holds {len(files)} .jsonl files, two or more are needed: disco fetch-corpus {texts}"
        )
    known = [file.stem for file in files]
    if unknown := sorted(set(domains or known) - set(known)):
        raise SystemExit(f"--base-domains: {texts} has no {unknown[0]}.jsonl")
    if (out / "adapt").exists():
        return
    for part, name in enumerate(("base", "adapt")):
        folder = out / f"{name}.partial"
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if name == "base" and file.stem not in (domains or known):
                continue
            passages, size = [], 0
            for line in file.read_text(encoding="utf-8").splitlines():
                text = json.loads(line)["text"]
                passages += [text[at : at + PASSAGE] for at in range(0, len(text), PASSAGE)]
                size += len(text)
                if size > characters:
                    break
            lines = [json.dumps({"text": passage}) for passage in passages[part::2]]
            (folder / file.name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.rename(folder, out / name)


def raw(args: argparse.Namespace, part: str, name: str, seed: int) -> dict[str, Any]:
    """What all experiments have in common, on one half of the documents."""
    files = sorted((args.out / "texts" / part).glob("*.jsonl"))
    return {
        "name": name,
        "runs": str(args.out),
        "seed": seed,
        "corpus": {
            "sources": [{"name": file.stem, "jsonl": [str(file.resolve())]} for file in files],
            "sequence_length": args.length,
            "tokenizer": {"kind": "train", "vocab_size": args.vocabulary},
            "validation": 0.06,
        },
        "evaluate": {"curve_points": args.points, "curve_rows": args.rows},
        "tracking": {"wandb": "disabled"},
        "launch": {"threads": args.threads, "parallel": args.parallel},
    }


def shape(args: argparse.Namespace) -> dict[str, int]:
    """What dense and MoE models have in common."""
    return {
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": args.width,
    }


def base(args: argparse.Namespace) -> Path:
    """The dense model that the setting `continued` goes on from."""
    found = raw(args, "base", "base", 0)
    found["model"] = {"config": {"model_type": "qwen2", **shape(args), "tie_word_embeddings": True}}
    found["train"] = {"tokens": args.base_tokens, "batch_size": 16, "learning_rate": 3e-3, "warmup": 0.05}
    config = Experiment.parse(found)
    single.run(config)
    return config.folder / "train"


def experiment(args: argparse.Namespace, name: str, seed: int, factor: float, tokens: int) -> Experiment:
    arm = arms(args.setting)[name]
    slug = name.replace(" ", "_").replace("%", "percent").replace(",", "").replace("'", "")
    found = raw(args, "adapt", slug, seed)
    found["runs"] = str(args.out / f"{args.setting}-{seed}-{tokens}-{factor:g}")
    if args.setting == "continued":
        found["model"] = {"source": str(args.base.resolve()), "upcycle": {"experts": args.experts, "top_k": 2}}
        found["corpus"]["tokenizer"] = {"kind": "model"}
        found["seed_phase"] = {"model": "submodel"}
    else:
        found["model"] = {"config": {
            "model_type": "qwen2_moe", **shape(args), "num_experts": args.experts, "num_experts_per_tok": 2,
            "moe_intermediate_size": args.width, "shared_expert_intermediate_size": args.hidden,
            "norm_topk_prob": True, "tie_word_embeddings": True,
        }}  # fmt: skip
    for section, share in zip(("seed_phase", "train", "finetune"), arm.shares, strict=True):
        given = dict(getattr(arm, section))
        if "learning_rate" in given:
            given["learning_rate"] *= factor * (args.scratch_rate if args.setting == "scratch" else 1)
        found[section] = found.get(section, {}) | given | {"tokens": round(share * tokens)}
    found |= {"merge": arm.merge, "cluster": arm.cluster}
    if name in (JOINT_ARM, SMALL_JOINT_ARM):
        found["baselines"] = ["joint"]
        rate = JOINT_RATE * factor * (args.scratch_rate if args.setting == "scratch" else 1)
        found["joint"] = {"learning_rate": rate, "warmup": 0.05, "batch_size": 2 if name == SMALL_JOINT_ARM else 8}
        found["finetune"] |= {"schedule": "cosine", "min_learning_rate": 0.05}
    return Experiment.parse(found)


def share_stages(config: Experiment, others: list[Path]) -> None:
    """Link stages of other arms that are the same here, with their rows of ledger and metrics."""
    for name, stage in stages(config).items():
        target = config.folder / name
        if target.exists() or not all((config.folder / need).exists() for need in stage.needs):
            continue
        key = artifacts.stage_key(pipeline.expected_inputs(config, stage), stage.section, config.seed)
        for other in others:
            if not (other / name / "manifest.json").exists() or artifacts.manifest(other / name)["key"] != key:
                continue
            shutil.copytree(other / name, target.with_name(f"{target.name}.linking"), copy_function=os.link)
            for file in ("ledger.jsonl", "metrics.jsonl"):
                for row in read(other / file) if (other / file).exists() else []:
                    if phase_of(row) == name:
                        append(config.folder / file, row)
            os.rename(target.with_name(f"{target.name}.linking"), target)
            break


def run_arm(args: argparse.Namespace, name: str, seed: int, factor: float = 1.0, tokens: int | None = None) -> dict:
    """Make what of the arm is missing, and measure it."""
    config = experiment(args, name, seed, factor, tokens or args.tokens)
    last = {JOINT_ARM: JOINT, SMALL_JOINT_ARM: JOINT, SEED_ARM: "start"}.get(name, "finetune")
    if name == SEED_ARM:  # the seed phase has all the tokens and ends like the last stage
        phase = config.seed_phase.model_copy(
            update={"tokens": tokens or args.tokens, "schedule": "cosine", "min_learning_rate": 0.05}
        )
        config = config.model_copy(update={"seed_phase": phase})
    share_stages(config, [other for other in Path(config.runs).iterdir()] if Path(config.runs).exists() else [])
    pipeline.run(config, until=[last, "cluster"], say=lambda text: None)
    found = measure(config, last)
    print(f"{config.folder}: cross-entropy {found['cross_entropy']:.4f}, {found['flops']:.3g} FLOPs", flush=True)
    return found


def validation(config: Experiment) -> tuple[Rows, Any]:
    split = Corpus.open(config.folder / "prepare").split("validation")
    return rows_of(config, split), split


def loss_and_experts(config: Experiment, model: torch.nn.Module) -> dict[str, Any]:
    """Held-out loss overall and by domain, and the model's experts by domain."""
    rows, split = validation(config)
    seen = evaluate.measure(model, rows, split, split.source, len(split.sources), config.evaluate.batch_size)
    return {
        "cross_entropy": seen.entry["cross_entropy"],
        "by_domain": {domain: part["cross_entropy"] for domain, part in seen.entry["by_source"].items()},
        "experts": None if seen.routing is None else seen.routing["counts"],
        "specialisation": None if seen.routing is None else float(np.mean(seen.routing["specialisation"])),
    }


def measure(config: Experiment, last: str) -> dict[str, Any]:
    """What the arm's last model can do, and what it took."""
    model = load_model(config.folder / last, config.model.dtype, config.model.experts)
    curves = read_curves(config.folder)
    laid = {"joint": curves[JOINT]} if last == JOINT else path(curves)
    used = total(laid)
    end = list(laid.values())[-1].validated()
    return loss_and_experts(config, model) | {
        **used._asdict(),
        "curve": {field: getattr(end, field).tolist() for field in (*Used._fields, "validation")},
        "parts": {part: curve.used()._asdict() for part, curve in laid.items()},
        "state_bytes": state_bytes(config, last if last == JOINT else None),
    }


def state_bytes(config: Experiment, stage: str | None) -> int:
    """Parameters, gradients and two moments in fp32 of the largest stage on a cheap card."""
    sizes = []
    seeded = ["start"] if config.seed_phase.tokens else []
    names = [stage] if stage else [name for name in (*seeded, "train/0") if (config.folder / name).exists()]
    for name in names:
        checkpoint = Checkpoint.open(config.folder / name)
        expert_only = name.startswith("train/") and config.train.mode == "expert"
        total_bytes = 0
        for key, stored in checkpoint.tensors.items():
            trained = not expert_only or checkpoint.family.role(key).kind == "expert"
            total_bytes += 4 * int(np.prod(stored.shape)) * (4 if trained else 1)
        sizes.append(total_bytes)
    return max(sizes)


def ensemble(config: Experiment) -> dict[str, Any]:
    """Every held-out document by the submodel of its cluster: c-BTM (arXiv 2303.14177) with one submodel a text."""
    rows, split = validation(config)
    nearest_D = assignments(config.folder / "cluster", "validation")
    sums_D, labels_D = np.zeros(len(split)), np.zeros(len(split), dtype=np.int64)
    for submodel in range(clusters(config)):
        model = load_model(config.folder / f"train/{submodel}", config.model.dtype, config.model.experts)
        one_D, count_D = evaluate.losses(model, rows, config.evaluate.batch_size, len(split))
        sums_D += np.where(nearest_D == submodel, one_D, 0)
        labels_D = count_D
    entry = evaluate.loss_of(sums_D, labels_D)
    by = evaluate.by_group(sums_D, labels_D, split.source, split.sources)
    laid = path(read_curves(config.folder))
    used = laid["submodels"].used()
    return {
        "cross_entropy": entry["cross_entropy"],
        "by_domain": {domain: part["cross_entropy"] for domain, part in by.items()},
        **used._asdict(),
        "state_bytes": state_bytes(config, None),
    }


def public_expert(args: argparse.Namespace, seed: int, factor: float) -> dict[str, Any]:
    """FlexOlmo's recipe on the clusters of the default recipe, with all tokens for the experts."""
    config = experiment(args, RECIPE, seed, factor, args.tokens)
    section = config.train.model_copy(update={"tokens": args.tokens})
    config = config.model_copy(update={"train": section})
    labels_D = assignments(config.folder / "cluster", "train")
    corpus = Corpus.open(config.folder / "prepare")
    rows = [submodel_rows(config, corpus, labels_D, cluster) for cluster in range(clusters(config))]
    model, used = flexolmo(config.folder / "start", rows, section, config.model.dtype, seed)
    rate = price_of(config, config.hardware.train).dollars_per_hour
    return loss_and_experts(config, model) | used | {"dollars": used["seconds"] / 3600 * rate}


def against(found: dict[str, Any], joint: dict[str, Any]) -> dict[str, float | None]:
    """What the arm had used at joint's final loss, and in all, relative to joint's whole cost."""
    result: dict[str, float | None] = {name: found[name] / joint[name] for name in ("flops", "seconds")}
    result["dollars"] = found["dollars"] / joint["dollars"]
    result |= {f"{name} to joint's loss": None for name in ("flops", "seconds", "dollars")}
    curve = found.get("curve")
    if curve and curve["validation"]:
        columns = {name: np.array(curve[name]) for name in (*Used._fields, "validation")}
        laid = Curve(**columns, loss=columns["validation"])
        there = reach(joint["curve"]["validation"][-1], laid, laid.validation)
        if there is not None:
            for name in ("flops", "seconds", "dollars"):
                result[f"{name} to joint's loss"] = getattr(there[0], name) / joint[name]
    return result


def search(args: argparse.Namespace, name: str) -> float:
    """The factor on the arm's learning rates that does best on the first seed with a quarter of the tokens."""
    tried = {
        factor: run_arm(args, name, args.seeds[0], factor, args.tokens // 4)["cross_entropy"]
        for factor in args.search
    }
    return min(tried, key=tried.get)


def table(args: argparse.Namespace, found: dict[str, dict[int, dict]], factors: dict[str, float]) -> str:
    """Markdown: a row an arm, means over seeds, each seed's loss beside."""
    head = [
        "arm", "rate x", "cross-entropy (by seed)", "FLOPs", "device s", "FLOPs to joint's loss",
        "device time to joint's loss",
        "dollars to joint's loss", "dollars", "state, of joint's",
    ]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    joint = found[JOINT_ARM]
    for name, runs in found.items():
        parts = [against(run, joint[seed]) for seed, run in runs.items()]

        def mean(key: str, parts=parts) -> str:
            values = [part[key] for part in parts]
            return "-" if None in values else f"{np.mean(values):.2f}"

        losses = [run["cross_entropy"] for run in runs.values()]
        state = np.mean([run["state_bytes"] / joint[seed]["state_bytes"] for seed, run in runs.items()])
        cells = [
            name, f"{factors.get(name, 1.0):g}",
            f"{np.mean(losses):.4f} ({', '.join(f'{loss:.4f}' for loss in losses)})",
            mean("flops"), mean("seconds"), mean("flops to joint's loss"), mean("seconds to joint's loss"),
            mean("dollars to joint's loss"), mean("dollars"), f"{state:.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(args: argparse.Namespace, found: dict[str, dict[int, dict]], folder: Path) -> None:
    """Held-out loss over work, an arm a point beside joint's curve; and which experts serve which domain."""
    seed = args.seeds[0]
    figure, axes = plt.subplots(figsize=(8, 5))
    for name, runs in found.items():
        run = runs[seed]
        if "curve" in run and run["curve"]["validation"]:
            [line] = axes.plot(run["curve"]["flops"], run["curve"]["validation"], marker=".", label=name)
        else:
            axes.plot(run["flops"], run["cross_entropy"], "x", label=name)
    axes.set(
        xlabel="FLOPs of training", ylabel="validation loss, nats a token", title=f"{args.setting}, seed {seed}"
    )
    axes.legend(fontsize=7)
    figure.savefig(folder / f"{args.setting}_loss.svg")
    run = found[RECIPE][seed]
    counts_SE = np.array(run["experts"]).sum(0)
    share_SE = counts_SE / counts_SE.sum(1, keepdims=True)
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.imshow(share_SE, cmap="Blues")
    axes.set(xlabel="expert", yticks=range(len(share_SE)), title="share of a domain's choices, all layers")
    axes.set_yticklabels(list(run["by_domain"]))
    figure.tight_layout()
    figure.savefig(folder / f"{args.setting}_experts.svg")
    plt.close("all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder of .jsonl files, one a domain")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--setting", choices=("continued", "scratch"), default="continued")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--tokens", type=int, default=524_288)
    parser.add_argument("--base-tokens", type=int, default=6_000_000)
    parser.add_argument("--base-domains", nargs="+", help="domains that the base knows; all if absent")
    parser.add_argument("--characters", type=int, default=5_000_000, help="of each source")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=256, help="of an expert")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--points", type=int, default=10, help="validation losses along a curve")
    parser.add_argument("--rows", type=int, default=256, help="validation rows of such a point")
    parser.add_argument("--scratch-rate", type=float, default=10.0, help="factor on all rates from scratch")
    parser.add_argument(
        "--search", type=float, nargs="*", default=[], help="factors on the rates, for example 0.5 1 2"
    )
    parser.add_argument("--factor", action="append", default=[], metavar="ARM=F", help="in place of a search")
    parser.add_argument("--threads", type=int, default=1, help="of each training process")
    parser.add_argument("--parallel", type=int, default=1, help="submodels trained at once")
    parser.add_argument("--arms", nargs="+", default=list(arms("scratch")), choices=list(arms("scratch")))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    halves(args.texts, args.out / "texts", args.characters, args.base_domains)
    args.base = base(args) if args.setting == "continued" else None
    names = [JOINT_ARM, *(name for name in args.arms if name != JOINT_ARM)]
    given = {name: float(factor) for name, _, factor in (item.rpartition("=") for item in args.factor)}
    if unknown := sorted(set(given) - set(arms(args.setting))):
        parser.error(f"--factor: there is no arm '{unknown[0]}'")
    factors = {name: given.get(name) or (search(args, name) if args.search else 1.0) for name in names}
    found: dict[str, dict[int, dict]] = {name: {} for name in names}
    for seed in args.seeds:
        for name in names:
            found[name][seed] = run_arm(args, name, seed, factors[name])
        if AVERAGED_ARM in names:
            config = experiment(args, AVERAGED_ARM, seed, factors[AVERAGED_ARM], args.tokens)
            found.setdefault(ENSEMBLE, {})[seed] = ensemble(config)
        if args.setting == "continued" and RECIPE in names:
            found.setdefault(FLEXOLMO, {})[seed] = public_expert(args, seed, factors[RECIPE])
    artifacts.write_json(
        args.out / f"{args.setting}.json", {"arguments": vars(args), "factors": factors, "arms": found}
    )
    text = table(args, found, factors)
    (args.out / f"{args.setting}.md").write_text(text + "\n", encoding="utf-8")
    if RECIPE in found:
        draw(args, found, args.out)
    print(text)


if __name__ == "__main__":
    main()
