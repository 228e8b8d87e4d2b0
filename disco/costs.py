"""What a run cost, from its ledger, stage by stage and pipeline by pipeline."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from disco.artifacts import ArtifactError
from disco.curves import FINETUNE, JOINT, RANDOM, ROUTER, SEED
from launch.ledger import Totals, phase_of, read, totals, wasted_shares

STAGES = ("seed", "submodels", "router", "fine-tuning", "joint training")
PIPELINES = ("DisCo", "joint", "random split")
UNTRAINED = "without training"


def place(row: dict[str, Any]) -> tuple[str, str]:
    """(pipeline, stage) of a ledger row. The seed phase is DisCo's, and shared with the random split; stages that
    train nothing are no pipeline's."""
    phase = phase_of(row)
    if row.get("trains") is False:
        return UNTRAINED, row["stage"]
    if phase == JOINT:
        return "joint", "joint training"
    pipeline = "random split" if phase.startswith(RANDOM) else "DisCo"
    phase = phase.removeprefix(RANDOM)
    if phase.startswith("train/"):
        return pipeline, "submodels"
    return pipeline, {SEED: "seed", ROUTER: "router", FINETUNE: "fine-tuning"}.get(phase, phase)


@dataclass(frozen=True)
class Cost:
    """Money, device time and work that bought something that was kept, and what was wasted beside it."""

    dollars: float = 0.0
    seconds: float = 0.0  # device-seconds
    startup: float = 0.0  # device-seconds, part of `seconds`
    tokens: float = 0.0
    flops: float = 0.0
    wasted_dollars: float = 0.0
    wasted_seconds: float = 0.0

    def plus(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class Bill:
    """The ledger, summed. `stages` and `sums` (makespan, memory) are keyed by (pipeline, stage)."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows
        self.sums: dict[tuple[str, str], Totals] = totals(rows, place)
        self.stages = dict.fromkeys(self.sums, Cost())
        for row, wasted in zip(rows, wasted_shares(rows), strict=True):
            held = row["seconds"] * row["devices"]
            kept = (1 - wasted) * held
            self.stages[place(row)] = self.stages[place(row)].plus(
                Cost(
                    dollars=(1 - wasted) * row["dollars"],
                    seconds=kept,
                    startup=kept if row["status"] == "startup" else 0.0,
                    tokens=(1 - wasted) * (row.get("tokens") or 0),
                    flops=(1 - wasted) * (row.get("flops") or 0),
                    wasted_dollars=wasted * row["dollars"],
                    wasted_seconds=wasted * held,
                )
            )

    def parts(self, pipeline: str) -> dict[str, Cost]:
        """Stage to cost of a pipeline, in order. The random split has the shared seed phase, without its waste."""
        found = {stage: cost for (of, stage), cost in self.stages.items() if of == pipeline}
        if pipeline == "random split" and found and ("DisCo", "seed") in self.stages:
            found["seed"] = replace(self.stages["DisCo", "seed"], wasted_dollars=0.0, wasted_seconds=0.0)
        order = {stage: index for index, stage in enumerate(STAGES)}
        return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))

    def pipeline(self, pipeline: str) -> Cost | None:
        """Cost of a whole pipeline; None if nothing of it ran."""
        parts = self.parts(pipeline)
        whole = Cost()
        for cost in parts.values():
            whole = whole.plus(cost)
        return whole if parts else None

    @property
    def simulated(self) -> bool:
        return any("simulated" in spent.kinds for spent in self.sums.values())

    def prices(self) -> dict[str, str]:
        """Each price that was used, by the device's name: `$0.35/h (source, date)`."""
        return {
            row["priced_as"]: f"${row['price_per_hour']:g}/h ({row['price_source']}, {row['price_as_of']})"
            for row in self.rows
        }

    def priced_as(self, key: tuple[str, str]) -> str:
        return ", ".join(dict.fromkeys(row["priced_as"] for row in self.rows if place(row) == key))


def show(run: Path, console: Console) -> None:
    """Print the sums of a run's ledger by stage, device and submodel. Raises ArtifactError for an empty ledger.

    Dollars and hours are of what was kept; what was killed or done twice stands in columns of its own.
    """
    rows = read(run / "ledger.jsonl")
    if not rows:
        raise ArtifactError(f"{run}: nothing has been billed yet: its ledger is empty or missing")
    trained = [row for row in rows if row["submodel"] is not None]
    keys = {"stage": (rows, _stage), "device": (rows, _device), "submodel": (trained, _submodel)}
    energy = any("energy_kwh" in row for row in rows)
    for by, (chosen, key) in keys.items():
        if not chosen:
            continue
        table = Table(by, "device-hours", "longest, h", "tokens", "dollars", "wasted h", "wasted dollars")
        if energy:
            table.add_column("kWh")
        for column in table.columns[1:]:
            column.justify = "right"
        for name, spent in totals(chosen, key).items():
            table.add_row(str(name), *_cells(spent, energy))
        table.add_section()
        table.add_row("all", *_cells(_whole(chosen), energy), style="bold")
        console.print(table)
    for name, price in Bill(rows).prices().items():
        console.print(f"{name}: {price}")
    if any(row["kind"] == "simulated" for row in rows):
        console.print("Simulated: what is priced as a card that it did not run on.")


def _whole(rows: list[dict[str, Any]]) -> Totals:
    return totals(rows, lambda row: "all")["all"]


def _stage(row: dict[str, Any]) -> str:
    phase = phase_of(row)
    return phase if row["submodel"] is None else phase.rpartition("/")[0]


def _device(row: dict[str, Any]) -> str:
    card = row.get("device") or row["priced_as"]
    return card if row["kind"] == "measured" else f"{card}, as {row['priced_as']}"


def _submodel(row: dict[str, Any]) -> str:
    return phase_of(row)


def _cells(spent: Totals, energy: bool) -> list[str]:
    cells = [
        f"{(spent.device_seconds - spent.wasted_device_seconds) / 3600:.4g}",
        f"{spent.makespan_seconds / 3600:.4g}",
        f"{spent.tokens:,}",
        f"{spent.dollars - spent.wasted_dollars:.4g}",
        f"{spent.wasted_device_hours:.4g}",
        f"{spent.wasted_dollars:.4g}",
    ]
    return [*cells, "-" if spent.energy_kwh is None else f"{spent.energy_kwh:.4g}"] if energy else cells
