"""How well a task is done: functions of its outputs and labels.

A score takes outputs `[sample, target]`, labels `[sample]` and the outputs of the unedited model. It returns
one value a sample, whose mean is the score, or a single value; NaN where the samples leave it undefined.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ScoreFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Score:
    """A score, and what it is worth when the input is ignored.

    Arguments:
        name: how reports call it.
        function: (outputs, labels, clean outputs) -> one value a sample, or a single value.
        chance: labels -> the best score without looking at the input; None where there is no such thing.
        higher_is_better: which way the task is done better.
        needs_labels: whether the score reads the labels.
        check: (outputs, labels) -> why the score does not fit them, or None.
        resampled: (outputs, labels, how often each sample is drawn `[draw, sample]`) -> one value a draw, for a score
            that is a single value; the same as scoring draw after draw, and quicker.
    """

    name: str
    function: ScoreFunction
    chance: Callable[[Tensor], float] | None = None
    higher_is_better: bool = True
    needs_labels: bool = True
    check: Callable[[Tensor, Tensor], str | None] = lambda outputs, labels: None
    resampled: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


def _needs_classes(outputs: Tensor, labels: Tensor) -> str | None:
    n_outputs = outputs.shape[1]
    if n_outputs == 1:
        return "it compares several outputs, but the target gives one"
    if bool((labels != labels.long()).any() or (labels < 0).any() or (labels >= n_outputs).any()):
        return f"labels number the target's outputs, 0 to {n_outputs - 1}, but these lie elsewhere (token ids, perhaps)"
    return None


def _needs_two_sides(outputs: Tensor, labels: Tensor) -> str | None:
    return None if set(labels.unique().tolist()) <= {0, 1} else "labels are 0 and 1, but there are others"


def _needs_several_outputs(outputs: Tensor, labels: Tensor) -> str | None:
    return "it compares several outputs, but the target gives one" if outputs.shape[1] == 1 else None


def _frequencies(labels: Tensor) -> Tensor:
    return labels.unique(return_counts=True)[1] / len(labels)


def _roc_auc(outputs: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """ROC AUC `[draw]`, for samples that are each drawn `[draw, sample]` times; NaN where a label was not drawn."""
    values, group = outputs[:, 0].unique(return_inverse=True)
    positive = labels.bool()

    def per_value(drawn: Tensor) -> Tensor:
        return torch.zeros(len(drawn), len(values), dtype=torch.float64).index_add_(1, group.cpu(), drawn)

    counts = counts.double().cpu()
    positives, negatives = per_value(counts * positive.cpu()), per_value(counts * ~positive.cpu())
    below = negatives.cumsum(1) - negatives
    return (positives * (below + negatives / 2)).sum(1) / (positives.sum(1) * negatives.sum(1))


def _log_probabilities(outputs: Tensor) -> Tensor:
    return outputs.double().log_softmax(dim=1)


ACCURACY = Score(
    "accuracy",
    lambda outputs, labels, clean: (outputs.argmax(1) == labels).double(),
    chance=lambda labels: float(_frequencies(labels).max()),
    check=_needs_classes,
)
"""Share of samples whose largest output is the label's. Chance: always the commonest label."""

ROC_AUC = Score(
    "ROC AUC",
    lambda outputs, labels, clean: _roc_auc(outputs, labels, torch.ones(1, len(labels)))[0],
    chance=lambda labels: 0.5,
    check=_needs_two_sides,
    resampled=_roc_auc,
)
"""Probability that a sample with label 1 has a larger (first) output than one with label 0."""

MEAN_MARGIN = Score(
    "mean margin",
    lambda outputs, labels, clean: torch.where(labels.bool(), outputs[:, 0], -outputs[:, 0]).double(),
    chance=lambda labels: 0.0,
    check=_needs_two_sides,
)
"""Mean of the first output, with its sign turned where the label is 0."""

CROSS_ENTROPY = Score(
    "cross-entropy",
    lambda outputs, labels, clean: -_log_probabilities(outputs)[torch.arange(len(labels)), labels.long()],
    chance=lambda labels: float(torch.special.entr(_frequencies(labels).double()).sum()),
    higher_is_better=False,
    check=_needs_classes,
)
"""Mean of -log p(label), in nats, over the outputs as logits. Chance: the entropy of the labels."""

KL = Score(
    "KL to unedited",
    lambda outputs, labels, clean: (
        _log_probabilities(clean).exp() * (_log_probabilities(clean) - _log_probabilities(outputs))
    ).sum(1),
    higher_is_better=False,
    needs_labels=False,
    check=_needs_several_outputs,
)
"""Mean of KL(unedited || edited), in nats, over the outputs as logits."""


def default_score(n_outputs: int, labels: Tensor | None) -> Score:
    """ROC AUC for one output and labels 0 and 1; accuracy for several outputs and class labels.

    Raises:
        ValueError: neither fits.
    """
    if labels is not None and n_outputs == 1 and set(labels.unique().tolist()) <= {0, 1}:
        return ROC_AUC
    if labels is not None and n_outputs > 1 and not labels.is_floating_point():
        return ACCURACY
    raise ValueError(
        "There is no default score for these samples: it takes labels 0 and 1 with one output, or class labels "
        "with several. Label the samples, or give a score."
    )
