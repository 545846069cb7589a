"""Figures of the experiments, readable in black and white."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ace_lens.experiments.agreement import AgreementResults, ModelResult
from ace_lens.experiments.markov import MarkovResults
from ace_lens.experiments.modular_addition import ModularAdditionResults
from ace_lens.plots import COLUMN_WIDTH, style_axes
from ace_lens.trajectory import TrajectoryPoint

# Where curves may run beneath a legend, a pale ground keeps it readable.
OVER_LINES: dict[str, Any] = {"frameon": True, "framealpha": 0.85, "edgecolor": "none"}


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


def plot_modular_addition(results: ModularAdditionResults) -> Figure:
    """The experiment in five panels.

    Accuracy and the dimensions of the core over training; what it is to keep and to remove it; its eigenvalues as
    clocks at four epochs; the dimensions that are necessary against those that are sufficient, with the redundancy
    between them; and the modes, with and without weight decay.
    """
    figure = Figure(figsize=(2 * COLUMN_WIDTH, 6.6), layout="constrained")
    subfigures: Any = figure.subfigures(3, 1)
    top, middle, bottom = subfigures
    points = results.trajectory
    epochs = [point.epoch for point in points]
    left, right = top.subplots(1, 2)
    _accuracy_and_rank(left, epochs, points)
    style_axes(left, "a  accuracy and core dimension")
    _keep_and_remove(right, epochs, points, results.period)
    style_axes(right, "b  keep and remove the core")
    shown = _told_epochs(results)
    for axes, point in zip(middle.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        _clock(axes, point)
        style_axes(axes, f"epoch {point.epoch}")
    middle.suptitle("c  eigenvalues of the step from each answer to the next", fontsize=8, x=0.01, ha="left")
    left, right = bottom.subplots(1, 2)
    _redundancy(left, points)
    style_axes(left, "d  necessary and sufficient dimensions")
    _modes(right, results)
    style_axes(right, "e  modes")
    for axes in (*top.axes, *bottom.axes):
        if results.grok_epoch is not None and axes.get_xlabel() == "epoch":
            axes.axvline(results.grok_epoch, color="0.75", linewidth=0.7, zorder=0)
    return figure


def _accuracy_and_rank(axes: Axes, epochs: list[int], points: Sequence[TrajectoryPoint]) -> None:
    axes.plot(epochs, [p.train_accuracy for p in points], color="0.6", linewidth=1, linestyle="--", label="train")
    axes.plot(epochs, [p.test_accuracy for p in points], color="black", linewidth=1, label="held out")
    axes.set_xlabel("epoch")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1.05)
    beside = axes.twinx()
    beside.plot(
        epochs, [p.rank for p in points], "o", markersize=3, markerfacecolor="white", color="black", label="rank"
    )
    beside.set_ylabel("core dimension")
    beside.set_ylim(0, None)
    style_axes(beside)
    beside.spines["right"].set_visible(True)
    handles = [*axes.get_lines(), *beside.get_lines()]
    beside.legend(
        handles,
        [str(handle.get_label()) for handle in handles],
        fontsize=6,
        loc="upper right",
        bbox_to_anchor=(1, 0.93),
        **OVER_LINES,
    )


def _keep_and_remove(axes: Axes, epochs: list[int], points: Sequence[TrajectoryPoint], period: int) -> None:
    for name, marker, fill in (("keep", "o", "black"), ("remove", "s", "white")):
        heights = np.array([getattr(point, name) for point in points])
        bounds = np.array([getattr(point, f"{name}_interval") for point in points]).T
        axes.errorbar(
            epochs,
            heights,
            np.abs(bounds - heights),
            marker=marker,
            markersize=3,
            markerfacecolor=fill,
            color="black",
            linewidth=0.7,
            elinewidth=0.7,
            label=f"{name} the core",
        )
    axes.plot(epochs, [p.test_accuracy for p in points], color="0.6", linewidth=1, linestyle="--", label="whole model")
    axes.axhline(2 / period, color="black", linestyle=":", linewidth=0.9, label="2/p")
    axes.set_xlabel("epoch")
    axes.set_ylabel("held-out accuracy")
    axes.set_ylim(0, 1.05)
    axes.legend(fontsize=6, loc="center right", **OVER_LINES)


def _told_epochs(results: ModularAdditionResults) -> list[TrajectoryPoint]:
    """Four checkpoints that tell the story: by heart, half-way, at grokking, and at the end."""
    points = results.trajectory
    half = next((i for i, point in enumerate(points) if point.test_accuracy >= 0.5), len(points) // 3)
    grokked = next((i for i, point in enumerate(points) if point.epoch == results.grok_epoch), 2 * len(points) // 3)
    return [points[i] for i in sorted({0, half, grokked, len(points) - 1})]


def _clock(axes: Axes, point: TrajectoryPoint) -> None:
    angle = np.linspace(0, 2 * np.pi, 200)
    axes.plot(np.cos(angle), np.sin(angle), color="0.6", linewidth=0.7)
    for real, imaginary in point.eigenvalues:
        axes.plot([0, real], [0, imaginary], color="0.7", linewidth=0.5)
    axes.scatter(*np.array(point.eigenvalues).T, s=9, color="black", zorder=3)
    axes.set_xlim(-1.15, 1.15)
    axes.set_ylim(-1.15, 1.15)
    axes.set_aspect("equal")
    axes.set_xticks([-1, 0, 1])
    axes.set_yticks([-1, 0, 1])
    axes.set_xlabel(f"{len(point.eigenvalues)} eigenvalues,\n{point.unit_circle:.0%} on the circle")


def _redundancy(axes: Axes, points: Sequence[TrajectoryPoint]) -> None:
    explained = [point for point in points if point.redundancy is not None]
    epochs = [point.epoch for point in explained]
    sufficient = [point.r_suf or 0 for point in explained]
    necessary = [point.r_nec or 0 for point in explained]
    # Before grokking more may be enough than is necessary, which is no redundancy.
    redundant = [more >= enough for more, enough in zip(necessary, sufficient, strict=True)]
    style = {"color": "0.88", "linewidth": 0, "label": "redundancy"}
    axes.fill_between(epochs, sufficient, necessary, redundant, interpolate=True, **style)
    axes.plot(
        epochs, necessary, "s-", markersize=3, markerfacecolor="white", color="black", linewidth=0.7, label="r_nec"
    )
    axes.plot(epochs, sufficient, "o-", markersize=3, color="black", linewidth=0.7, label="r_suf")
    axes.set_xlabel("epoch")
    axes.set_ylabel("dimensions")
    axes.set_ylim(0, None)
    axes.legend(fontsize=6, frameon=False, loc="best")


def _modes(axes: Axes, results: ModularAdditionResults) -> None:
    runs = [(results.trajectory, "o-", "black", f"weight decay {results.config['weight_decay']:g}")]
    if results.branch:
        label = f"weight decay 0 from epoch {results.config['branch_at']}"
        runs.append((results.branch, "s--", "white", label))
    for points, line, fill, label in runs:
        counts = [len(point.modes) for point in points]
        axes.plot(
            [point.epoch for point in points],
            counts,
            line,
            markersize=3,
            markerfacecolor=fill,
            color="black",
            linewidth=0.7,
            label=label,
        )
    axes.axhline(results.period // 2 + 1, color="black", linestyle=":", linewidth=0.9, label="all there are")
    axes.set_xlabel("epoch")
    axes.set_ylabel("modes")
    # Room for the legend above the line.
    axes.set_ylim(0, 1.4 * (results.period // 2 + 1))
    axes.legend(fontsize=6, frameon=False, loc="upper right")


def plot_agreement(results: AgreementResults) -> Figure:
    """The experiment in a row of panels a model, and one a pair of models.

    ROC AUC of every layer under each intervention; the margin against the core coordinate; the score at the chosen
    layer; and core coordinates of two models on the same prompts.
    """
    n_rows = len(results.models) + -(-len(results.pairs) // 3)
    figure = Figure(figsize=(2 * COLUMN_WIDTH, 2.1 * n_rows), layout="constrained")
    rows = figure.subplots(n_rows, 3, squeeze=False)
    for (layers, knob, scores), model in zip(rows, results.models, strict=False):
        _layers(layers, model)
        style_axes(layers, model.name)
        _knob(knob, model)
        style_axes(knob, f"block {model.layer}, knob R2 {model.knob_r2:.2f}")
        _agreement_scores(scores, model)
        style_axes(scores, f"block {model.layer}")
    places = rows[len(results.models) :].flatten()
    by_name = {model.name: model for model in results.models}
    for axes, pair in zip(places, results.pairs, strict=False):
        first, second = (by_name[name] for name in pair.models)
        _by_number(axes, first, first.coordinates, second.coordinates)
        axes.set_xlabel(f"core of {first.name}")
        axes.set_ylabel(f"core of {second.name}")
        style_axes(axes, f"Spearman {pair.spearman:.2f}")
    for axes in places[len(results.pairs) :]:
        axes.set_axis_off()
    return figure


def _layers(axes: Axes, model: ModelResult) -> None:
    depth = [(row.layer + 1) / model.n_layers for row in model.sweep]
    for name, line, shade in (("keep", "-", "black"), ("remove", "--", "black"), ("flip", "-", "0.55")):
        heights = [getattr(row, name) for row in model.sweep]
        low, high = zip(*(getattr(row, f"{name}_interval") for row in model.sweep), strict=True)
        axes.fill_between(depth, low, high, color="0.9", linewidth=0, zorder=0)
        axes.plot(depth, heights, line, color=shade, linewidth=1, label=name)
    axes.axhline(model.base_auc, color="black", linestyle=":", linewidth=0.9, label="none")
    axes.axvline((model.layer + 1) / model.n_layers, color="0.75", linewidth=0.7, zorder=0)
    axes.set_xlabel("depth")
    axes.set_ylabel("ROC AUC")
    axes.set_ylim(0, 1.05)
    axes.legend(fontsize=6, frameon=False, loc="lower left")


def _knob(axes: Axes, model: ModelResult) -> None:
    _by_number(axes, model, model.coordinates, model.margins)
    axes.axhline(0, color="0.75", linewidth=0.7, zorder=0)
    axes.set_xlabel("core coordinate")
    axes.set_ylabel("margin")


def _by_number(axes: Axes, model: ModelResult, x: Sequence[float], y: Sequence[float]) -> None:
    """Held-out prompts as points, filled where the head is plural."""
    plural = np.array(model.plural)
    for mask, fill, label in ((plural, "black", "plural"), (~plural, "white", "singular")):
        axes.scatter(
            np.array(x)[mask], np.array(y)[mask], s=7, facecolor=fill, edgecolor="black", linewidth=0.5, label=label
        )
    axes.legend(fontsize=6, frameon=False, loc="best", handletextpad=0.1)


def _agreement_scores(axes: Axes, model: ModelResult) -> None:
    names = ("base", "keep", "remove", "flip")
    heights = np.array([getattr(model, f"{name}_auc") for name in names])
    bounds = np.array([getattr(model, f"{name}_interval") for name in names]).T
    axes.bar(range(4), heights, color=["white", "0.75", "0.5", "0.2"], edgecolor="black", linewidth=0.7)
    axes.errorbar(range(4), heights, np.abs(bounds - heights), fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
    axes.axhline(0.5, color="black", linestyle=":", linewidth=0.9)
    axes.set_xticks(range(4), ("none", "keep", "remove", "flip"))
    axes.set_ylabel("ROC AUC")
    axes.set_ylim(0, 1.05)
