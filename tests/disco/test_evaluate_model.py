"""One model folder: losses against transformers' own a document, tasks, refusals; the command."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F

from disco.artifacts import ArtifactError
from disco.cli import main
from disco.config import ConfigError, Task
from disco.evaluate_model import evaluate_model
from tests.disco.test_evaluate import fake_lm_eval  # noqa: F401
from tests.disco.test_extend import tokenized
from tests.disco.tiny_models import load, save, tiny_model

DOCUMENTS = ["w1 w2 w3 w4 w5 w6 w7", "w8 w9", "w3 w3 w3 w10 w11 " * 4]


@pytest.fixture
def folder(tmp_path):
    return tokenized(save(tiny_model("olmoe", 3), tmp_path / "model"))


def reference(folder, documents):
    """Summed cross-entropy and labels, each document alone: begin, words, end."""
    model, total, labels = load(folder), 0.0, 0
    for document in documents:
        ids = torch.tensor([[0, *(int(word[1:]) + 3 for word in document.split()), 1]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        total += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        labels += ids.shape[1] - 1
    return total, labels


def test_losses_are_those_of_each_document_alone(folder, tmp_path):
    (tmp_path / "one.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in DOCUMENTS[:2]))
    (tmp_path / "two.txt").write_text(DOCUMENTS[2])
    data = [str(tmp_path / "*.jsonl"), str(tmp_path / "two.txt")]
    found = evaluate_model(folder, data=data, column="body", batch_size=2)["data"]
    total, labels = reference(folder, DOCUMENTS)
    assert found["tokens"] == labels
    assert found["cross_entropy"] == pytest.approx(total / labels, rel=1e-5)
    total, labels = reference(folder, DOCUMENTS[2:])
    of_two = found["by_file"][str(tmp_path / "two.txt")]
    assert of_two["tokens"] == labels and of_two["cross_entropy"] == pytest.approx(total / labels, rel=1e-5)


def test_tasks_by_name_and_from_a_folder(folder, tmp_path, fake_lm_eval):  # noqa: F811
    tasks = [Task(name=name, include_path=str(tmp_path), limit=5, num_fewshot=2) for name in ("local", "known")]
    assert evaluate_model(folder, tasks=tasks) == {"tasks": {"local": {"acc": 0.25}, "known": {"acc": 0.25}}}
    assert [call["tasks"] for call in fake_lm_eval] == [["local"], ["known"]]
    assert fake_lm_eval[0]["limit"] == 5 and fake_lm_eval[0]["num_fewshot"] == 2


def test_the_command(folder, tmp_path, fake_lm_eval, monkeypatch, capsys):  # noqa: F811
    (tmp_path / "two.txt").write_text(DOCUMENTS[2])
    options = ["--data", str(tmp_path / "two.txt"), "--tasks", "known", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", ["disco", "evaluate", str(folder), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert ended.value.code == 0 and "known: acc 0.2500" in shown
    assert f"{written['data']['cross_entropy']:.4f}" in shown


def test_refused_before_the_model_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("disco.evaluate_model.load_model", None)
    (tmp_path / "empty.txt").write_text(" ")
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        evaluate_model(folder)
    with pytest.raises(ConfigError, match="--data: 'no.txt' matches no file"):
        evaluate_model(folder, data=["no.txt"])
    with pytest.raises(ConfigError, match="empty.txt: there is no text"):
        evaluate_model(folder, data=[str(tmp_path / "empty.txt")])
    with pytest.raises(ConfigError, match="--sequence-length is 65 but the model has 64 positions"):
        evaluate_model(folder, data=["x"], sequence_length=65)
    with pytest.raises(ArtifactError, match="has no tokenizer"):
        evaluate_model(save(tiny_model("olmoe", 3), tmp_path / "bare"), data=["x"])
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match="needs the package lm_eval: pip install"):
        evaluate_model(folder, tasks=[Task(name="known")])


def test_options_and_targets_that_do_not_go_together(folder, tmp_path, monkeypatch, capsys):
    for arguments, message in (
        ([str(folder), "train.tokens=1", "--tasks", "x"], "a model folder takes no overrides"),
        ([str(tmp_path / "x.yaml"), "--tasks", "x"], "are for a model folder"),
    ):
        monkeypatch.setattr("sys.argv", ["disco", "evaluate", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2 and message in capsys.readouterr().err
