"""Figures of reports, at column width and readable in black and white: shapes and shades carry the meaning."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ace_lens.controls import Controls
from ace_lens.validation import Estimate, Validation

COLUMN_WIDTH = 3.4
"""Inches: the width of a column in a two-column paper."""
MARKERS = {"keep": "o", "remove": "s", "flip": "^"}


def style_axes(axes: Axes, title: str | None = None) -> None:
    """The look that all figures share."""
    if title is not None:
        axes.set_title(title, fontsize=8, loc="left")
    axes.tick_params(labelsize=7)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def errors(estimates: list[Estimate]) -> np.ndarray:
    """Distances from the values to the ends of their intervals, `[2, n]`, as matplotlib's `errorbar` takes them."""
    bounds = np.array([(e.value - e.low, e.high - e.value) for e in estimates]).T
    # A percentile interval need not contain its estimate to the last digit.
    return bounds.clip(min=0)


def plot_validation(validation: Validation, controls: Controls | None = None) -> Figure:
    """Score against rank: keep rising to the baseline, remove falling to chance, flip beyond it.

    Arguments:
        validation: a validation of several ranks.
        controls: if given, the range of random subspaces (keep and remove) stands behind, at the rank it was taken at.

    Raises:
        ValueError: the controls are measured by another score.
    """
    if controls is not None and controls.score != validation.score:
        raise ValueError(
            f"The validation is in {validation.score}, the controls in {controls.score}: they do not fit on one axis. "
            "Take both by the same score."
        )
    # A Figure of its own, not pyplot's: drawing must not depend on a screen or leave global state behind.
    figure = Figure(figsize=(COLUMN_WIDTH, 2.6), layout="constrained")
    axes = figure.subplots()
    for name, shade in (("keep", "black"), ("remove", "black"), ("flip", "0.5")):
        estimates = list(getattr(validation, name))
        axes.errorbar(
            validation.ranks,
            [estimate.value for estimate in estimates],
            errors(estimates),
            marker=MARKERS[name],
            markersize=4,
            markerfacecolor="white" if name == "remove" else shade,
            color=shade,
            linewidth=0.8,
            elinewidth=0.8,
            capsize=2,
            label=name,
        )
    axes.axhline(validation.baseline.value, color="black", linestyle="--", linewidth=0.8, label="baseline")
    if validation.chance is not None:
        axes.axhline(validation.chance, color="black", linestyle=":", linewidth=0.8, label="chance")
    if controls is not None and controls.n_draws:
        random = controls.row("random")
        for name, shade in (("keep", "0.85"), ("remove", "0.7")):
            band = getattr(random, name)
            axes.fill_between(
                [random.rank - 0.4, random.rank + 0.4],
                band.low,
                band.high,
                color=shade,
                zorder=0,
                linewidth=0,
                label=f"random, {name}",
            )
    axes.set_xticks(
        validation.ranks if len(validation.ranks) <= 12 else validation.ranks[:: len(validation.ranks) // 8]
    )
    axes.set_xlabel("rank of the core")
    axes.set_ylabel(validation.score)
    _legend_above(figure)
    style_axes(axes)
    return figure


def plot_controls(controls: Controls) -> Figure:
    """Keep, remove and flip of the core and of each control, a line each."""
    rows = controls.rows[::-1]
    figure = Figure(figsize=(COLUMN_WIDTH, 0.9 + 0.27 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(rows))
    for offset, (name, fill) in enumerate((("keep", "black"), ("remove", "white"), ("flip", "0.6"))):
        estimates = [getattr(row, name) for row in rows]
        axes.errorbar(
            [estimate.value for estimate in estimates],
            places + 0.22 * (1 - offset),
            xerr=errors(estimates),
            fmt=MARKERS[name],
            markersize=4,
            markerfacecolor=fill,
            color="black",
            elinewidth=0.8,
            linewidth=0.8,
            label=name,
        )
    axes.axvline(controls.baseline.value, color="black", linestyle="--", linewidth=0.8, label="baseline")
    if controls.chance is not None:
        axes.axvline(controls.chance, color="black", linestyle=":", linewidth=0.8, label="chance")
    axes.set_yticks(places, [f"{row.name} ({row.rank})" for row in rows])
    axes.set_xlabel(controls.score)
    _legend_above(figure)
    style_axes(axes)
    return figure


def _legend_above(figure: Figure) -> None:
    figure.legend(fontsize=6, frameon=False, ncols=5, loc="outside upper center", columnspacing=0.9, handlelength=1.6)
