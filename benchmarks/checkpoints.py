"""The analysis of one checkpoint of a grokking run: beside a pass for every rank, and beside an epoch of the training.

Ours is `track_core` on one model: accuracies, a core over all pairs, keep and remove at every rank, the step from
answer to answer. The direct way to the two curves is what one writes with TransformerLens alone: a forward pass over
the held-out pairs for each rank and intervention. The cases `epoch-*` ask whether looking at a checkpoint takes longer
than an epoch, the least that lies between two of them; a few of either at a time, so that what is drawn once for a
whole run counts for little.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import ace_lens as ace
from ace_lens.experiments.modular_addition import (
    BATCH_SIZE,
    ENERGY,
    HOOK_POINT,
    LEARNING_RATE,
    TARGET,
    addition_pairs,
    build_model,
    split_pairs,
)
from ace_lens.experiments.training import IGNORED, Recipe, train
from benchmarks.case import Case, Disagreement

PERIOD = 53
N_EPOCHS = 20
"""Epochs trained before, so that the model is no longer what it was drawn as."""
N_AT_A_TIME = 3
"""Checkpoints, and epochs, that are timed together."""
# A sample may stand between two answers, where rounding decides.
TOLERANCE = 0.003


@dataclass(frozen=True)
class Checkpoint:
    """A model on its way, and samples of the pairs that it is trained on and of the others."""

    model: Any
    train: ace.Samples
    held_out: ace.Samples


def checkpoint(normalization: Literal["none", "pre", "post"], period: int = PERIOD) -> Checkpoint:
    """A model after a few epochs."""
    pairs, sums = addition_pairs(period)
    halves = split_pairs(period, 0.5, torch.Generator().manual_seed(0))
    seen, unseen = (ace.Samples.from_tokens(pairs[index], labels=sums[index]) for index in halves)
    given = Checkpoint(build_model(period, normalization, seed=0), seen, unseen)
    epochs(given, N_EPOCHS)
    return given


def epochs(given: Checkpoint, n_epochs: int = N_AT_A_TIME) -> None:
    """Passes over the training pairs, as the experiment trains; each call starts a new optimizer."""
    labels = torch.full_like(given.train.tokens, IGNORED)
    assert given.train.labels is not None
    labels[:, -1] = given.train.labels
    train(given.model, given.train.tokens, labels, Recipe(n_epochs, LEARNING_RATE, 1.0, BATCH_SIZE, seed=0))


def trajectory(given: Checkpoint, n_checkpoints: int = N_AT_A_TIME) -> ace.Trajectory:
    """The library's analysis, of the same model several times over."""
    period = int(given.train.tokens.max()) + 1
    models = [(number, given.model) for number in range(n_checkpoints)]
    options = {"period": period, "energy": ENERGY, "chance": 2 / period}
    return ace.track_core(models, given.train, given.held_out, TARGET, HOOK_POINT, **options)


def ours(given: Checkpoint) -> Tensor:
    """The library's way: accuracy `[2, rank]` with nothing but the core, and without it.

    Centred logits have one dimension less than there are classes; what comes after that is rounding.
    """
    (point,) = trajectory(given, 1).points
    return torch.tensor([point.keep_curve, point.remove_curve])[:, : int(given.train.tokens.max())]


def direct(given: Checkpoint) -> Tensor:
    """A full pass for every rank and intervention; the core itself is taken from the library."""
    model = given.model.eval()
    tokens = torch.cat([given.train.tokens, given.held_out.tokens])
    core = ace.extract_core(model, ace.Samples.from_tokens(tokens), TARGET, HOOK_POINT, batch_size=len(tokens))
    mean, basis = core.mean.float(), core.basis.float()
    curves: list[list[Tensor]] = [[], []]
    for rank in range(1, int(tokens.max()) + 1):
        projector = basis[:, :rank] @ basis[:, :rank].T
        for curve, matrix in zip(curves, (projector, torch.eye(len(projector)) - projector), strict=True):

            def put(activation: Tensor, hook: object, matrix: Tensor = matrix) -> Tensor:
                return mean + (activation - mean) @ matrix

            with torch.no_grad():
                logits = model.run_with_hooks(given.held_out.tokens, fwd_hooks=[(HOOK_POINT, put)])[:, -1]
            curve.append((logits.argmax(1) == given.held_out.labels).double().mean())
    return torch.stack([torch.stack(curve) for curve in curves])


def check(found: Tensor, expected: Tensor) -> None:
    """Hold the accuracies to `TOLERANCE`."""
    if found.shape != expected.shape or not float((found - expected).abs().max()) <= TOLERANCE:
        raise Disagreement(f"Accuracies differ by more than {TOLERANCE}, so one way is wrong.")


CASES = (
    *(
        Case(
            name=f"checkpoint-{normalization}",
            inputs=lambda normalization=normalization: checkpoint(normalization),
            ours=ours,
            direct=direct,
            check=check,
            repeats=3,
        )
        for normalization in ("none", "post")
    ),
    *(
        Case(
            name=f"epoch-{normalization}",
            inputs=lambda normalization=normalization: checkpoint(normalization),
            ours=trajectory,
            direct=epochs,
            repeats=15,
            reach=1,
        )
        for normalization in ("none", "pre", "post")
    ),
)
