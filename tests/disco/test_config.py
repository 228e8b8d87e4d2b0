"""The experiment file: overrides, refusals, and every shipped configuration."""

from pathlib import Path

import pytest

from disco import single
from disco.check import check
from disco.config import ConfigError, Experiment, Optimizer
from disco.stages import stages

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
ONE_MODEL = Path(__file__).parents[2] / "configs" / "bcd_finetune.yaml"  # of bcd train

SMALL = {
    "name": "small",
    "model": {"config": {"model_type": "qwen2_moe"}},
    "corpus": {"sources": [{"name": "a", "text": ["a.txt"]}]},
}


def refused(match: str, raw: dict | None = None, overrides: list[str] = (), tmp_path: Path | None = None):
    with pytest.raises(ConfigError, match=match):
        if tmp_path is None:
            Experiment.parse(SMALL | (raw or {}))
        else:
            import yaml

            (tmp_path / "e.yaml").write_text(yaml.safe_dump(SMALL | (raw or {})))
            Experiment.load(tmp_path / "e.yaml", list(overrides))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_parses_and_survives_a_round_trip(path, tmp_path):
    experiment = Experiment.load(path)
    (tmp_path / "again.yaml").write_text(experiment.dump())
    assert Experiment.load(tmp_path / "again.yaml") == experiment


def test_the_shipped_config_of_one_model_passes_every_check():
    single.check(single.load(ONE_MODEL, []))


@pytest.mark.parametrize("path", [path for path in CONFIGS if path != ONE_MODEL], ids=lambda path: path.stem)
def test_every_shipped_config_plans(path, tmp_path, monkeypatch):
    """With the files that it names in place, an experiment passes every check before work, and its graph builds."""
    monkeypatch.chdir(tmp_path)
    experiment = Experiment.load(path)
    for source in experiment.corpus.sources:
        for name in source.jsonl or ():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text('{"text": "some words of this domain"}\n')
    check(experiment)
    graph = stages(experiment)
    assert list(graph)[-2:] == ["evaluate", "report"]
    assert all(need in graph for stage in graph.values() for need in stage.needs)


def test_there_are_shipped_configs():
    assert {"quickstart"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ({"modle": {}}, "unknown key modle: did you mean 'model'"),
        ({"train": {"lerning_rate": 1}}, "unknown key train.lerning_rate: did you mean 'learning_rate'"),
        (
            {"corpus": {"sources": [{"name": "a", "text": ["x"], "colunm": "t"}]}},
            "unknown key corpus.sources.0.colunm: did you mean 'column'",
        ),
        ({"name": ""}, "name is ''"),
        ({"name": "a/../b"}, "name is 'a/../b'"),
        ({"name": ".."}, "name is '..'"),
        ({"train": {"betas": [0.9, 1.0]}}, "train.betas.1 is 1.0"),
        ({"train": {"learning_rate": float("inf")}}, "train.learning_rate is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"model": {}}, "exactly one of model.source"),
        ({"model": {"config": {"hidden_size": 3}}}, "no model_type"),
        ({"corpus": {"sources": []}}, "corpus.sources"),
        ({"corpus": {"sources": [{"name": "a"}]}}, "names nothing to read"),
        ({"corpus": {"sources": [{"name": "a", "text": ["x"], "hub": "y"}]}}, "names text and hub"),
        ({"corpus": {"sources": [{"name": "a", "text": ["x"]}] * 2}}, "two sources are named 'a'"),
        ({"train": {"learning_rate": 0}}, "train.learning_rate is 0"),
        ({"train": {"learning_rate": "fast"}}, "train.learning_rate is 'fast'"),
        ({"train": {"batch_size": 6, "micro_batch_size": 4}}, "is not a multiple .* set it to 4"),
        ({"merge": {"router": "prob"}}, "merge.router is 'prob'"),
    ],
)
def test_bad_values_are_refused_with_value_and_place(raw, match):
    refused(match, raw)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("train.tokens", "not of the form"),
        ("train.tokens.x=1", "train.tokens|unknown key"),
        ("name.x=1", "name is a value"),
        ("corpus.sources.7.name=b", "'7' is not a position"),
        ("train.tokens=[1", "not YAML"),
        ("trian.tokens=1", "unknown key trian: did you mean 'train'"),
    ],
)
def test_bad_overrides_are_refused(override, match, tmp_path):
    refused(match, overrides=[override], tmp_path=tmp_path)


def test_overrides_are_yaml(tmp_path):
    import yaml

    (tmp_path / "e.yaml").write_text(yaml.safe_dump(SMALL))
    overrides = ["train.learning_rate=2e-5", "train.tokens=200_000", "baselines=[joint]", "corpus.sources.0.name=b"]
    experiment = Experiment.load(tmp_path / "e.yaml", overrides)
    assert experiment.train.learning_rate == 2e-5
    assert experiment.train.tokens == 200_000
    assert experiment.baselines == ["joint"]
    assert experiment.corpus.sources[0].name == "b"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"- 1\n- 2\n", b"a: [", b""])
def test_unreadable_files_are_refused(content, tmp_path):
    (tmp_path / "e.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match="e.yaml"):
        Experiment.load(tmp_path / "e.yaml")
    with pytest.raises(ConfigError, match="no such experiment file"):
        Experiment.load(tmp_path / "none.yaml")


def test_train_tokens_is_the_one_dial():
    """Seed phase and fine-tuning follow it, from a checkpoint without a seed phase; what is set stays."""

    def budgets(**raw):
        experiment = Experiment.parse(SMALL | raw)
        return experiment.seed_phase.tokens, experiment.train.tokens, experiment.finetune.tokens

    assert budgets() == (1_000_000, 1_000_000, 500_000)
    assert budgets(train={"tokens": 80}) == (80, 80, 40)
    assert budgets(train={"tokens": 80}, seed_phase={"tokens": 0}, finetune={"tokens": 7}) == (0, 80, 7)
    assert budgets(train={"tokens": 80}, model={"source": "folder"}) == (0, 80, 20)
    assert budgets(train={"tokens": None}) == (0, None, 0)


def test_experts_alone_are_trained_where_a_checkpoint_is_continued():
    def mode(**raw):
        return Experiment.parse(SMALL | raw).train.mode

    source = {"model": {"source": "folder"}}
    assert mode() == "full"
    assert mode(**source) == mode(**source, train={"tokens": 80}) == "expert"
    assert mode(**source, train={"mode": "full"}) == "full"
    assert mode(**source, train={"optimizer": "bcd"}) == "bcd"


def test_batches_divide_into_micro_batches_and_processes():
    assert Optimizer(batch_size=16).micro_batch == 16
    assert Optimizer(batch_size=16, processes=2).micro_batch == 8
    assert Optimizer(batch_size=16, processes=2, micro_batch_size=2).accumulation == 4
