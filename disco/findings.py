"""Everything a report is made from, read from the run folder, and the headline that follows from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disco import artifacts
from disco.artifacts import ArtifactError
from disco.config import Experiment
from disco.costs import Bill
from disco.curves import JOINT, RANDOM, Curve, EqualLoss, equal_loss, path, read_curves, total
from disco.evaluate import RESULTS, final
from disco.page import Block, Text, Tiles
from launch import hardware
from launch.ledger import phase_of, read

LEVEL = 0.005  # nats: less than this, or than two standard errors, is called no difference


@dataclass(frozen=True)
class Run:
    """`results` is results.json; `price` is of the device that fine-tuning is priced as, dollars an hour: the
    price of everything where all devices are priced alike."""

    config: Experiment
    folder: Path
    results: dict[str, Any]
    bill: Bill
    curves: dict[str, Curve]
    price: float

    @property
    def models(self) -> dict[str, dict]:
        return self.results["models"]

    @property
    def final(self) -> str | None:
        """DisCo's last model."""
        return final(self.models)

    def loss(self, model: str | None) -> float | None:
        """Cross-entropy of a model on the whole validation split; None without a finite one."""
        return self.models.get(model, {}).get("cross_entropy")

    def gap(self, model: str, other: str) -> tuple[float, float]:
        """Cross-entropy of `model` minus that of `other`, and twice its standard error (0 if unknown)."""
        measured = self.results.get("differences", {}).get(f"{model} - {other}", {})
        return self.loss(model) - self.loss(other), 2 * measured.get("standard_error", 0.0)

    def path(self) -> dict[str, Curve]:
        return path(self.curves)

    def random_path(self) -> dict[str, Curve]:
        ran = any(phase.startswith(RANDOM) for phase in self.curves)
        return path(self.curves, RANDOM) if ran else {}

    @property
    def joint(self) -> Curve | None:
        return self.curves.get(JOINT)

    def equal_loss(self) -> EqualLoss | None:
        return equal_loss(self.curves, {"disco": self.loss(self.final), "joint": self.loss("joint")})


def gather(config: Experiment, folder: Path) -> Run:
    """Read the run folder. Raises ArtifactError where the evaluation is missing or damaged."""
    results = artifacts.read_json(folder / "evaluate" / RESULTS)
    if not isinstance(results, dict) or not isinstance(results.get("models"), dict):
        raise ArtifactError(f"{folder / 'evaluate' / RESULTS}: damaged: it names no models: evaluate again")
    devices = hardware.load(config.hardware.table)
    price = hardware.lookup(config.hardware.finetune, devices, "hardware.finetune").rate()
    stages = results.get("stages")  # rows of an earlier form of the experiment are no part of this bill
    rows = [
        row
        for row in read(folder / "ledger.jsonl")
        if stages is None or phase_of(row) in stages or row.get("trains") is False
    ]
    curves = {phase: curve for phase, curve in read_curves(folder).items() if stages is None or phase in stages}
    return Run(config, folder, results, Bill(rows), curves, price)


def headline(run: Run) -> list[Block]:
    """What it cost and how good it is, against joint training at equal tokens; plain about losing."""
    disco, joint = run.bill.pipeline("DisCo"), run.bill.pipeline("joint")
    mine, other = run.loss(run.final), run.loss("joint")
    tiles = []
    if mine is not None:
        against = f"joint training {loss(other)}" if other is not None else "no joint baseline in this run"
        tiles.append(("cross-entropy, held out", loss(mine), against))
        perplexity = run.models[run.final]["perplexity"]
        against = f"joint training {number(run.models['joint']['perplexity'])}" if other is not None else ""
        tiles.append(("perplexity", number(perplexity), against))
    if disco:
        simulated = "simulated prices" if run.bill.simulated else "at the configured prices"
        against = f"joint training {money(joint.dollars)}" if joint else ""
        tiles.append((f"dollars, {simulated}", money(disco.dollars), against))
        against = f"joint training {duration(joint.seconds)}" if joint else ""
        tiles.append(("device time", duration(disco.seconds), against))
    return [Text(sentence, "lead") for sentence in verdict(run)] + [Tiles(tiles), *_caveats(run)]


def verdict(run: Run) -> list[str]:
    """One sentence each on quality, cost, cost at equal loss, where a saving comes from, and clustering."""
    disco, joint = run.bill.pipeline("DisCo"), run.bill.pipeline("joint")
    mine, other = run.loss(run.final), run.loss("joint")
    if mine is None:
        return ["The merged model has no finite validation loss: there is nothing to compare."]
    said = []
    tokens = total(run.path()).tokens
    begin = f"DisCo ends at a held-out cross-entropy of {loss(mine)}"
    trained = f" after training on {count(tokens)} tokens" if tokens else ""
    if other is None:
        said.append(f"{begin}{trained}. Joint training was not run, so there is nothing to measure it against.")
    else:
        same = "on the same tokens " if run.joint is not None else ""
        said.append(
            f"{begin}{trained}; joint training of the same model {same}ends at {loss(other)}: "
            f"{_better(*run.gap(run.final, 'joint'))}."
        )
    if disco and joint and joint.dollars and joint.seconds:
        money_ratio, time_ratio = disco.dollars / joint.dollars, disco.seconds / joint.seconds
        said.append(
            f"It cost {money(disco.dollars)} against {money(joint.dollars)} ({money_ratio:.2f} times) and "
            f"{duration(disco.seconds)} of device time against {duration(joint.seconds)} ({time_ratio:.2f} times)."
        )
        if money_ratio < 1 <= time_ratio:
            said.append(
                "The saving in dollars is the lower price of the cheap devices, not less work: priced alike, DisCo "
                f"costs {time_ratio:.2f} times what joint training does."
            )
    said += _at_equal_loss(run.equal_loss())
    random = final(run.models, "random_split ")
    if run.loss(random) is not None:
        gain, error = run.gap(random, run.final)
        judged = (
            "clusters and random parts do equally well here"
            if abs(gain) < max(LEVEL, error)
            else f"clustering helps by {gain:.3f}"
            if gain > 0
            else f"clustering does not help here, it loses {-gain:.3f}"
        )
        judged += f" (± {error:.3f})" if error else ""
        said.append(
            f"The same pipeline on a random split of the documents ends at {loss(run.loss(random))}: {judged}."
        )
    return said


def _at_equal_loss(equal: EqualLoss | None) -> list[str]:
    if equal is None:
        return []
    if equal.joint is None:
        return [f"Joint training does not reach DisCo's loss in this run (its best is {loss(equal.joint_best)})."]
    if not (equal.joint.dollars and equal.joint.seconds):
        return []
    at_most = "" if equal.exact else "at most "
    least = "" if equal.exact else "at least "
    return [
        f"Joint training reaches DisCo's loss with {at_most}{equal.joint.tokens / equal.disco.tokens:.0%} of "
        f"DisCo's tokens: at equal loss DisCo takes {least}{equal.disco.dollars / equal.joint.dollars:.2f} times "
        f"the dollars and {least}{equal.disco.seconds / equal.joint.seconds:.2f} times the device time "
        "(training steps alone)."
    ]


def _better(gap: float, error: float) -> str:
    known = f" (± {error:.3f})" if error else ""
    if abs(gap) < max(LEVEL, error):
        return f"no difference to speak of, {gap:+.3f}{known}"
    return f"DisCo is {abs(gap):.3f}{known} nats a token {'better' if gap < 0 else 'worse'}"


def _caveats(run: Run) -> list[Block]:
    notes = []
    if run.bill.simulated:
        ran = ", ".join(dict.fromkeys(row["device"] for row in run.bill.rows if row.get("device")))
        prices = dict.fromkeys(
            f"{row['priced_as']} at ${row['price_per_hour']:g} an hour ({row['price_as_of']})"
            for row in run.bill.rows
        )
        notes.append(
            f"Simulated prices: everything ran on {ran or 'this machine'}, its time is priced as if it had been "
            f"{' and '.join(prices)}. Real devices differ in speed as well: read the dollars as an illustration."
        )
    begun = [
        f"{run.bill.pipeline(name).startup / run.bill.pipeline(name).seconds:.0%} of {whose} device time"
        for name, whose in (("DisCo", "DisCo's"), ("joint", "joint training's"))
        if run.bill.pipeline(name) and run.bill.pipeline(name).startup > 0.05 * run.bill.pipeline(name).seconds
    ]
    if begun:
        notes.append(f"Start-up of processes is {' and '.join(begun)}: a longer run would not show it.")
    used, rows = (run.results.get("validation", {}).get(key) for key in ("rows_used", "rows"))
    if used and rows and used < rows:
        notes.append(f"Evaluated on {used} of {rows} validation rows (evaluate.max_rows).")
    notes.append(optimizers(run.config))
    errors = "± is two standard errors over the held-out documents; it knows nothing of other seeds. "
    known = errors if run.results.get("differences") else ""
    notes.append(f"{known}One seed ({run.config.seed}): small differences may be chance.")
    return [Text(note, "note") for note in notes]


def optimizers(config: Experiment) -> str:
    """Which optimizer each training stage used, in a sentence."""
    used = {"submodels": config.train.optimizer}
    if config.seed_phase.tokens:
        used = {"seed phase": config.seed_phase.optimizer} | used
    if config.finetune.tokens:
        used["fine-tuning"] = config.finetune.optimizer
    if "joint" in config.baselines:
        used["joint training"] = config.joint.optimizer or config.finetune.optimizer
    descended = [name for name, optimizer in used.items() if optimizer == "bcd"]
    if not descended:
        return "Trained with AdamW throughout."
    others = [name for name in used if name not in descended]
    how = f"order {config.bcd.order}, {config.bcd.active_blocks} at a time, state {config.bcd.state}"
    rest = f"; {', '.join(others)} with AdamW" if others else ""
    return f"Trained by block coordinate descent: {', '.join(descended)} (bcd: {how}){rest}."


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def number(value: float | None) -> str:
    """Three or four digits, whatever the size."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def money(dollars: float) -> str:
    return f"${dollars:,.2f}" if dollars >= 1 else f"${dollars:.3g}"


def duration(seconds: float) -> str:
    """Device time in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def count(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
