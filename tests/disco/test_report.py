"""The report of fabricated runs: what it says, that it is well-formed, escaped and complete in itself."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from disco import pictures, sections
from disco.artifacts import ArtifactError
from disco.costs import Bill
from disco.findings import Run, count, duration, gather, money, number, verdict
from disco.page import Code, Heading, Picture, Strong, Table, Text, Tiles, to_html, to_markdown
from disco.report import blocks, report
from tests.disco.fabricated_run import fabricate

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Checks that tags nest; collects text and attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.text, self.links = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def write(config):
    out = config.folder / "report"
    out.mkdir(exist_ok=True)
    report(config, config.folder, out)
    return (out / "report.html").read_text(), (out / "report.md").read_text()


def text_of(html: str) -> str:
    return " ".join(" ".join(Page(html).text).split())


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    config = fabricate(tmp_path_factory.mktemp("full"))
    return config, *write(config)


def test_page_is_well_formed_and_needs_nothing_from_outside(full):
    _, html, _ = full
    page = Page(html)
    assert page.links and all(link.startswith("data:image/") for link in page.links)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.tags.count("img") == 5  # two loss curves, costs, cluster map, routing


def test_headline_says_what_it_cost_and_how_good_it_is(full):
    config, html, _ = full
    text = text_of(html)
    assert "DisCo ends at a held-out cross-entropy of 4.810 after training on 2.96M tokens" in text
    assert "ends at 4.650: DisCo is 0.160 (± 0.008) nats a token worse." in text
    disco, joint = (gather(config, config.folder).bill.pipeline(name) for name in ("DisCo", "joint"))
    assert f"It cost {money(disco.dollars)} against {money(joint.dollars)}" in text
    assert f"({disco.seconds / joint.seconds:.2f} times)" in text
    assert "clustering helps by 0.030 (± 0.006)" in text
    assert "Simulated prices: everything ran on cpu" in text and "2026-01" in text
    assert "Start-up of processes is" in text and "One seed (0)" in text
    assert "Trained with AdamW throughout." in text


def test_costs_count_every_ledger_row_once(full):
    config, _, _ = full
    bill = gather(config, config.folder).bill
    for name in ("dollars", "seconds"):
        kept = sum(getattr(cost, name) + getattr(cost, f"wasted_{name}") for cost in bill.stages.values())
        rows = sum(row["dollars"] if name == "dollars" else row["seconds"] for row in bill.rows)
        assert kept == pytest.approx(rows)
    killed = bill.stages["DisCo", "submodels"]
    assert killed.wasted_seconds == pytest.approx(5 * 0.34 + 8)  # five steps and one start-up


def test_sections_hold_their_figures(full):
    _, html, markdown = full
    text = text_of(html)
    for said in (
        "joint training, to this loss",
        "Break-even at equal loss",
        "Wasted beside these figures",
        "prepare 21 s, cluster 9.5 s",
        "4 clusters of 400 training documents by kmeans on tfidf features",
        "NMI with the sources 0.713",
        "on held-out documents its first choice is the expert of the document's cluster for 50%, 52%",
        "(chance 25%)",
        "MoE-DisCo, arXiv 2601.06857, table of costs, 2026-01",
        "transformers",
        "Resolved configuration",
        "random split: seed (shared)",
    ):
        assert said in text, said
    assert "| **tuned** | **4.810** |" in markdown and "![" in markdown


def test_markdown_pictures_lie_beside_it(full):
    config, _, markdown = full
    for name in re.findall(r"\]\((pictures/[^)]+)\)", markdown):
        data = (config.folder / "report" / name).read_bytes()
        assert data.startswith(b"\x89PNG") if name.endswith("png") else ElementTree.fromstring(data) is not None


def test_submodels_on_their_own_clusters_are_summed_up(full, tmp_path):
    config, html, _ = full
    models = gather(config, config.folder).models
    parts = [models[f"submodel {k}"]["by_cluster"][str(k)] for k in range(4)]
    tokens = sum(part["tokens"] for part in parts)
    expected = sum(part["cross_entropy"] * part["tokens"] for part in parts) / tokens
    many = fabricate(tmp_path, k=13)
    text = text_of(write(many)[0])
    assert "submodels, each on its own cluster" in text and "submodel 3" not in text
    shown = sections._shown_models(Run(config, config.folder, {"models": models}, Bill([]), {}, 1.0))
    assert shown[sections.OWN]["cross_entropy"] == pytest.approx(expected) and "submodel 3" in shown


def test_winning_losing_and_a_tie(tmp_path):
    for gap, said in (
        (-0.2, "0.200 (± 0.008) nats a token better"),
        (0.3, "0.300 (± 0.008) nats a token worse"),
        (0.007, "no difference to speak of, +0.007 (± 0.008)"),
    ):
        config = fabricate(tmp_path / str(gap), gap=gap)
        assert said in " ".join(verdict(gather(config, config.folder)))
    config = fabricate(tmp_path / "win", gap=-0.2)
    html, _ = write(config)
    assert "Joint training does not reach DisCo's loss in this run" in text_of(html)
    assert "Joint training never gets there" in text_of(html)


def test_a_random_split_that_does_better_or_as_well_is_said(tmp_path):
    config = fabricate(tmp_path)
    file = config.folder / "evaluate" / "results.json"
    results = json.loads(file.read_text())
    for value, said in ((4.7, "clustering does not help here, it loses 0.110"), (4.812, "equally well")):
        results["models"]["random_split tuned"]["cross_entropy"] = value
        file.write_text(json.dumps(results))
        assert said in " ".join(verdict(gather(config, config.folder)))


def test_a_saving_that_is_only_the_price_is_called_that(tmp_path):
    config = fabricate(tmp_path, phases=("start", "train", "finetune", "joint"))
    ledger = config.folder / "ledger.jsonl"
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    for row in rows:
        if row["phase"].startswith("train"):
            row["seconds"], row["dollars"] = row["seconds"] * 3, row["dollars"] * 3
    ledger.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "the lower price of the cheap devices, not less work" in " ".join(verdict(gather(config, config.folder)))


MISSING = {
    "no baseline": (
        {"phases": ("start", "train", "finetune")},
        ["Joint training was not run", "There is no joint baseline"],
    ),
    "no fine-tuning": ({"phases": ("train", "joint")}, ["joint's curve shifted to the whole validation split"]),
    "no validation curve": ({"validation": False}, ["smoothed training loss, for want of validation losses"]),
    "no clusters": ({"clusters": False}, ["The clusters cannot be shown"]),
    "one submodel": ({"k": 1}, ["1 clusters of 400"]),
    "nothing trained": ({"phases": ()}, ["no curve", "The ledger is empty", "no routing"]),
    "only joint": ({"phases": ("joint",)}, ["no finite validation loss"]),
    "far behind": ({"gap": 2.5}, ["its figures are upper bounds", "with at most", "takes at least"]),
    "tuned from a checkpoint": ({"phases": ("finetune", "joint")}, ["DisCo, all phases"]),
    "nothing killed": ({"killed": False}, ["Nothing was wasted"]),
}


@pytest.mark.parametrize("what", MISSING)
def test_missing_pieces_leave_a_sentence(tmp_path, what):
    arguments, expected = MISSING[what]
    text = text_of(write(fabricate(tmp_path, **arguments))[0])
    for said in expected:
        assert said in text, said


def test_losses_that_are_not_finite_and_few_rows(tmp_path):
    config = fabricate(tmp_path)
    file = config.folder / "evaluate" / "results.json"
    results = json.loads(file.read_text())
    results["models"]["joint"] |= {"cross_entropy": None, "perplexity": None}
    results["validation"]["rows_used"] = 3
    del results["differences"]
    results["tasks"] = {"tuned": {"piqa": {"acc": 0.5125}}, "joint": {}}
    file.write_text(json.dumps(results))
    text = text_of(write(config)[0])
    assert "Evaluated on 3 of 210 validation rows" in text and "piqa: acc 0.5125 -" in text


def test_missing_or_damaged_evaluation_is_named(tmp_path):
    config = fabricate(tmp_path)
    file = config.folder / "evaluate" / "results.json"
    for content, message in (("[]", "names no models"), ("{", "damaged")):
        file.write_text(content)
        with pytest.raises(ArtifactError, match=message):
            gather(config, config.folder)
    file.unlink()
    with pytest.raises(ArtifactError, match="no such file"):
        gather(config, config.folder)


def test_what_users_supply_is_escaped_everywhere(tmp_path):
    nasty = ("<script>alert(1)</script>", "a|b", "$x_1$ & co", "`code`", '"quoted"', "_em_", "ünïcödé", "]](x")
    config = fabricate(tmp_path, terms=nasty)
    html, markdown = write(config)
    assert "<script" not in html and "&lt;script&gt;alert(1)" in html and "$x_1$ &amp; co" in html
    assert "<script" not in markdown and "&lt;script&gt;" in markdown and r"a\|b" in markdown
    rows = [line for line in markdown.splitlines() if r"a\|b" in line]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 7 for row in rows)


def test_reports_are_the_same_but_for_the_time(full):
    config, html, _ = full
    first, second = (re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "", page) for page in (html, write(config)[0]))
    assert first == second


def test_deep_and_wide_models_are_drawn_in_part():
    counts = np.random.default_rng(0).integers(0, 9, (30, 20, 60))
    drawn = ElementTree.fromstring(pictures.routing(counts, range(0, 30, 3)))
    assert drawn.tag.endswith("svg")
    assert ElementTree.fromstring(pictures.routing(np.zeros((1, 1, 1), dtype=int), [0])) is not None


def test_blocks_in_both_languages():
    content = [
        Heading("A < B", 3),
        Text("x", "lead"),
        Text("y", "note"),
        Tiles([("what", "1", "against")]),
        Table(["n", "left", "right"], [["a", "b", Strong("c")]], left=("left",)),
        Picture("p.png", b"\x89PNG", "cap", "image/png"),
        Code("title", "```\nx: <y>\n"),
    ]
    html = to_html("T & T", content)
    Page(html)
    assert "<title>T &amp; T</title>" in html and "<h3>A &lt; B</h3>" in html
    assert '<td class="left">b</td><td><strong>c</strong></td>' in html and "x: &lt;y&gt;" in html
    markdown = to_markdown(content, "pictures")
    assert "### A &lt; B" in markdown and "**x**" in markdown and "> y" in markdown
    assert "| --- | --- | ---: |" in markdown and "| a | b | **c** |" in markdown
    assert "![cap](pictures/p.png)" in markdown and "````\n```\nx: <y>\n````" in markdown


def test_numbers_in_the_unit_that_suits_them():
    assert [money(value) for value in (22.504, 1234.5, 0.01234, 0)] == ["$22.50", "$1,234.50", "$0.0123", "$0"]
    assert [duration(value) for value in (0.5, 119, 600, 9000)] == ["0.5 s", "119 s", "10.0 min", "2.5 h"]
    assert [count(value) for value in (12, 1234, 2.5e6, 3e9, 5.25e12)] == ["12", "1.23k", "2.5M", "3B", "5.25T"]
    assert [number(value) for value in (None, 12.3456, 12345.6)] == ["-", "12.35", "12,346"]


def test_report_needs_no_more_than_its_blocks(full):
    config, _, _ = full
    kinds = {type(block) for block in blocks(gather(config, config.folder))}
    assert kinds == {Heading, Text, Tiles, Table, Picture, Code}


def change(config, name, edit):
    """Edit each row of a JSON-lines file of the run."""
    file = config.folder / f"{name}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row | edit(row)) + "\n" for row in rows))


def test_devices_that_cost_nothing(tmp_path):
    config = fabricate(tmp_path, phases=("start", "train", "finetune", "joint"))
    for name in ("metrics", "ledger"):
        change(config, name, lambda row: {"dollars": 0.0})
    text = text_of(write(config)[0])
    assert "It cost" not in text and "at equal loss DisCo takes" not in text and "dollars $0 $0 -" in text


def test_no_price_makes_up_for_a_long_fine_tuning(tmp_path):
    config = fabricate(tmp_path)
    change(config, "metrics", lambda row: {"seconds": 99 * row["seconds"]} if row["phase"] == "finetune" else {})
    assert "Break-even at equal loss: rtx4090 against a100: none, fine-tuning alone" in text_of(write(config)[0])


def test_random_clusters_and_routers_have_less_to_say(tmp_path):
    config = fabricate(tmp_path, cluster={"method": "random"})
    (config.folder / "cluster" / "clusters.json").write_text('{"silhouette": null}')
    (config.folder / "cluster" / "map.png").unlink()
    (config.folder / "merge" / "router.json").write_text('{"method": "random", "layers": []}')
    (config.folder / "merge" / "manifest.json").write_text("{}")
    text = text_of(write(config)[0])
    assert "400 training documents by random." in text and "The merged model's router: random." in text
    assert "cluster 9.5 s, evaluate 33 s" in text
    (config.folder / "merge" / "router.json").unlink()
    for stage in ("prepare", "cluster", "evaluate"):
        (config.folder / stage / "manifest.json").unlink()
    text = text_of(write(config)[0])
    assert "The merged model's router" not in text and "Not priced" not in text


def test_a_run_without_models(tmp_path):
    config = fabricate(tmp_path)
    (config.folder / "evaluate" / "results.json").write_text('{"models": {}}')
    text = text_of(write(config)[0])
    assert "No model was evaluated" in text and "there is nothing to compare" in text
