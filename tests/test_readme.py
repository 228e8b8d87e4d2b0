"""Every command of README.md runs, on a tiny experiment in place of the shipped ones."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from disco.single import SECTIONS
from tests.disco.test_single import LLAMA
from tests.disco.tiny_experiment import corpus, tiny_experiment

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
COMMANDS = [shlex.split(line, comments=True) for block in BLOCKS for line in block.splitlines() if line.strip()]
# What needs the network has a slow test of its own (tests/launch/test_fetch_corpus.py).
ELSEWHERE = [["disco", "fetch-corpus", "data/eight_domains"]]
SMALLER = {"train.tokens=480000": "train.tokens=1024"}


def test_the_make_targets_are_there():
    for command in COMMANDS:
        if command[0] == "make":
            done = subprocess.run([*command, "-n"], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


@pytest.fixture
def playground(tmp_path):
    """A folder that looks like the repository, with tiny experiments."""
    corpus(tmp_path / "corpus")
    (tmp_path / "configs" / "plans").mkdir(parents=True)
    for name in ("quickstart", "eight_domains", "plans/paper_qwen_c4"):
        raw = tiny_experiment(tmp_path, name=Path(name).name, runs="runs", seed_phase={"tokens": 0})
        raw["baselines"] = []  # of the pipeline's own tests
        raw["model"]["config"]["num_experts"] = 4
        raw["train"] |= {"tokens": 2048}
        raw["finetune"] |= {"tokens": 512, "router_tokens": 0}
        if name == "eight_domains":
            raw["launch"]["parallel"] = 4
        (tmp_path / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(raw))
    one = tiny_experiment(tmp_path, name="bcd_finetune", runs="runs", train={"tokens": 1024, "optimizer": "bcd"})
    one["model"] = {"config": LLAMA}
    one = {key: value for key, value in one.items() if key in SECTIONS}
    (tmp_path / "configs" / "bcd_finetune.yaml").write_text(yaml.safe_dump(one))
    return tmp_path


def test_every_other_command_runs(playground):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    folder = playground
    for command in COMMANDS:
        if command[0] == "make" or command in ELSEWHERE:
            continue
        if command[0] == "cd":
            folder = (folder / command[1]).resolve()
            continue
        assert command[0] in ("disco", "bcd", "fsep", "tar"), command
        command = [SMALLER.get(word, word) for word in command]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
    assert (playground / "runs" / "quickstart" / "report" / "report.html").exists()
