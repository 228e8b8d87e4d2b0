"""The report's section on experts that processes share: load and balance of each layer while it trained.

Shapes: S logged steps, L MoE layers, E experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from disco import pictures
from disco.findings import Run
from disco.page import Block, Heading, Picture, Table, Text
from launch.ledger import read

# What a row of metrics has beside the imbalance of devices, and its column.
MORE = {
    "expert_imbalance": "with an expert a device",
    "inter_node_fraction": "left their node",
    "route_ms": "ms to route",
}


def sharing(run: Run) -> list[Block]:
    """A table and a picture for each stage whose experts were divided among processes; none where none was."""
    stages: dict[str, dict[int, dict[str, Any]]] = {}
    for row in read(run.folder / "metrics.jsonl"):
        if "imbalance" in row and row["phase"] in run.curves:
            stages.setdefault(row["phase"], {})[row["step"]] = row  # of a step made twice, the last
    content: list[Block] = []
    for phase, by_step in stages.items():
        content += _stage(phase, [by_step[step] for step in sorted(by_step)])
    return content


def _stage(phase: str, rows: Sequence[Mapping[str, Any]]) -> list[Block]:
    layers = len(rows[-1]["imbalance"])
    rows = [row for row in rows if len(row["imbalance"]) == layers]
    found = {name: np.array([row[name] for row in rows if name in row]) for name in ("imbalance", *MORE)}
    found = {name: values_SL for name, values_SL in found.items() if len(values_SL)}
    more = [name for name in MORE if name in found]
    columns = ["MoE layer", "busiest expert", "imbalance, mean", "worst", *(MORE[name] for name in more)]
    share_LE = np.mean([row["expert_share"] for row in rows if "expert_share" in row], 0)
    share_LE = share_LE / share_LE.sum(-1, keepdims=True)
    table = []
    for layer in range(layers):
        busiest = int(share_LE[layer].argmax())
        values_S = found["imbalance"][:, layer]
        line = [str(layer), f"{busiest}: {share_LE[layer, busiest]:.1%} of the tokens"]
        line += [f"{values_S.mean():.3f}", f"{values_S.max():.3f}"]
        for name in more:
            value = found[name][:, layer].mean()
            line.append(f"{value:.1%}" if name == "inter_node_fraction" else f"{value:.3f}")
        table.append(line)
    plan = [row["plan_ms"] for row in rows if row.get("plan_ms") is not None]
    planned = f" Planning took {np.mean(plan):.2f} ms of CPU time a layer." if plan else ""
    lines = {"imbalance of devices": found["imbalance"].mean(1)}
    if "expert_imbalance" in found:
        lines[MORE["expert_imbalance"]] = found["expert_imbalance"].mean(1)
    steps = [row["step"] for row in rows]
    name = f"balance_{phase.replace('/', '_')}.svg"
    return [
        Heading(f"How processes shared the experts: {phase}", 3),
        Text(
            f"Means over {len(rows)} logged steps. Imbalance: tokens of the busiest device over the mean, 1 where "
            f"all have as many.{planned}"
        ),
        Table(columns, table, left=["busiest expert"]),
        Picture(name, pictures.balance(steps, lines), "Imbalance over updates, mean of the MoE layers."),
    ]
