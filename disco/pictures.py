"""The report's pictures, as SVG. Names in them are the user's: none is parsed as mathematics."""

import io
from collections.abc import Mapping, Sequence

import matplotlib
import matplotlib.ticker
import numpy as np
from matplotlib.figure import Figure

from disco.costs import Cost
from disco.curves import Curve, bounds

COLOURS = {
    "seed": "#9ecae1",
    "submodels": "#4292c6",
    "router": "#807dba",
    "fine-tuning": "#08519c",
    "joint training": "#e6550d",
}
RANDOM_COLOURS = {"submodels": "#74c476", "router": "#a1d99b", "fine-tuning": "#238b45"}
RC = {
    "svg.hashsalt": "moe-disco",
    "text.parse_math": False,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e8e8ec",
    "axes.edgecolor": "#8a8a94",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()


def losses(
    axis: str,
    disco: Mapping[str, Curve],
    joint: Curve | None,
    random: Mapping[str, Curve],
    finals: Sequence[tuple[str, str, float]],
) -> bytes:
    """Loss over `axis` ("tokens" or "dollars"): smoothed training losses as lines, validation losses with dots.

    `finals` are (pipeline, stage, loss) on the whole validation split, drawn as diamonds at the stage's end.
    """
    lines = [(stage, curve, COLOURS[stage]) for stage, curve in disco.items()]
    lines += [
        (f"random split: {stage}", curve, RANDOM_COLOURS[stage])
        for stage, curve in random.items()
        if stage != "seed"
    ]
    if joint is not None:
        lines.append(("joint training", joint, COLOURS["joint training"]))
    ends = {
        "DisCo": (disco, COLOURS),
        "random split": (random, RANDOM_COLOURS),
        "joint": ({"joint training": joint} if joint is not None else {}, COLOURS),
    }
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(7.2, 4.6))
        ax = figure.add_subplot()
        for label, curve, colour in lines:
            apart = label.endswith("submodels")
            name = f"{label} (mean, each on its own part)" if apart else label
            seen = curve.validated()
            faint = bool(len(seen.loss))  # the validation curve says it better
            marker = "_" if len(curve.loss) == 1 else None  # a line needs two points
            style = {"ls": (0, (4, 1.5)) if apart else "-", "marker": marker, "ms": 12}
            style |= {"lw": 1, "alpha": 0.45} if faint else {"lw": 2, "label": name}
            ax.plot(getattr(curve, axis), curve.smooth(), color=colour, **style)
            if faint:
                ax.plot(
                    getattr(seen, axis),
                    seen.validation,
                    "o-",
                    color=colour,
                    lw=2,
                    ms=5,
                    mec="white",
                    mew=0.6,
                    label=name,
                )
        low, high = bounds(curve for _, curve, _ in lines)
        marked = False
        for pipeline, stage, loss in finals:
            laid, colours = ends[pipeline]
            if stage in laid:
                x = float(getattr(laid[stage], axis)[-1])
                low, high = min(low, loss - 0.02 * (high - low)), max(high, loss + 0.02 * (high - low))
                ax.plot(
                    x, loss, "D", color=colours.get(stage, COLOURS[stage]), ms=8, mec="black", mew=0.9, zorder=5
                )
                marked = True
        if marked:
            ax.plot([], [], "D", color="white", mec="black", ms=7, label="whole validation split")
        ax.set_ylim(low, high)
        ax.set_xlim(left=0)
        ax.set_ylabel("cross-entropy (nats a token)")
        ax.set_xlabel(
            {"tokens": "tokens trained on, all devices together", "dollars": "dollars of training steps"}[axis]
        )
        ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_tick if axis == "tokens" else _dollars))
        handles, labels = ax.get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2)
        return _svg(figure)


def _tick(value: float, _=None) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _dollars(value: float, _=None) -> str:
    return f"${value:.6g}"


def costs(bills: Mapping[str, Mapping[str, Cost]], price: float) -> bytes:
    """Stacked bars, a pipeline each: dollars at the configured prices, and at one `price` (dollars an hour)."""
    panels = (
        ("at the configured prices", lambda cost: (cost.dollars, cost.wasted_dollars)),
        (
            f"every device at ${price:g} an hour",
            lambda cost: (cost.seconds * price / 3600, cost.wasted_seconds * price / 3600),
        ),
    )
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(7.2, 1.6 + 1.1 * len(bills)))
        for number, (title, value) in enumerate(panels):
            ax = figure.add_subplot(2, 1, number + 1)
            for row, parts in enumerate(bills.values()):
                left = 0.0
                for stage, cost in parts.items():
                    kept, _ = value(cost)
                    ax.barh(row, kept, left=left, color=COLOURS.get(stage, "#bdbdbd"), height=0.62, label=stage)
                    left += kept
                wasted = sum(value(cost)[1] for cost in parts.values())
                if wasted > 0:
                    ax.barh(
                        row, wasted, left=left, color="white", ec="#999", hatch="////", height=0.62, label="wasted"
                    )
                ax.text(left + wasted, row, f" ${left:.3g}", va="center", fontsize=10)
            ax.set_yticks(range(len(bills)), list(bills))
            ax.invert_yaxis()
            ax.grid(axis="y", visible=False)
            ax.set_title(title, fontsize=11, loc="left")
            ax.margins(x=0.12)
            ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(_dollars))
        labels = {}
        for ax in figure.axes:
            labels |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        figure.legend(
            labels.values(),
            labels.keys(),
            loc="upper center",
            bbox_to_anchor=(0.5, 0.02),
            ncols=min(6, len(labels)),
        )
        figure.tight_layout()
        return _svg(figure)


def routing(counts_LKE: np.ndarray, layers: Sequence[int]) -> bytes:
    """A heat map a layer: the share of each cluster's choices (rows) that each expert (columns) got."""
    share_LKE = counts_LKE / np.maximum(counts_LKE.sum(-1, keepdims=True), 1)
    count, clusters, experts = counts_LKE.shape
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    with matplotlib.rc_context(RC | {"axes.grid": False, "font.size": 9}):
        wide = 1.4 + 0.16 * experts
        figure = Figure(figsize=(wide * columns, (1.1 + 0.16 * clusters) * rows + 0.4), layout="constrained")
        axes = [figure.add_subplot(rows, columns, number + 1) for number in range(len(layers))]
        top = max(share_LKE[list(layers)].max(), 2 / experts)
        for ax, layer in zip(axes, layers, strict=True):
            image = ax.imshow(share_LKE[layer], cmap="Blues", vmin=0, vmax=top, aspect="auto")
            ax.set_title(f"MoE layer {layer}", fontsize=9)
            ax.set_xlabel("expert")
            ax.set_ylabel("cluster")
            if experts <= 12:
                ax.set_xticks(range(experts))
            if clusters <= 12:
                ax.set_yticks(range(clusters))
            for cluster in range(clusters) if experts * clusters <= 64 else ():
                for expert in range(experts):
                    value = share_LKE[layer, cluster, expert]
                    colour = "white" if value > 0.6 * top else "#333"
                    ax.text(
                        expert, cluster, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=7
                    )
        bar = figure.colorbar(image, ax=axes, fraction=0.03, aspect=30)
        bar.ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
        return _svg(figure)


def balance(steps: Sequence[int], lines: Mapping[str, np.ndarray]) -> bytes:
    """Imbalances over updates, 1 being none."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(7.5, 2.8), layout="constrained")
        ax = figure.add_subplot()
        for (name, values), colour in zip(lines.items(), ("#08519c", "#bdbdbd"), strict=False):
            ax.plot(steps, values, label=name, color=colour, marker="." if len(steps) < 50 else None)
        ax.axhline(1, color="#8a8a94", linewidth=0.8)
        ax.set_xlabel("update")
        ax.set_ylabel("busiest over mean")
        ax.legend()
        return _svg(figure)
