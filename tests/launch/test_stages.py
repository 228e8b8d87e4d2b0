"""The hand-written scripts: one stage each, arguments passed on as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from disco.cli import app
from disco.config import Experiment
from disco.pipeline import FRESH, status
from launch.scripts import script, write
from tests.disco.tiny_experiment import corpus
from tests.disco.tiny_experiment import write as write_experiment

STAGES = Path(__file__).parents[2] / "launch" / "stages"
SCRIPTS = sorted(STAGES.glob("*.sh"))
AWKWARD = "an experiment's $(touch pwned).yaml"


def test_there_is_one_for_each_stage():
    names = {path.stem for path in SCRIPTS}
    assert names == {"prepare", "cluster", "train", "merge", "finetune", "evaluate", "report"}
    assert names <= set(typer.main.get_command(app).commands)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_arguments_arrive_as_they_are(path, tmp_path):
    [fake] = write(tmp_path, {"disco.sh": script(["printf '<%s>' \"$@\""], about="")})
    fake.rename(tmp_path / "disco")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*arguments):
        return subprocess.run([path, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True)

    submodel = ["3"] if path.stem == "train" else []
    done = run(AWKWARD, *submodel, "train.tokens=5", "launch.node_command=[a, b]")
    option = "<--submodel><3>" if submodel else ""
    expected = f"<{path.stem}><{AWKWARD}>{option}<train.tokens=5><launch.node_command=[a, b]>"
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr
    refused = run()
    assert refused.returncode != 0
    assert f"usage: {path.name} EXPERIMENT" in refused.stderr
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow
def test_together_they_make_a_whole_run(tmp_path):
    """In order, two submodels at the same time."""
    corpus(tmp_path / "corpus")
    path = write_experiment(tmp_path, seed_phase={"tokens": 0}, train={"tokens": 512}, finetune={"tokens": 256})
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for stages in (["prepare"], ["cluster"], ["train", "train"], ["merge"], ["finetune"], ["evaluate"], ["report"]):
        processes = [
            subprocess.Popen(
                [STAGES / f"{stage}.sh", path, *([str(submodel)] if stage == "train" else [])],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for submodel, stage in enumerate(stages)
        ]
        for process in processes:
            said = process.communicate()[1]
            assert process.returncode == 0, said
    assert set(status(Experiment.load(path)).values()) == {FRESH}
