"""One model by itself, through the command line."""

import os
import re
import subprocess
import sys

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig
from typer.testing import CliRunner

from disco import artifacts, single
from disco.cli import app
from disco.config import ConfigError
from launch.flops import training_flops
from launch.ledger import read
from tests.disco.tiny_experiment import corpus, tiny_experiment

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def write(folder, **changed):
    raw = {key: value for key, value in tiny_experiment(folder).items() if key in single.SECTIONS}
    raw |= {"model": {"config": LLAMA}, "train": raw["train"] | {"optimizer": "bcd", "tokens": 1024}} | changed
    path = folder / "one.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def bcd(*arguments, folder):
    command = [sys.executable, "-c", "from bcd.cli import main; main()", "train", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ)


def test_a_dense_model_is_trained_and_measured(tmp_path):
    corpus(tmp_path / "corpus")
    path = write(tmp_path)
    done = bcd(path, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny"
    assert "before: held-out cross-entropy" in done.stdout and "bcd: " in done.stdout
    results = artifacts.read_json(run / "evaluate" / "results.json")["models"]
    assert results["after"]["cross_entropy"] < results["before"]["cross_entropy"]
    begin, end = (load_file(run / name / "model.safetensors") for name in ("initial", "train"))
    assert not any((begin[name] == end[name]).all() for name in begin)
    model = AutoModelForCausalLM.from_pretrained(run / "train")
    rows = [row for row in read(run / "ledger.jsonl") if row["phase"] == "train"]
    dense = training_flops(model.config, 32)
    assert 0 < sum(row["flops"] for row in rows) < 32 * dense  # 8 updates of 4 rows, a block each
    for what in (path, run):
        shown = CliRunner().invoke(app, ["status", str(what)], env={"COLUMNS": "100"})
        assert shown.exit_code == 0, shown.output
        for name in ("prepare", "initial", "train", "evaluate"):
            assert re.search(rf"{name} .*fresh", shown.output), shown.output
        assert "cluster" not in shown.output
    again = bcd(path, folder=tmp_path)
    assert [line for line in again.stdout.splitlines() if line.endswith(": fresh")] == [
        f"{name}: fresh" for name in ("prepare", "initial", "train", "evaluate")
    ]


@pytest.mark.slow
def test_a_checkpoint_is_tuned_with_adamw_or_by_blocks(tmp_path):
    corpus(tmp_path / "corpus")
    assert bcd(write(tmp_path), folder=tmp_path).returncode == 0
    trained = tmp_path / "runs" / "tiny" / "train"
    own = tiny_experiment(tmp_path)["corpus"] | {"tokenizer": {"kind": "model"}}
    path = write(tmp_path, name="tuned", model={"source": str(trained)}, corpus=own)
    for optimizer in ("adamw", "bcd"):
        done = bcd(path, f"train.optimizer={optimizer}", f"name={optimizer}", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        begin = load_file(tmp_path / "runs" / optimizer / "initial" / "model.safetensors")
        source = load_file(trained / "model.safetensors")
        assert all((begin[name] == source[name]).all() for name in source)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cluster": {"k": 2}}, "unknown key cluster where one model is trained: known are name"),
        ({"trian": {}}, "unknown key trian where one model is trained: did you mean 'train'"),
        ({"train": {"mode": "expert"}}, "train.mode is 'expert' but one whole model is trained"),
        ({"bcd": {"granularity": ["lm_head"]}}, "bcd: no pattern covers parameter 'model.embed_tokens.weight'"),
        ({"bcd": {"steps_per_block": 9}}, "train makes 8 updates but one cycle over 4 blocks takes 36"),
        ({"bcd": {"steps_per_block": 0}}, "bcd.steps_per_block is 0"),
        ({"model": {"config": LLAMA | {"model_type": "gpt2"}}}, "model_type is 'gpt2': bcd train knows .*llama"),
        ({"model": {"source": "nowhere/at/all"}}, "no such folder"),
        ({"corpus": None}, "corpus"),
        ({"hardware": {"train": "rtx4909"}}, "rtx4090"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, changed, message):
    corpus(tmp_path / "corpus")
    with pytest.raises(ConfigError, match=message):
        single.run(single.load(write(tmp_path, **changed), []))
    assert not list((tmp_path / "runs").glob("*/prepare"))


def test_other_families_are_refused_from_a_checkpoint_too(tmp_path):
    corpus(tmp_path / "corpus")
    GPTNeoXConfig(hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path / "neox")
    path = write(tmp_path, model={"source": str(tmp_path / "neox")})
    with pytest.raises(ConfigError, match="'gpt_neox': bcd train knows .* bcd.initialize"):
        single.run(single.load(path, []))


def test_bad_input_is_one_line(tmp_path):
    done = bcd("missing.yaml", folder=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "missing.yaml" in done.stderr
