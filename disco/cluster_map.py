"""A picture of the clusters: documents in two dimensions, colour by cluster, marker by source.

Shape suffixes: D documents, S feature dimensions.
"""

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE

MAP_DOCUMENTS = 1_000
MARKERS = "os^Dv<>PX*hd"


def draw_map(
    x_DS: np.ndarray,
    label_D: np.ndarray,
    source_D: np.ndarray,
    sources: list[str],
    document_D: np.ndarray,
    out: Path,
    seed: int,
) -> None:
    """Write map.npz (xy [D, 2], document, cluster, source) and map.png for at most MAP_DOCUMENTS documents."""
    kept = np.linspace(0, len(x_DS) - 1, min(MAP_DOCUMENTS, len(x_DS))).astype(int)
    x_DS, label_D, source_D, document_D = x_DS[kept], label_D[kept], source_D[kept], document_D[kept]
    xy_D2 = plane(x_DS, seed)
    np.savez(out / "map.npz", xy=xy_D2, document=document_D, cluster=label_D, source=source_D)

    figure = Figure(figsize=(8.5, 6), layout="constrained")
    ax = figure.add_subplot()
    clusters = int(label_D.max()) + 1
    colours = colormaps["tab10" if clusters <= 10 else "tab20" if clusters <= 20 else "gist_ncar"]
    colour_of = [colours(k) if clusters <= 20 else colours(k / clusters) for k in range(clusters)]
    for code in np.unique(source_D):
        here = source_D == code
        ax.scatter(
            *xy_D2[here].T,
            c=[colour_of[k] for k in label_D[here]],
            marker=MARKERS[code % len(MARKERS)],
            s=14,
            alpha=0.75,
            linewidths=0,
        )
    for code in np.unique(source_D):
        centre = np.median(xy_D2[source_D == code], axis=0)
        ax.annotate(
            sources[code],
            centre,
            ha="center",
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.2", "fc": "white", "ec": "none", "alpha": 0.8},
        )
    dots = [Line2D([], [], ls="", marker="o", color=colour_of[k], label=f"cluster {k}") for k in range(clusters)]
    shapes = [
        Line2D([], [], ls="", marker=MARKERS[code % len(MARKERS)], mfc="none", mec="black", label=sources[code])
        for code in np.unique(source_D)
    ]
    figure.legend(
        handles=[*dots, *shapes], loc="outside right upper", fontsize=8, frameon=False, ncols=1 + (clusters > 20)
    )
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_title(f"{len(x_DS):,} documents: colour is the cluster, shape the source", fontsize=10)
    figure.savefig(out / "map.png", dpi=130)


def plane(x_DS: np.ndarray, seed: int) -> np.ndarray:
    """Positions [D, 2] float32: t-SNE from principal components, or the components alone for a few documents."""
    if min(x_DS.shape) < 2 or len(x_DS) < 20:
        pad_D2 = np.zeros((len(x_DS), 2), np.float32)
        found = PCA(min(2, *x_DS.shape), random_state=seed).fit_transform(x_DS)
        pad_D2[:, : found.shape[1]] = found
        return pad_D2
    perplexity = min(30.0, (len(x_DS) - 1) / 3)
    return TSNE(2, init="pca", perplexity=perplexity, random_state=seed, n_jobs=1).fit_transform(x_DS)
