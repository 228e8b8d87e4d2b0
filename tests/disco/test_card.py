"""The model card says what the run folder says."""

import json

from disco.card import write_card
from disco.findings import gather
from disco.report import report
from tests.disco.fabricated_run import fabricate
from tests.disco.tiny_models import tiny_config


def test_card_of_the_last_model(tmp_path):
    config = fabricate(tmp_path)
    (config.folder / "finetune").mkdir()
    tiny_config("mixtral", 4).save_pretrained(config.folder / "finetune")
    report(config, config.folder, config.folder / "report")
    card = (config.folder / "finetune" / "README.md").read_text()
    found = gather(config, config.folder)
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "mixtral" in card and "of 4 experts, 2 a token" in card and "Trained from scratch" in card
    tuned = json.loads((config.folder / "evaluate" / "results.json").read_text())["models"]["tuned"]
    assert f"{tuned['cross_entropy']:.3f}" in card
    for source in ("speech", "fiction", "kernel"):
        assert source in card
    assert "whale" in card  # top terms of a cluster
    for stage in found.bill.parts("DisCo"):
        assert stage in card
    assert "![" not in card and "from_pretrained" in card


def test_no_model_no_card(tmp_path):
    config = fabricate(tmp_path)
    assert write_card(gather(config, config.folder)) is None
    (config.folder / "finetune").mkdir()
    (config.folder / "finetune" / "config.json").write_text("{}")
    assert "cannot be read" in write_card(gather(config, config.folder)).read_text()
