"""The ``fsep`` command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fsep.simulation import Result
    from fsep.topology import Topology

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plan where a mixture-of-experts model's experts live, and which copy computes which tokens.",
)

TracePath = Annotated[
    Path, typer.Argument(help="Load trace, .npz with `tokens` [step, layer, micro-batch, device, expert].")
]
Slots = Annotated[int, typer.Option(help="Experts a device can hold.")]
PerNode = Annotated[str, typer.Option(help="Devices a node: a number, or the size of every node (8,8,4).")]
Hardware = Annotated[str, typer.Option(help="Device, from the hardware table: its compute and links.")]
Hidden = Annotated[int, typer.Option(help="Hidden size of the model.")]
Width = Annotated[int, typer.Option(help="Intermediate size of an expert.")]
Step = Annotated[int, typer.Option(help="Step of the trace; negative counts from the end.")]
Layer = Annotated[int, typer.Option(help="Index of the layer in the trace.")]
Planners = Annotated[str, typer.Option("--planner", help="Planners, comma-separated, or all.")]
Ages = Annotated[str, typer.Option(help="Ages in steps of the load planned on, comma-separated.")]
Snapshots = Annotated[int, typer.Option(help="Most snapshots to evaluate, evenly spaced; 0 for all.")]


@app.command()
def simulate(
    trace: TracePath,
    slots: Slots = 4,
    devices_per_node: PerNode = "8",
    planner: Planners = "all",
    stale: Ages = "0",
    snapshots: Snapshots = 60,
    bound: Annotated[bool, typer.Option(help="Solve the linear program for the lower bound.")] = True,
    hardware: Hardware = "a100",
    hidden: Hidden = 4096,
    expert_width: Width = 14336,
    json: Annotated[Path | None, typer.Option(help="Also write the rows to this file.")] = None,
) -> None:
    """Compare planners and routings on a trace."""
    from dataclasses import asdict
    from json import dumps

    from fsep.traces import LoadTrace

    loads = LoadTrace.load(trace)
    topology = _topology(loads.devices, devices_per_node, hardware, hidden, expert_width)
    results = _simulate(loads, topology, slots, planner, stale, snapshots, bound)
    _print_results(results)
    if json is not None:
        rows = [{k: None if v != v else v for k, v in asdict(result).items()} for result in results]
        json.write_text(dumps({"command": sys.argv[1:], "results": rows}, indent=1) + "\n")


@app.command()
def plan(
    trace: TracePath,
    slots: Slots = 4,
    devices_per_node: PerNode = "8",
    step: Step = -1,
    layer: Layer = 0,
    hardware: Hardware = "a100",
    hidden: Hidden = 4096,
    expert_width: Width = 14336,
    json: Annotated[
        Path | None, typer.Option(help="Also write the placement table and its cost to this file.")
    ] = None,
) -> None:
    """Place the experts for one step of a trace (its micro-batches summed) and print who holds what."""
    from dataclasses import asdict
    from json import dumps

    from fsep.costs import cost_of_pairs
    from fsep.planner import plan as make_plan
    from fsep.routing import route_copies
    from fsep.simulation import pairs
    from fsep.traces import LoadTrace

    loads = LoadTrace.load(trace)
    topology = _topology(loads.devices, devices_per_node, hardware, hidden, expert_width)
    load_NE = _load_at(loads, step, layer)
    layout = make_plan(load_NE, topology, slots)
    tokens_NP = route_copies(load_NE, layout, topology)
    price = cost_of_pairs(pairs(tokens_NP, layout), topology)
    for device, experts in enumerate(layout.table):
        held = " ".join(f"{expert:4d}" for expert in experts if expert >= 0)
        typer.echo(f"node {topology.node_of[device]:3d}  device {device:4d}  experts {held}")
    typer.echo(
        f"imbalance {price.imbalance:.4f}  inter-node {price.inter_node_fraction:.4f}  "
        f"modelled step {1e3 * price.total_s:.3f} ms a layer"
    )
    if json is not None:
        json.write_text(dumps({"table": layout.table.tolist(), "cost": asdict(price)}, indent=1) + "\n")


@app.command()
def synthesize(
    kind: Annotated[str, typer.Argument(help="zipf, dirichlet, hot-set, rotating, burst or clustered.")],
    out: Annotated[Path, typer.Argument(help="Trace to write, .npz.")],
    devices: Annotated[int, typer.Option()] = 16,
    experts: Annotated[int, typer.Option()] = 32,
    steps: Annotated[int, typer.Option()] = 20,
    layers: Annotated[int, typer.Option()] = 1,
    microbatches: Annotated[int, typer.Option()] = 1,
    tokens_per_device: Annotated[int, typer.Option(help="Tokens a device routes in a micro-batch.")] = 4096,
    skew: Annotated[float, typer.Option(help="How uneven experts are; 0 is uniform.")] = 1.0,
    device_spread: Annotated[float, typer.Option(help="How far devices differ, log-normal sigma.")] = 0.02,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Write a made-up trace."""
    from fsep.traces import synthesize as make_trace

    trace = make_trace(
        kind,
        devices=devices,
        experts=experts,
        steps=steps,
        layers=layers,
        microbatches=microbatches,
        tokens_per_device=tokens_per_device,
        skew=skew,
        device_spread=device_spread,
        seed=seed,
    )
    trace.save(out)
    typer.echo(f"{out}: {kind}, tokens {list(trace.tokens.shape)}")


@app.command()
def plot(
    trace: TracePath,
    out: Annotated[Path, typer.Argument(help="Folder for load.png, layout.png and planners.png.")],
    slots: Slots = 4,
    devices_per_node: PerNode = "8",
    step: Step = -1,
    layer: Layer = 0,
    planner: Planners = "all",
    stale: Ages = "0",
    snapshots: Snapshots = 20,
    hardware: Hardware = "a100",
    hidden: Hidden = 4096,
    expert_width: Width = 14336,
) -> None:
    """Draw the load over time, a layout, and the planners' modelled times."""
    from fsep.planner import plan as make_plan
    from fsep.plot import plot_layout, plot_load, plot_planners
    from fsep.routing import route_copies
    from fsep.traces import LoadTrace

    loads = LoadTrace.load(trace)
    topology = _topology(loads.devices, devices_per_node, hardware, hidden, expert_width)
    load_NE = _load_at(loads, step, layer)
    layout = make_plan(load_NE, topology, slots)
    results = _simulate(loads, topology, slots, planner, stale, snapshots, True)
    out.mkdir(parents=True, exist_ok=True)
    plot_load(loads, out / "load.png")
    plot_layout(layout, route_copies(load_NE, layout, topology), topology, out / "layout.png")
    plot_planners(results, out / "planners.png")
    for name in ("load", "layout", "planners"):
        typer.echo(out / f"{name}.png")


def main() -> None:
    """Entry point: bad input ends with one line and status 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


def _topology(devices: int, devices_per_node: str, hardware: str, hidden: int, expert_width: int) -> Topology:
    from fsep.topology import Topology

    sizes = _whole_numbers("--devices-per-node", devices_per_node)
    return Topology.from_hardware(
        hardware,
        devices,
        devices_per_node=sizes[0] if len(sizes) == 1 else sizes,
        hidden=hidden,
        expert_width=expert_width,
    )


def _whole_numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}: give whole numbers, comma-separated") from None


def _load_at(trace, step: int, layer: int):
    for name, value, size in (("--step", step, trace.steps), ("--layer", layer, trace.layers)):
        if not -size <= value < size:
            raise ValueError(f"{name} is {value} but the trace has {size}: give {-size} to {size - 1}")
    return trace.tokens[step, layer].sum(0, dtype="int64")


def _simulate(
    loads, topology: Topology, slots: int, planner: str, stale: str, snapshots: int, bound: bool
) -> list[Result]:
    from fsep.simulation import METHODS
    from fsep.simulation import simulate as run

    return run(
        loads,
        topology,
        slots,
        planners=list(METHODS) if planner == "all" else planner.split(","),
        stale=_whole_numbers("--stale", stale),
        snapshots=snapshots or None,
        bound=bound,
    )


def _print_results(results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    columns = "planner,routing,stale,imbalance,p95,inter-node,step ms,bound ms,worst/bound,plan ms,route ms"
    for column in columns.split(","):
        table.add_column(column, justify="left" if column in ("planner", "routing") else "right", no_wrap=True)
    for r in results:
        table.add_row(
            r.planner,
            r.routing,
            str(r.stale),
            f"{r.imbalance:.4f}",
            f"{r.imbalance_p95:.4f}",
            f"{r.inter_node_fraction:.4f}",
            f"{r.step_ms:.3f}",
            f"{r.bound_ms:.3f}",
            f"{r.worst_over_bound:.3f}",
            f"{r.plan_ms:.3f}",
            f"{r.route_ms:.3f}",
        )
    # A pipe or a log gets the whole table too.
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    typer.echo(f"step and bound are modelled for one layer; means over {results[0].snapshots} snapshots.")
