"""The model card of a run's last model: README.md in its folder."""

from pathlib import Path

from disco import sections
from disco.artifacts import ArtifactError
from disco.checkpoint import load_config
from disco.evaluate import models
from disco.family import num_experts, top_k
from disco.findings import Run, count, duration, loss, money, number
from disco.page import Block, Code, Heading, Picture, Table, Text, to_markdown

CARD = "README.md"
FRONT = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [moe, moe-disco]\n---\n\n"
USE = """from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{name}"
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
"""


def write_card(run: Run) -> Path | None:
    """Write what the last model is, what it was made from, what it cost and how good it is; None without one."""
    folder = models(run.folder, 0).get(run.final)
    if folder is None:
        return None
    (folder / CARD).write_text(FRONT + to_markdown(_blocks(run, folder), ""), encoding="utf-8")
    return folder / CARD


def _blocks(run: Run, folder: Path) -> list[Block]:
    try:
        config = load_config(folder)
        what = (
            f"A Mixture-of-Experts ({config.model_type}) of {num_experts(config)} experts, {top_k(config)} a token."
        )
    except (ArtifactError, ValueError) as error:
        what = f"Its configuration cannot be read: {error}"
    model = run.config.model
    origin = f"Started from {model.source}" if model.source else "Trained from scratch"
    if model.upcycle:
        origin += f", a dense model upcycled to {model.upcycle.experts} experts (method {model.upcycle.method})"
    content: list[Block] = [
        Heading(run.config.name, 1),
        Text(f"{what} {origin}, one submodel a cluster, merged (router: {run.config.merge.router}) and tuned."),
        Heading("Sources and clusters"),
        *(block for block in sections.clusters(run) if not isinstance(block, Picture)),
        Heading("Perplexity"),
        Table(["held-out text", "cross-entropy", "perplexity", "tokens"], _quality(run)),
        Heading("Cost"),
        Table(["stage", "tokens", "device time", "dollars", "priced as"], _cost(run)),
    ]
    if run.bill.simulated:
        content.append(Text("Ran on other devices than those priced: dollars are simulated."))
    return [*content, Heading("Use"), Code("Python", USE.format(name=folder.name))]


def _quality(run: Run) -> list[list[str]]:
    entry = run.models[run.final]
    parts = {"all": entry} | entry.get("by_source", {})
    return [
        [name, loss(part["cross_entropy"]), number(part["perplexity"]), count(part["tokens"])]
        for name, part in parts.items()
    ]


def _cost(run: Run) -> list[list[str]]:
    return [
        [
            stage,
            count(cost.tokens),
            duration(cost.seconds),
            money(cost.dollars),
            run.bill.priced_as(("DisCo", stage)),
        ]
        for stage, cost in run.bill.parts("DisCo").items()
    ]
