"""Overrides in every form that the commands take."""

import pytest
import yaml
from typer.testing import CliRunner

from disco import cli, single
from disco.config import ConfigError, Experiment
from disco.overrides import joined
from tests.disco.tiny_experiment import tiny_experiment, write

FORMS = [
    ["train.tokens=8192", "train.weight_decay=0"],
    ["--train.tokens=8192", "--train.weight_decay=0"],
    ["--train.tokens", "8192", "--train.weight_decay", "0"],
    ["--train.tokens", "8192", "train.weight_decay=0"],
]


@pytest.mark.parametrize("words", FORMS, ids=["plain", "dashes", "two words", "mixed"])
def test_all_forms_say_the_same(tmp_path, words):
    config = Experiment.load(write(tmp_path), words)
    assert (config.train.tokens, config.train.weight_decay) == (8192, 0)
    assert [*joined(words)] == FORMS[0]


@pytest.mark.parametrize("words", [["--dry-rnu"], ["--train.tokens", "--seed=3"], ["--train.tokens"]])
def test_a_word_without_a_value_is_refused(words):
    with pytest.raises(ConfigError, match=rf"override '{words[0]}' has no value, and is no option either"):
        [*joined(words)]


def test_values_may_hold_equals_signs_and_be_negative():
    assert [*joined(["--name", "a=b", "--x.y", "-1", "z=--option"])] == ["name=a=b", "x.y=-1", "z=--option"]


@pytest.mark.parametrize(
    "command",
    [
        ["run"], ["prepare"], ["cluster"], ["merge"], ["finetune"], ["evaluate"], ["report"], ["plan"], ["train"],
        ["train", "--submodel", "1"], ["pack", "--submodel", "1"], ["launch", "--on", "local", "--dry-run"],
        ["extend", "checkpoint"],
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("words", FORMS[1:3], ids=["dashes", "two words"])
def test_every_command_takes_them(monkeypatch, tmp_path, command, words):
    class Loaded(Exception):
        pass

    def load(path, overrides):
        raise Loaded(Experiment.load(path, overrides).train.tokens)

    monkeypatch.setattr(cli, "_load", load)
    monkeypatch.setattr("disco.checkpoint.load_config", lambda folder: Config())
    if command[0] == "extend":
        words = [*words, "model.extend=null"]
    done = CliRunner().invoke(cli.app, [*command, str(write(tmp_path)), *words])
    assert isinstance(done.exception, Loaded) and done.exception.args == (8192,), done.output


class Config:
    dtype = None


def test_one_model_by_itself_takes_them_too(tmp_path):
    raw, path = tiny_experiment(tmp_path), write(tmp_path)
    path.write_text(yaml.safe_dump({name: raw[name] for name in raw if name in single.SECTIONS}))
    assert single.load(path, ["--train.tokens", "8192"]).train.tokens == 8192
    with pytest.raises(ConfigError, match="unknown key merge"):
        single.load(path, ["--merge.router", "probe"])
