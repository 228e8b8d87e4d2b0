"""The report's sections. Each returns its blocks; what a run does not have is said in a sentence instead."""

import platform
import time
from pathlib import Path

import numpy as np

from disco import artifacts, pictures
from disco.artifacts import ArtifactError
from disco.cluster import assignments
from disco.corpus import Corpus
from disco.costs import PIPELINES, UNTRAINED, Cost
from disco.curves import FINETUNE, ROUTER
from disco.evaluate import loss_of
from disco.findings import Run, count, duration, loss, money, number
from disco.page import Block, Heading, Picture, Strong, Table, Text

MOST_PANELS = 12  # layers drawn of a deep model
MOST_SUBMODELS = 12  # rows in the tables of losses
OWN = "submodels, each on its own cluster"
LOOKS = {"start": "seed", "router tuned": "router", "tuned": "fine-tuning", "merged": "submodels"}


def quality(run: Run) -> list[Block]:
    """Cross-entropy and perplexity of every model: overall, by cluster, by source."""
    if not run.models:
        return [Text("No model was evaluated.")]
    other, shown = run.loss("joint"), _shown_models(run)
    rows = []
    for name, entry in shown.items():
        gap = None if other is None or entry["cross_entropy"] is None else entry["cross_entropy"] - other
        row = [name, loss(entry["cross_entropy"]), number(entry["perplexity"])]
        row += [] if other is None else ["-" if gap is None else f"{gap:+.3f}"]
        rows.append([Strong(cell) for cell in row] if name == run.final else row)
    first = next(iter(run.models.values()))
    columns = ["model", "cross-entropy", "perplexity", *(["against joint"] if other is not None else [])]
    content: list[Block] = [
        Text(
            f"On {count(first['tokens'])} held-out tokens. Cross-entropy is in nats a token, weighted by tokens, "
            "without auxiliary losses; perplexity is its exponential. Lower is better."
        ),
        Table(columns, rows),
    ]
    for kind, title, explained in (
        ("by_cluster", "By cluster", "A submodel's own cluster stands out. "),
        ("by_source", "By source", ""),
    ):
        groups = [name for name, part in first[kind].items() if part["tokens"]]
        if len(groups) < 2:
            continue
        rows = [
            [name, *(_mark(name, kind, group, entry[kind].get(group, {})) for group in groups)]
            for name, entry in shown.items()
            if entry[kind]
        ]
        rows.append(["held-out tokens", *(count(first[kind][group]["tokens"]) for group in groups)])
        content += [
            Heading(title, 3),
            Text(f"{explained}Cross-entropy of each model."),
            Table(["model", *groups], rows),
        ]
    return content


def _shown_models(run: Run) -> dict[str, dict]:
    """The models, with one more row for the submodels, and without themselves where they are many.

    That row gives every document to its cluster's submodel: what perfect routing to single experts would reach.
    """
    alone = {name: entry for name, entry in run.models.items() if name.startswith("submodel ")}
    own = {name.split()[1]: entry["by_cluster"].get(name.split()[1]) for name, entry in alone.items()}
    shown = {}
    for name, entry in run.models.items():
        if name not in alone or len(alone) <= MOST_SUBMODELS:
            shown[name] = entry
        if alone and name == list(alone)[-1] and all(own.values()):
            tokens = np.array([part["tokens"] for part in own.values()])
            losses = np.array([part["cross_entropy"] or 0.0 for part in own.values()])
            if tokens.sum() == entry["tokens"]:
                shown[OWN] = loss_of(losses * tokens, tokens) | {"by_cluster": own, "by_source": {}}
    return shown


def _mark(model: str, kind: str, group: str, part: dict) -> str:
    text = loss(part.get("cross_entropy"))
    own = kind == "by_cluster" and model in (f"submodel {group}", OWN)
    return Strong(text) if own else text


def progress(run: Run) -> list[Block]:
    """Loss over tokens and over dollars, and what joint training needs to reach DisCo's loss."""
    disco, joint, random = run.path(), run.joint, run.random_path()
    if not disco and joint is None:
        return [Text("No stage of this run was trained, so there is no curve.")]
    finals = []
    for pipeline, prefix, laid in (("DisCo", "", disco), ("random split", "random_split ", random)):
        for name, stage in LOOKS.items():
            value = run.loss(name if name == "start" else prefix + name)
            if value is not None and stage in laid and not (name == "start" and pipeline != "DisCo"):
                finals.append((pipeline, stage, value))
    if run.loss("joint") is not None and joint is not None:
        finals.append(("joint", "joint training", run.loss("joint")))
    explained = (
        "Phases of DisCo one after the other; what all submodels used is added up. Lines with dots are validation "
        "losses, those without (and the thin ones) training losses, smoothed; a submodel's is on its own cluster, "
        "and so not comparable with the others."
    )
    content: list[Block] = [
        Picture(f"loss_{axis}.svg", pictures.losses(axis, disco, joint, random, finals), f"{unit} {explained}")
        for axis, unit in (
            ("tokens", "Loss over tokens."),
            ("dollars", "Loss over dollars of training steps, at the configured prices."),
        )
    ]
    return [*content, Heading("To DisCo's loss by joint training", 3), *_equal_loss(run)]


def _equal_loss(run: Run) -> list[Block]:
    equal = run.equal_loss()
    if equal is None:
        return [Text("There is no joint baseline (baselines: [joint]) to read this off.")]
    said = f"Compared is the {equal.measure}: DisCo ends at {loss(equal.target)}."
    if equal.joint is None:
        return [Text(f"{said} Joint training never gets there in this run: its best is {loss(equal.joint_best)}.")]
    if not equal.exact:
        said += " Joint training was below that at its first measurement: its figures are upper bounds."
    shown = {"tokens": count, "flops": count, "seconds": duration, "dollars": money}
    names = {"tokens": "tokens", "flops": "FLOPs", "seconds": "device time", "dollars": "dollars"}
    rows = []
    for name, form in shown.items():
        mine, other = getattr(equal.disco, name), getattr(equal.joint, name)
        rows.append([names[name], form(mine), form(other), f"{mine / other:.2f}" if other else "-"])
    content: list[Block] = [
        Text(f"{said} Training steps alone, without start-up."),
        Table(["", "DisCo, all phases", "joint training, to this loss", "DisCo / joint"], rows),
    ]
    ratio = _break_even(run, equal.joint.seconds) if equal.exact else None
    if ratio is not None:
        content.append(Text(ratio))
    return content


def _break_even(run: Run, joint_seconds: float) -> str | None:
    """At which price of a cheap device-hour, relative to a big one's, DisCo costs what joint training costs."""
    laid = run.path()
    tuned = sum(run.curves[phase].used().seconds for phase in (ROUTER, FINETUNE) if phase in run.curves)
    cheap = list(laid.values())[-1].used().seconds - tuned
    if cheap <= 0:
        return None
    ratio = (joint_seconds - tuned) / cheap
    begin = f"Break-even at equal loss: {run.config.hardware.train} against {run.config.hardware.finetune}"
    if ratio <= 0:
        return f"{begin}: none, fine-tuning alone takes longer than joint training needs."
    return (
        f"{begin}: DisCo is the cheaper one where a device-hour of the first costs less than {ratio:.2f} times "
        "one of the second (and both run at the speed measured here)."
    )


def cost(run: Run) -> list[Block]:
    """Cost by stage, at the configured prices and with every device priced alike; waste apart."""
    bill = run.bill
    if not bill.rows:
        return [Text("The ledger is empty: nothing was trained.")]
    bills = {name: bill.parts(name) for name in PIPELINES if bill.parts(name)}
    rows = []
    for pipeline, parts in bills.items():
        for stage, spent in parts.items():
            shared = pipeline == "random split" and stage == "seed"
            key = ("DisCo", "seed") if shared else (pipeline, stage)
            sums = bill.sums[key]
            rows.append(
                [
                    f"{pipeline}: {stage}{' (shared)' if shared else ''}",
                    bill.priced_as(key),
                    duration(spent.seconds),
                    duration(spent.startup),
                    duration(sums.makespan_seconds),
                    money(spent.dollars),
                    money(spent.seconds * run.price / 3600),
                    count(spent.tokens),
                    count(spent.flops),
                    f"{sums.peak_memory_bytes / 1e9:.2f} GB",
                ]
            )
        if len(parts) > 1:
            rows.append([Strong(cell) for cell in _sum_row(f"{pipeline}: total", bill.pipeline(pipeline), run)])
    columns = [
        "stage",
        "priced as",
        "device time",
        "start-up",
        "longest",
        "dollars",
        "priced alike",
        "tokens",
        "FLOPs",
        "peak memory",
    ]
    alike = f"${run.price:g} an hour, the price of {run.config.hardware.finetune}"
    return [
        Picture(
            "costs.svg",
            pictures.costs(bills, run.price),
            f"Cost by stage, at the configured prices and with every device at {alike} (device time, that is).",
        ),
        Table(columns, rows),
        Text(
            "Device time is summed over devices and submodels, start-up included; longest is the longest of those "
            "that can run side by side, what one waits for. FLOPs are matrix products, by formula. Priced alike: "
            f"every device at {alike}. "
            f"Prices: {'; '.join(f'{name} {price}' for name, price in bill.prices().items())}."
        ),
        *_waste(run),
        *_untrained(run),
    ]


def _sum_row(name: str, whole: Cost, run: Run) -> list[str]:
    alike = money(whole.seconds * run.price / 3600)
    return [name, "", duration(whole.seconds), duration(whole.startup), "", money(whole.dollars), alike, "", "", ""]


def _waste(run: Run) -> list[Block]:
    wasted = {key: spent for key, spent in run.bill.stages.items() if spent.wasted_seconds > 0}
    if not wasted:
        return [Text("Nothing was wasted: no stage was killed or done twice.")]
    whole = Cost()
    for spent in wasted.values():
        whole = whole.plus(spent)
    places = ", ".join(f"{pipeline}: {stage}" for pipeline, stage in wasted)
    return [
        Text(
            f"Wasted beside these figures: {money(whole.wasted_dollars)} and {duration(whole.wasted_seconds)} of "
            f"device time in attempts that were killed or repeated ({places}).",
            "note",
        )
    ]


def _untrained(run: Run) -> list[Block]:
    """What the stages cost that train nothing; of a run without such rows their wall time."""
    if spent := run.bill.parts(UNTRAINED):
        whole = Cost()
        for cost in spent.values():
            whole = whole.plus(cost)
        parts = ", ".join(f"{stage} {duration(cost.seconds)}" for stage, cost in spent.items())
        return [Text(f"Beside training, in no sum above: {money(whole.dollars)} for {parts}.")]
    took = []
    for stage in ("prepare", "cluster", "merge", "evaluate"):
        try:
            note = artifacts.manifest(run.folder / stage)
            took.append(f"{stage} {duration(note['finished'] - note['started'])}")
        except ArtifactError:
            continue
    return [Text(f"Not priced, wall time on one machine: {', '.join(took)}.")] if took else []


def clusters(run: Run) -> list[Block]:
    """The map, and what each cluster holds."""
    folder = run.folder / "cluster"
    try:
        labels_D, split = assignments(folder, "train"), Corpus.open(run.folder / "prepare").split("train")
        notes = artifacts.read_json(folder / "clusters.json")
    except (ArtifactError, FileNotFoundError) as error:
        return [Text(f"The clusters cannot be shown: {error}")]
    k = 1 + int(labels_D.max())
    terms = notes.get("terms", [])
    total = max(1, int(split.tokens.sum()))
    rows = []
    for cluster in range(k):
        inside = labels_D == cluster
        tokens = int(split.tokens[inside].sum())
        of_source = np.bincount(split.source[inside], weights=split.tokens[inside], minlength=len(split.sources))
        most = [
            f"{split.sources[source]} {of_source[source] / max(tokens, 1):.0%}"
            for source in np.argsort(-of_source)[:3]
            if of_source[source] >= 0.01 * tokens and of_source[source] > 0
        ]
        words = ", ".join(map(str, terms[cluster][:10])) if cluster < len(terms) else ""
        share = f"{tokens / total:.1%}"
        rows.append([str(cluster), f"{inside.sum():,}", count(tokens), share, words, ", ".join(most)])
    said = [f"{k} clusters of {len(labels_D):,} training documents by {run.config.cluster.method}"]
    if run.config.cluster.method == "kmeans":
        said[0] += f" on {run.config.cluster.features} features, balance: {run.config.cluster.balance}"
    for key, name in (("silhouette", "silhouette"), ("nmi", "NMI with the sources"), ("purity", "purity")):
        if isinstance(notes.get(key), (int, float)):
            said.append(f"{name} {notes[key]:.3f}")
    content: list[Block] = [Text("; ".join(said) + ".")]
    if (folder / "map.png").exists():
        content.append(
            Picture("map.png", (folder / "map.png").read_bytes(), "Documents in two dimensions.", "image/png")
        )
    columns = ["cluster", "documents", "tokens", "share", "top terms", "sources, by tokens"]
    return [*content, Table(columns, rows, left=("top terms", "sources, by tokens"))]


def routing(run: Run) -> list[Block]:
    """Which expert serves which cluster in the last model, layer by layer."""
    found = run.results.get("routing", {})
    name = run.final if run.final in found else next(iter(found), None)
    if name is None:
        return [Text("No model of this run has more than one expert, so there is no routing.")]
    counts_LKE = np.array(found[name]["counts"])
    layers = counts_LKE.shape[0]
    drawn = np.unique(np.linspace(0, layers - 1, min(layers, MOST_PANELS)).round().astype(int))
    content: list[Block] = [
        Picture(
            "routing.svg",
            pictures.routing(counts_LKE, drawn),
            f"Where the tokens of each cluster go in the model '{name}': share of a cluster's choices that each "
            "expert gets, in per cent. The experts follow the clusters that they were trained on.",
        )
    ]
    probe = _probe_accuracy(run.folder / "merge" / "router.json")
    columns = ["MoE layer"]
    for model in found:
        columns += [f"{model}: load entropy", "specialisation", "dead"]
    rows = []
    for layer in range(layers):
        row = [str(layer)]
        for entry in found.values():
            dead = ", ".join(map(str, entry["dead"][layer])) or "none"
            row += [f"{entry['entropy'][layer]:.3f}", f"{entry['specialisation'][layer]:.3f}", dead]
        rows.append(row)
    content += [
        Table(columns, rows),
        Text(
            "Load entropy: 1 where all experts get as much, 0 where one gets everything. Specialisation: mutual "
            "information of cluster and expert, 1 where one settles the other. Dead: experts with less than 1 % "
            "of an even share."
        ),
    ]
    if probe:
        content.append(Text(probe))
    return content


def _probe_accuracy(file: Path) -> str | None:
    """What router.json says about the fitted router, in a sentence."""
    if not file.exists():
        return None
    note = artifacts.read_json(file)
    held = [layer.get("held_out_accuracy") for layer in note.get("layers", [])]
    held = [f"{value:.0%}" for value in held if value is not None]
    if not held:
        return f"The merged model's router: {note.get('method')}."
    return (
        f"The merged model's router was fitted ({note['method']}); on held-out documents its first choice is the "
        f"expert of the document's cluster for {', '.join(held)} of the tokens, layer by layer "
        f"(chance {note['chance']:.0%})."
    )


def tasks(run: Run) -> list[Block]:
    """lm_eval's scores, a model a column."""
    found = run.results["tasks"]
    names = dict.fromkeys((task, metric) for scores in found.values() for task in scores for metric in scores[task])
    rows = [
        [f"{task}: {metric}", *(number(scores.get(task, {}).get(metric)) for scores in found.values())]
        for task, metric in names
    ]
    return [Table(["task", *found], rows)]


def provenance(run: Run) -> list[Block]:
    """Versions, seed, date, and the commands."""
    packages = artifacts.package_versions()
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    devices = ", ".join(dict.fromkeys(str(row["device"]) for row in run.bill.rows if row.get("device")))
    rows = [
        ["seed", str(run.config.seed)],
        ["written", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())],
        [
            "ran on",
            f"{devices or '-'}; {platform.system()} {platform.machine()}, Python {platform.python_version()}",
        ],
        ["versions", versions],
    ]
    return [
        Table(["", "value"], rows, left=("value",)),
        Text("Save the configuration below as experiment.yaml, then: disco run experiment.yaml"),
    ]
