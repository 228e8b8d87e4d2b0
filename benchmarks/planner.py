"""The planner against its targets: balance, traffic and time on real traces, old loads, larger sizes, forecasts.

    python benchmarks/planner.py TRACE.npz ... [--json FILE]

Traces are .npz files with ``tokens`` [step, layer, micro-batch, device, expert]; without any, made-up loads of the
same shape stand in, and say so. Times are processor time, the least of several repetitions, in one thread. Modelled
times are for A100s with Mixtral-8x7B's expert (see ``Topology``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from datetime import date
from pathlib import Path

# benchmarks/fsep.py must not stand in for the package of that name.
sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from fsep import LoadTrace, Topology, cost, lower_bound, plan, route, route_copies, synthesize  # noqa: E402
from fsep.costs import cost_of_pairs  # noqa: E402
from fsep.forecast import forecast_errors  # noqa: E402
from fsep.simulation import PLANNERS, ROUTINGS, pairs  # noqa: E402

SIZES = ((16, 32, 4), (64, 256, 8), (256, 256, 2), (1024, 256, 2))
LIMIT_MS = {(16, 32, 4): 0.6, (64, 256, 8): 3.0, (256, 256, 2): 20.0, (1024, 256, 2): 200.0}


def best_of(repeats: int, function, *arguments):
    """(the function's result, least milliseconds of ``repeats`` calls)."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        result = function(*arguments)
        times.append(time.process_time() - begin)
    return result, 1e3 * min(times)


def older(trace: LoadTrace, iterations: int) -> list[tuple[int, int]]:
    """(step planned on, step scored) for each step with one at least ``iterations`` older, the newest such."""
    found = []
    for step, now in enumerate(trace.iteration):
        earlier = np.flatnonzero(trace.iteration <= now - iterations)
        if earlier.size:
            found.append((int(earlier[-1]), step))
    return found


def price_of(load, layout, routing, topology):
    return cost_of_pairs(pairs(ROUTINGS[routing](load, layout, topology), layout), topology)


def on_trace(trace: LoadTrace, topology: Topology, slots: int, age: int, repeats: int = 3) -> dict:
    """Means over layers and micro-batches of steps planned on a load ``age`` iterations old."""
    rows, lost, compared = [], 0, 0
    snapshots = [
        (old, new, layer, micro)
        for old, new in older(trace, age)
        for layer in range(trace.layers)
        for micro in range(trace.microbatches)
    ]
    bounded = set(np.linspace(0, len(snapshots) - 1, min(60, len(snapshots))).round().astype(int))
    for k, (old, new, layer, micro) in enumerate(snapshots):
        old_load, load = trace.tokens[old, layer, micro], trace.tokens[new, layer, micro]
        layout, plan_ms = best_of(repeats, plan, old_load, topology, slots)
        tokens, route_ms = best_of(repeats, route, load, layout, topology)
        ours = cost(tokens, topology)
        ratio = ours.total_s / lower_bound(load, topology, slots) if k in bounded else np.nan
        rows.append((ours.imbalance, ours.inter_node_fraction, plan_ms, route_ms, 1e3 * ours.total_s, ratio))
        if age == 0:
            for planner in PLANNERS.keys() - {"fsep"}:
                other = PLANNERS[planner](old_load, topology, slots)
                for routing in ROUTINGS:
                    # With our own routing it is no longer the published method.
                    if routing != "flow":
                        compared += 1
                        lost += price_of(load, other, routing, topology).total_s < ours.total_s * (1 - 1e-9)
    imbalance, inter, plan_ms, route_ms, step_ms, ratio = np.nanmean(rows, axis=0)
    return dict(
        slots=slots,
        age=age,
        snapshots=len(rows),
        imbalance=imbalance,
        inter_node_fraction=inter,
        plan_ms=plan_ms,
        route_ms=route_ms,
        step_ms=step_ms,
        over_bound=ratio,
        worse_than_a_baseline=f"{lost} of {compared}" if compared else "",
    )


def at_size(devices: int, experts: int, slots: int, kind: str) -> dict:
    """One made-up load of a large size: time of planning and routing, and balance."""
    topology = Topology(devices, 8)
    trace = synthesize(kind, devices=devices, experts=experts, steps=1, tokens_per_device=8192, skew=1.5)
    load = trace.tokens[0, 0, 0]
    plan(load, topology, slots)
    layout, plan_ms = best_of(5, plan, load, topology, slots)
    tokens_NP, route_ms = best_of(5, route_copies, load, layout, topology)
    price = cost_of_pairs(pairs(tokens_NP, layout), topology)
    return dict(
        size=f"{devices}, {experts}, {slots}",
        load=kind,
        plan_ms=plan_ms,
        route_ms=route_ms,
        limit_ms=LIMIT_MS[devices, experts, slots],
        imbalance=price.imbalance,
        inter_node_fraction=price.inter_node_fraction,
    )


def show(title: str, rows: list[dict]) -> None:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-sizes", action="store_true", help="skip the larger sizes")
    arguments = parser.parse_args()
    traces = {path.name: LoadTrace.load(path) for path in arguments.traces} or {
        "made up (dirichlet, seed 0)": synthesize("dirichlet", devices=16, experts=32, steps=10, layers=2, skew=4)
    }
    report = {
        "command": sys.argv,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "date": date.today().isoformat(),
    }
    print(f"{' '.join(report['command'])}\n{report['machine']}, {report['date']}")
    for name, trace in traces.items():
        topology = Topology(trace.devices, 8)
        ages = (0, 250) if older(trace, 250) else (0, 1)
        report[name] = [on_trace(trace, topology, slots, age) for slots in (4, 8) for age in ages]
        show(f"{name}: {trace.devices} devices, nodes of 8, {trace.experts} experts", report[name])
        middle = trace.steps // 2
        errors = {
            part: forecast_errors(part_trace, horizon=2)
            for part, part_trace in (
                ("first half", LoadTrace(trace.tokens[:middle])),
                ("second half", LoadTrace(trace.tokens[middle:])),
            )
        }
        report[f"{name}: forecast error"] = errors
        show(
            f"{name}: forecast error two steps ahead", [{"steps": part, **found} for part, found in errors.items()]
        )
    if not arguments.no_sizes:
        report["sizes"] = [at_size(*size, kind) for size in SIZES for kind in ("zipf", "dirichlet", "clustered")]
        show("larger sizes, nodes of 8", report["sizes"])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
