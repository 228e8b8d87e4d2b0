"""A run as one trial of a wandb sweep: a run folder of its own, and one number for the sweep to go by."""

from disco import artifacts
from disco.config import Experiment
from disco.costs import Bill
from disco.evaluate import RESULTS, final
from launch import ledger, tracking


def as_trial(config: Experiment) -> Experiment:
    """The experiment under a name of the trial's own, so that trials leave each other's folders alone."""
    trial = tracking.trial()
    return config if trial is None else config.model_copy(update={"name": f"{config.name}-{trial}"})


def report(config: Experiment) -> None:
    """Tell the sweep, if there is one: `validation_loss` (cross-entropy of the last model), `perplexity`, and
    DisCo's `dollars` and `device_hours`."""
    if tracking.trial() is None:
        return
    models = artifacts.read_json(config.folder / "evaluate" / RESULTS)["models"]
    last = models[final(models)]
    bill = Bill(ledger.read(config.folder / "ledger.jsonl")).pipeline("DisCo")
    values = {"validation_loss": last["cross_entropy"], "perplexity": last["perplexity"]}
    values |= {"dollars": bill.dollars, "device_hours": bill.seconds / 3600}
    tracking.report_trial(config.tracking.project, config.folder, values)
