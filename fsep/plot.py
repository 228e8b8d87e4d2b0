"""Pictures of loads, layouts and planners, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from fsep.layout import Layout  # noqa: E402
from fsep.simulation import Result  # noqa: E402
from fsep.topology import Topology  # noqa: E402
from fsep.traces import LoadTrace  # noqa: E402


def plot_load(trace: LoadTrace, path: Path) -> None:
    """Heat map of each expert's share of the tokens over time, one panel a layer, in units of the mean share."""
    figure, panels = plt.subplots(
        trace.layers, 1, figsize=(8, 1 + 2 * trace.layers), squeeze=False, sharex=True, layout="constrained"
    )
    for layer, panel in enumerate(panels[:, 0]):
        load_SE = trace.tokens[:, layer].sum((1, 2), dtype=np.int64)
        share_SE = load_SE * trace.experts / np.maximum(load_SE.sum(1, keepdims=True), 1)
        image = panel.imshow(share_SE.T, aspect="auto", interpolation="nearest", cmap="magma")
        panel.set_ylabel(f"layer {trace.layer[layer]}\nexpert")
        figure.colorbar(image, ax=panel, label="load / mean")
    ticks = np.unique(np.linspace(0, trace.steps - 1, 6).round().astype(int))
    panels[-1, 0].set_xticks(ticks, trace.iteration[ticks])
    panels[-1, 0].set_xlabel("iteration")
    _save(figure, path)


def plot_layout(layout: Layout, tokens_NP: np.ndarray, topology: Topology, path: Path) -> None:
    """One bar a device, stacked by the experts it computes (numbers in the larger pieces), nodes set apart.

    Args:
        tokens_NP: the compact routing, see ``route_copies``.
    """
    copies, flow_P = layout.copies, tokens_NP.sum(0)
    figure, panel = plt.subplots(figsize=(max(6, 0.5 * layout.devices), 4), layout="constrained")
    colours = plt.get_cmap("turbo")(np.linspace(0, 1, layout.experts))
    mean = max(flow_P.sum() / layout.devices, 1)
    at = np.arange(layout.devices) + 0.5 * topology.node_of
    for device in range(layout.devices):
        bottom = 0.0
        for p in copies.on_device[copies.device_start[device] : copies.device_start[device + 1]]:
            expert, height = copies.expert[p], flow_P[p] / mean
            panel.bar(at[device], height, bottom=bottom, color=colours[expert], edgecolor="white", linewidth=0.5)
            if height > 0.06:
                panel.text(at[device], bottom + height / 2, str(expert), ha="center", va="center", fontsize=7)
            bottom += height
    panel.axhline(1, color="black", linewidth=0.8, linestyle="--")
    panel.set_xticks(at, range(layout.devices))
    panel.set_xlabel("device (nodes set apart)")
    panel.set_ylabel("tokens / mean, by expert")
    _save(figure, path)


def plot_planners(results: Sequence[Result], path: Path) -> None:
    """Modelled step time of each planner and routing, one group of bars an age of the load, with the bound."""
    ages = sorted({result.stale for result in results})
    names = list(dict.fromkeys((result.planner, result.routing) for result in results))
    figure, panel = plt.subplots(figsize=(8, 1 + 0.4 * len(names) * len(ages)), layout="constrained")
    height = 0.8 / len(ages)
    for k, age in enumerate(ages):
        rows = {(result.planner, result.routing): result for result in results if result.stale == age}
        times = [rows[name].step_ms for name in names]
        panel.barh(np.arange(len(names)) + k * height, times, height, label=f"{age} steps old")
    bound = results[0].bound_ms
    if np.isfinite(bound):
        panel.axvline(bound, color="black", linestyle="--", linewidth=0.8, label="lower bound")
    panel.set_yticks(
        np.arange(len(names)) + 0.4 - height / 2, [f"{planner}, {routing}" for planner, routing in names]
    )
    panel.invert_yaxis()
    panel.set_xlabel("modelled step time of a layer, ms")
    panel.legend()
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=120)
    plt.close(figure)
