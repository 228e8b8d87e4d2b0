"""A wandb agent can drive `disco run`."""

from pathlib import Path

import yaml
from typer.testing import CliRunner
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from disco import pipeline, sweep
from disco.cli import app
from disco.config import Experiment
from disco.findings import gather
from launch import tracking
from tests.disco.fabricated_run import fabricate

SWEEP = Path(__file__).parents[2] / "configs" / "sweeps" / "quickstart.yaml"


def agents_command(chosen: dict) -> list[str]:
    """The command line that wandb's own code makes of the shipped sweep."""
    raw = yaml.safe_load(SWEEP.read_text())
    arguments = create_sweep_command_args({"args": {name: {"value": value} for name, value in chosen.items()}})
    words = []
    for word in create_sweep_command(raw["command"]):
        given = {"${program}": [raw["program"]], "${args}": arguments["args"]}
        words += given.get(word, [word])
    return words


def test_what_the_agent_passes_is_taken_as_overrides(monkeypatch):
    ran = []
    monkeypatch.setattr(pipeline, "run", lambda experiment, **options: ran.append(experiment))
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    monkeypatch.setattr(sweep, "report", lambda experiment: None)
    chosen = {"train.learning_rate": 0.00123, "merge.router": "centroid", "baselines": []}
    words = agents_command(chosen)
    assert words[:2] == ["disco", "run"] and "--merge.router=centroid" in words
    monkeypatch.chdir(SWEEP.parents[2])
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, done.output
    (experiment,) = ran
    assert (experiment.train.learning_rate, experiment.merge.router) == (0.00123, "centroid")
    assert experiment.baselines == [] and experiment.name == "quickstart-abc"
    assert experiment.tracking.wandb == "online"


def test_every_parameter_of_the_shipped_sweep_is_a_key_of_the_experiment():
    raw = yaml.safe_load(SWEEP.read_text())
    example = {
        name: spec.get("value", spec.get("values", [spec.get("min")])[0])
        for name, spec in raw["parameters"].items()
    }
    overrides = [f"{name}={value}" for name, value in example.items()]
    Experiment.load(SWEEP.parents[1] / "quickstart.yaml", overrides)
    assert raw["metric"]["name"] == "validation_loss"


def test_a_trial_tells_the_sweep_loss_and_dollars(tmp_path, monkeypatch):
    config = fabricate(tmp_path)
    sent = {}
    monkeypatch.setattr(tracking, "report_trial", lambda project, run, values: sent.update(values))
    sweep.report(config)
    assert not sent and sweep.as_trial(config) is config  # no sweep
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    sweep.report(config)
    found = gather(config, config.folder)
    assert sent["validation_loss"] == found.loss(found.final)
    assert sent["dollars"] == found.bill.pipeline("DisCo").dollars
    assert sent["device_hours"] == found.bill.pipeline("DisCo").seconds / 3600
