"""Figures of the experiments, readable in black and white."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ace_lens.experiments.markov import MarkovResults
from ace_lens.plots import COLUMN_WIDTH, style_axes


def plot_markov(results: MarkovResults) -> Figure:
    """The experiment in five panels.

    Weights of independently trained models have nothing in common, each core is sufficient and necessary, the
    cores lie in unrelated subspaces, yet carry the same coordinates, and step by the chain's own eigenvalues.
    """
    # A Figure of its own, not pyplot's: drawing must not depend on a screen or leave global state behind.
    figure = Figure(figsize=(COLUMN_WIDTH, 5.4), layout="constrained")
    grid = figure.subplot_mosaic([["weights", "overlap"], ["scores", "scores"], ["cca", "eigenvalues"]])
    names = [str(model.seed) for model in results.models]
    pairs = [pair.models for pair in results.pairs]
    _pair_matrix(grid["weights"], names, pairs, [pair.weight_cosine for pair in results.pairs])
    style_axes(grid["weights"], "a  weight cosine")
    _scores(grid["scores"], results)
    style_axes(grid["scores"], "c  keep and remove the core")
    _pair_matrix(grid["overlap"], names, pairs, [pair.overlap for pair in results.pairs])
    style_axes(grid["overlap"], "b  core overlap")
    _correlations(grid["cca"], results)
    style_axes(grid["cca"], "d  shared coordinates")
    _eigenvalues(grid["eigenvalues"], results)
    style_axes(grid["eigenvalues"], "e  eigenvalues")
    return figure


def _pair_matrix(axes: Axes, names: Sequence[str], pairs: Sequence[tuple[int, int]], values: Sequence[float]) -> None:
    matrix = np.eye(len(names))
    for (first, second), value in zip(pairs, values, strict=True):
        a, b = names.index(str(first)), names.index(str(second))
        matrix[a, b] = matrix[b, a] = value
    axes.imshow(matrix, vmin=0, vmax=1, cmap="Greys")
    for (row, column), value in np.ndenumerate(matrix):
        shade = "white" if value > 0.5 else "black"
        # Adding zero turns a rounded -0.00 into 0.00.
        axes.text(column, row, f"{round(value, 2) + 0:.2f}", ha="center", va="center", color=shade, fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("model")
    axes.set_ylabel("model")


def _scores(axes: Axes, results: MarkovResults) -> None:
    groups = [
        ("whole model", "accuracy", "white", ""),
        ("core only", "keep", "0.7", ""),
        ("core removed", "remove", "0.3", ""),
    ]
    width = 0.25
    for offset, (label, name, shade, hatch) in enumerate(groups):
        places = np.arange(len(results.models)) + (offset - 1) * width
        heights = np.array([getattr(model, name) for model in results.models])
        bounds = np.array([getattr(model, f"{name}_interval") for model in results.models]).T
        axes.bar(places, heights, width, label=label, color=shade, edgecolor="black", hatch=hatch, linewidth=0.7)
        errors = np.abs(bounds - heights)
        axes.errorbar(places, heights, errors, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
    for level, label, line in (
        (results.truth.accuracy, "optimal", "--"),
        (results.truth.chance, "chance", ":"),
    ):
        axes.axhline(level, color="black", linestyle=line, linewidth=0.9, label=label)
    axes.set_xticks(range(len(results.models)), [f"model {model.seed}" for model in results.models])
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1.15)
    axes.legend(fontsize=6, frameon=False, ncols=3, loc="upper center", columnspacing=0.9, handlelength=1.6)


def _correlations(axes: Axes, results: MarkovResults) -> None:
    markers = "osD^vP*X"
    for index, pair in enumerate(results.pairs):
        axes.plot(
            range(1, len(pair.cca) + 1),
            pair.cca,
            marker=markers[index % len(markers)],
            markersize=4,
            markerfacecolor="white",
            color="black",
            linewidth=0.7,
            label=f"{pair.models[0]}, {pair.models[1]}",
        )
    longest = max((len(pair.cca) for pair in results.pairs), default=1)
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlabel("direction")
    axes.set_ylabel("canonical correlation")
    axes.set_ylim(0, 1.05)
    if results.pairs:
        axes.legend(title="models", title_fontsize=7, fontsize=7, frameon=False, loc="lower left")


def _eigenvalues(axes: Axes, results: MarkovResults) -> None:
    angle = np.linspace(0, 2 * np.pi, 200)
    axes.plot(np.cos(angle), np.sin(angle), color="0.6", linewidth=0.7)
    axes.axhline(0, color="0.8", linewidth=0.5, zorder=0)
    truth = np.array(results.truth.eigenvalues)
    axes.scatter(*truth.T, marker="o", s=70, facecolor="none", edgecolor="black", linewidth=0.9, label="chain")
    for marker, model in zip("x+1234", results.models, strict=False):
        axes.scatter(
            *np.array(model.eigenvalues).T,
            marker=marker,
            s=24,
            color="black",
            linewidth=0.8,
            label=f"model {model.seed}",
        )
    axes.set_xlim(-0.6, 1.1)
    axes.set_ylim(-0.6, 0.6)
    axes.set_aspect("equal")
    axes.set_xlabel("real")
    axes.set_ylabel("imaginary")
    axes.legend(fontsize=6, frameon=False, loc="center left")
