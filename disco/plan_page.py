"""A plan as a whole, for the eye and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from disco.compare import Way, ways
from disco.config import ConfigError, Experiment
from disco.family import num_experts
from disco.plan import Forecast, Planner
from disco.workload import Training, weights_of
from disco.workloads import planned_model, submodel_models, together, trainings
from launch.estimate import cards_held, makespan, transfer_seconds
from launch.spot import spot

DISK_GB_S = 1.0  # at which a checkpoint is taken to be written
RESTART_SECONDS = 180.0  # until a new device has started, the checkpoint is back and training goes on
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Stages that run side by side, as configured. `cards` hold at once, each job on `devices` of them."""

    name: str
    forecasts: tuple[Forecast, ...]
    at_once: int
    seconds: float  # until the last is in
    dollars: float  # cards are held until then
    spot: dict[str, float] | None = None  # of the longest job: interval, expected seconds; dollars of all


@dataclass(frozen=True, kw_only=True)
class Plan:
    experiment: str
    parameters: int
    submodel_parameters: int
    experts: int
    phases: tuple[Phase, ...]
    ways: tuple[Way, ...]
    transfers: dict[str, dict[str, float]]  # what: bytes, seconds
    utilization: dict[str, dict[str, Any]]
    prices: dict[str, str]
    gbit_s: float

    @property
    def dollars(self) -> float:
        return sum(phase.dollars for phase in self.phases)

    def as_json(self) -> dict[str, Any]:
        """Everything, with units in the names: seconds, bytes, dollars, hours."""
        phases = [asdict(phase) for phase in self.phases]
        shown = []
        for way in self.ways:
            steps = [
                asdict(step)
                | {"device": step.device.name, "device_hours": step.device_hours, "dollars": step.dollars}
                for step in way.steps
            ]
            totals = {"dollars": way.dollars, "dollars_alike": way.alike, "hours": way.hours, "fits": way.fits}
            shown.append(
                {"name": way.name, **totals, "break_even": way.break_even, "cheapest": way.cheapest, "steps": steps}
            )
        names = ("experiment", "parameters", "submodel_parameters", "experts", "transfers", "utilization", "prices")
        return {name: getattr(self, name) for name in names} | {"phases": phases, "ways": shown}


def plan(
    config: Experiment,
    *,
    cards: int | None = None,
    hours: Mapping[str, float] | None = None,
    gbit_s: float = 1.0,
    interruptions: float | None = None,
    stages: list[Training] | None = None,
) -> Plan:
    """The stages of `config` as configured, and the other ways to the same model.

    `cards`: there are so many for submodels (launch.parallel times train.processes where absent); `hours`:
    measured ones (`compare.read_hours`); `interruptions`: of a spot device an hour.
    """
    if cards is not None and cards < config.train.processes:
        raise ConfigError(f"--cards is {cards} but a submodel takes train.processes={config.train.processes}")
    planner, stages = Planner(config), stages or trainings(config)
    full = planned_model(config)
    compared = ways(planner, stages, cards, hours)
    phases = [_phase(planner, group, cards, interruptions) for group in together(stages)]
    used = dict.fromkeys([phase.forecasts[0].priced_as for phase in phases])
    used |= dict.fromkeys(step.device.name for way in compared for step in way.steps)
    prices, utilization = {}, {}
    for name in used:
        device = planner.device(name)
        prices[name] = device.priced()
        share, source = planner.utilization(device)
        utilization[name] = {"share": share, "source": source}
        if interruptions is not None and any(phase.forecasts[0].priced_as == name for phase in phases):
            prices[f"{name} spot"] = device.priced(spot=True)
    return Plan(
        experiment=config.name,
        parameters=weights_of(full),
        submodel_parameters=max(map(weights_of, submodel_models(config, full))),
        experts=num_experts(full),
        phases=tuple(phases),
        ways=tuple(compared),
        transfers=_transfers(config, full, stages, phases, gbit_s),
        utilization=utilization,
        prices=prices,
        gbit_s=gbit_s,
    )


def _phase(planner: Planner, group: list[Training], cards: int | None, interruptions: float | None) -> Phase:
    found = [planner.forecast(training) for training in group]
    first, device = found[0], planner.device(found[0].priced_as)
    at_once = 1
    if first.submodel is not None:
        at_once = planner.config.launch.parallel if cards is None else max(1, cards // first.devices)
    at_once = min(at_once, len(found))
    seconds = [forecast.seconds for forecast in found]
    taken = None
    if interruptions is not None:
        setting = {
            "checkpoint": first.checkpoint_bytes / (DISK_GB_S * 1e9),
            "restart": RESTART_SECONDS,
            "per_hour": interruptions * first.devices,
        }
        each = {value: spot(value, **setting) for value in set(seconds)}
        longest = each[max(seconds)]
        held = cards_held([each[value].expected for value in seconds], at_once)
        taken = asdict(longest) | {"dollars": device.dollars(held, first.devices, spot=True)}
    return Phase(
        name=group[0].name if first.submodel is None else group[0].name.rpartition("/")[0],
        forecasts=tuple(found),
        at_once=at_once,
        seconds=makespan(seconds, at_once),
        dollars=device.dollars(cards_held(seconds, at_once), first.devices),
        spot=taken,
    )


def _transfers(
    config: Experiment, full, stages: list[Training], phases, gbit_s: float
) -> dict[str, dict[str, float]]:
    """What is carried: packs to the cards, submodels back, the merged model to the big ones, checkpoints."""
    item = SIZES[config.model.dtype]
    submodel, whole = item * max(map(weights_of, submodel_models(config, full))), item * weights_of(full)
    token = 2 if full.vocab_size <= 1 << 16 else 4
    rows = max(training.labels for training in stages if training.submodel is not None) * token
    checkpoint = max(forecast.checkpoint_bytes for phase in phases for forecast in phase.forecasts)
    carried = {
        "a pack, to its card": submodel + rows,
        "a trained submodel, back": submodel,
        "the merged model": whole,
        "the largest checkpoint": checkpoint,
    }
    return {what: {"bytes": size, "seconds": transfer_seconds(size, gbit_s)} for what, size in carried.items()}


def show(found: Plan, console: Console) -> None:
    """Print the plan: stages as configured, the ways compared, what stands behind the figures."""
    console.print(
        f"{found.experiment}: {found.parameters / 1e9:.3g} B parameters with {found.experts} experts, "
        f"{found.submodel_parameters / 1e9:.3g} B a submodel. Training steps alone; nothing was run."
    )
    console.print(_stages(found))
    for phase in found.phases:
        first = phase.forecasts[0]
        if len(phase.forecasts) > 1:
            alone = max(forecast.seconds for forecast in phase.forecasts)
            console.print(
                f"{phase.name}: {len(phase.forecasts)} submodels, {phase.at_once} at once, in "
                f"{_hours(phase.seconds)}; with a card for each {_hours(alone)}"
            )
        if phase.spot:
            console.print(
                f"{phase.name}: on spot {first.priced_as} {_hours(phase.spot['expected'])} expected with "
                f"{phase.spot['interruptions']:.2g} interruptions, a checkpoint every "
                f"{phase.spot['interval'] / 60:.1f} minutes, ${phase.spot['dollars']:.2f} in place of "
                f"${phase.dollars:.2f}"
            )
    carried = (f"{what} {v['bytes'] / 1e9:.2f} GB, {_hours(v['seconds'])}" for what, v in found.transfers.items())
    console.print(f"Carried at {found.gbit_s:g} Gb/s: {'; '.join(carried)}.")
    console.print(_ways(found))
    console.print(_break_even(found))
    for name, price in found.prices.items():
        share = found.utilization.get(name)
        used = f"; {share['share']:.0%} of the dense peak, {share['source']}" if share else ""
        console.print(f"{name}: {price}{used}", highlight=False)


def _stages(found: Plan) -> Table:
    table = Table(title="The stages as configured; GB a card, the last columns in hours and dollars")
    columns = (
        "stage",
        "cards",
        "tokens",
        "FLOPs",
        "weights",
        "grads",
        "optimizer",
        "activations",
        "buffers",
        "total",
    )
    for column in (*columns, "to spare", "largest batch", "h", "$"):
        table.add_column(column, justify="left" if column in ("stage", "cards") else "right", no_wrap=True)
    for phase in found.phases:
        many, first = len(phase.forecasts), max(phase.forecasts, key=lambda forecast: forecast.seconds)
        memory = first.memory
        parts = (memory.parameters, memory.gradients, memory.optimizer)
        parts += (memory.activations + memory.logits, memory.buffers, memory.total)
        times = "" if many == 1 else f"{many} x "
        table.add_row(
            f"{times}{phase.name}",
            f"{times}{first.devices} {first.priced_as}",
            f"{sum(f.tokens for f in phase.forecasts) / 1e6:.4g} M",
            f"{sum(f.flops for f in phase.forecasts):.3g}",
            *(f"{size / 1e9:.3g}" for size in parts),
            f"{first.spare_gb:+.1f}" if first.fits else f"{first.spare_gb:+.1f}: no",
            str(first.largest_micro_batch or "-"),
            f"{phase.seconds / 3600:.3g}",
            f"{phase.dollars:.4g}",
        )
    hours = sum(phase.seconds for phase in found.phases) / 3600
    table.add_row("all", *[""] * 11, f"{hours:.3g}", f"{found.dollars:.4g}", style="bold")
    return table


def _ways(found: Plan) -> Table:
    table = Table(title="Ways to the model on as many tokens, each on the cards that cost least")
    for column in ("way", "cards", "fits", "hours", "device-hours", "dollars", "priced alike", "break-even"):
        justify = "left" if column in ("way", "cards", "fits") else "right"
        table.add_column(column, justify=justify, no_wrap=column not in ("cards", "fits"))
    for way in found.ways:
        cards = ", ".join(
            f"{step.name} {len(step.hours)} x {step.devices} {step.device.name}"
            if len(step.hours) > 1
            else f"{step.name} {step.devices} {step.device.name}"
            for step in way.steps
        )
        lacking = [f"{step.name} by {-step.spare_gb:.1f} GB" for step in way.steps if not step.fits]
        measured = any(step.measured for step in way.steps)
        table.add_row(
            f"[bold]{way.name} *[/]" if way.cheapest else way.name,
            cards,
            "yes" if way.fits else f"no: {', '.join(lacking)}",
            f"{way.hours:.2f}{' measured' if measured else ''}",
            f"{sum(step.device_hours for step in way.steps):.2f}",
            f"{way.dollars:.2f}",
            f"{way.alike:.2f}",
            "-" if way.break_even is None else f"{way.break_even:.3f}",
        )
    return table


def _break_even(found: Plan) -> str:
    marked = next((way.name for way in found.ways if way.cheapest), None)
    said = f"* the cheapest that fits: {marked}." if marked else "Nothing fits on these cards."
    return (
        f"{said} Equal tokens, not equal loss. Priced alike: every device at the price of the big one. Break-even: "
        "the price of a cheap device-hour, in those of a big one, at which a way costs what joint training does."
    )


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.2f} h"
