"""The report of a run: report.html (self-contained) and report.md (with its pictures beside it)."""

from pathlib import Path

from disco import sections
from disco.card import write_card
from disco.config import Experiment
from disco.findings import Run, gather, headline
from disco.page import Block, Code, Heading, Picture, to_html, to_markdown
from disco.sharing import sharing

PICTURES = "pictures"


def report(config: Experiment, run: Path, out: Path) -> None:
    """Write report.html and report.md into `out`, and the model card into the last model's folder.

    Pieces that the run does not have (no baseline, no clusters, no curve) leave a sentence in their place.
    Raises ArtifactError where the evaluation is missing or damaged.
    """
    found = gather(config, run)
    content = blocks(found)
    (out / PICTURES).mkdir(exist_ok=True)
    for block in content:
        if isinstance(block, Picture):
            (out / PICTURES / block.name).write_bytes(block.data)
    (out / "report.html").write_text(to_html(f"{config.name}: DisCo report", content), encoding="utf-8")
    (out / "report.md").write_text(to_markdown(content, PICTURES), encoding="utf-8")
    write_card(found)


def blocks(run: Run) -> list[Block]:
    """The report, top to bottom."""
    content: list[Block] = [Heading(run.config.name, 1), *headline(run)]
    content += [Heading("How good the models are"), *sections.quality(run)]
    content += [Heading("Loss along the way"), *sections.progress(run)]
    content += [Heading("What it cost"), *sections.cost(run)]
    content += [Heading("Clusters"), *sections.clusters(run)]
    content += [Heading("Routing"), *sections.routing(run), *sharing(run)]
    if run.results.get("tasks"):
        content += [Heading("Tasks"), *sections.tasks(run)]
    content += [Heading("How to get this again"), *sections.provenance(run)]
    return [*content, Code("Resolved configuration", run.config.dump())]
