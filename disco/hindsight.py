"""A plan beside what was measured: each training stage of a finished run, predicted from its configuration and
its corpus, and as the ledger has it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from disco.artifacts import ArtifactError
from disco.config import Experiment
from disco.plan import Planner
from disco.workloads import trainings
from launch.ledger import phase_of, read, wasted_shares


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one stage, start-up and waste left out."""

    tokens: float
    flops: float
    seconds: float
    dollars: float
    peak_memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class Compared:
    """`device` is what the stage ran on, at whose pace it was predicted; dollars are at the ledger's price."""

    name: str
    device: str
    price: str
    predicted: Figures
    measured: Figures

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(config: Experiment, run: Path) -> list[Compared]:
    """Every training stage that the ledger has rows of. Raises ArtifactError where there are none.

    Operations agree exactly, but for `bcd.order: importance`, whose turns follow gradients: as shuffled is planned.
    Memory is predicted as bytes of tensors, and measured as such on a GPU; on a CPU it is the whole process's.
    """
    rows = read(run / "ledger.jsonl")
    if not rows:
        raise ArtifactError(f"{run}: its ledger is empty or missing, so there is nothing to compare a plan with")
    shares = wasted_shares(rows)
    planner, found = Planner(config), []
    for training in trainings(config, run):
        own = [(row, 1 - share) for row, share in zip(rows, shares, strict=True) if phase_of(row) == training.name]
        if not own:
            continue
        last = own[-1][0]
        device = planner.device(last.get("ran_on") or last["priced_as"])
        forecast = planner.forecast(training, device)
        steps = [(row, kept) for row, kept in own if row["status"] != "startup"]
        predicted = Figures(
            tokens=forecast.tokens,
            flops=forecast.flops,
            seconds=forecast.seconds,
            dollars=forecast.seconds * last["devices"] * last["price_per_hour"] / 3600,
            peak_memory_bytes=forecast.memory.total,
        )
        measured = Figures(
            tokens=_whole(sum(kept * row["tokens"] for row, kept in steps)),
            flops=_whole(sum(row["flops"] if kept == 1 else kept * row["flops"] for row, kept in steps if kept)),
            seconds=sum(kept * row["seconds"] for row, kept in steps),
            dollars=sum(kept * row["dollars"] for row, kept in steps),
            peak_memory_bytes=max(row["peak_memory_bytes"] for row, _ in own),
        )
        price = (
            f"${last['price_per_hour']:g}/h ({last['priced_as']}: {last['price_source']}, {last['price_as_of']})"
        )
        found.append(
            Compared(name=training.name, device=device.name, price=price, predicted=predicted, measured=measured)
        )
    return found


def _whole(value: float) -> float | int:
    return round(value) if abs(value - round(value)) < 1e-6 * max(1.0, abs(value)) else value


def show(found: list[Compared], console: Console) -> None:
    """Print predicted, measured and their ratio."""
    table = Table(title="Predicted beside measured, training steps alone (measured / predicted)")
    for column in ("stage", "on", "tokens", "FLOPs", "seconds", "dollars", "peak memory, GB"):
        table.add_column(column, justify="left" if column in ("stage", "on") else "right")
    for row in found:
        cells = []
        for name, form in (("tokens", ","), ("flops", ".4g"), ("seconds", ".3g"), ("dollars", ".3g")):
            cells.append(_pair(getattr(row.predicted, name), getattr(row.measured, name), form))
        memory = (row.predicted.peak_memory_bytes / 1e9, row.measured.peak_memory_bytes / 1e9)
        table.add_row(row.name, row.device, *cells, _pair(*memory, ".3g"))
    console.print(table)
    if any(row.device == "cpu" for row in found):
        console.print("Memory: of tensors as predicted; as measured on a CPU, of the whole process.")
    for price in dict.fromkeys(row.price for row in found):
        console.print(f"dollars at {price}", highlight=False)


def _pair(predicted: float, measured: float, form: str) -> str:
    ratio = f" ({measured / predicted:.3g})" if predicted else ""
    return f"{predicted:{form}} : {measured:{form}}{ratio}"
