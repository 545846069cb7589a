"""The analysis of one checkpoint of a grokking run: beside a pass for every rank, and beside an epoch of the training.

Ours is `track_core` on one model: accuracies, a core over all pairs, keep and remove at every rank, the step from
answer to answer. The direct way to the two curves is what one writes with TransformerLens alone: a forward pass over
the held-out pairs for each rank and intervention. The cases `epoch-*` ask whether looking at a checkpoint takes longer
than an epoch, the least that lies between two of them.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

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
from benchmarks.case import Case, Disagreement

PERIOD = 53
N_EPOCHS = 20
"""Epochs trained before, so that the model is no longer what it was drawn as."""
# A sample may stand between two answers, where rounding decides.
TOLERANCE = 0.003


@dataclass(frozen=True)
class Checkpoint:
    """A model on its way, its optimizer, and samples of the pairs that it is trained on and of the others."""

    model: Any
    optimizer: torch.optim.Optimizer
    train: ace.Samples
    held_out: ace.Samples


def checkpoint(normalization: Literal["none", "post"], period: int = PERIOD) -> Checkpoint:
    """A model after a few epochs, whose dropout and order of batches draw from torch's global state, seeded here."""
    torch.manual_seed(0)
    pairs, sums = addition_pairs(period)
    halves = split_pairs(period, 0.5, torch.Generator().manual_seed(0))
    train, held_out = (ace.Samples.from_tokens(pairs[index], labels=sums[index]) for index in halves)
    model = build_model(period, normalization, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=1.0)
    given = Checkpoint(model, optimizer, train, held_out)
    for _ in range(N_EPOCHS):
        epoch(given)
    return given


def epoch(given: Checkpoint) -> None:
    """One pass over the training pairs."""
    given.model.train()
    labels = given.train.labels
    assert labels is not None
    for batch in torch.randperm(len(labels)).split(BATCH_SIZE):
        loss = cross_entropy(given.model(given.train.tokens[batch])[:, -1], labels[batch])
        given.optimizer.zero_grad()
        loss.backward()
        given.optimizer.step()


def ours(given: Checkpoint) -> Tensor:
    """The library's way: accuracy `[2, rank]` with nothing but the core, and without it.

    Centred logits have one dimension less than there are classes; what comes after that is rounding.
    """
    given.model.eval()
    period = int(given.train.tokens.max()) + 1
    found = ace.track_core(
        [(0, given.model)],
        given.train,
        given.held_out,
        TARGET,
        HOOK_POINT,
        period=period,
        energy=ENERGY,
        chance=2 / period,
    )
    return torch.tensor([found.points[0].keep_curve, found.points[0].remove_curve])[:, : period - 1]


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
            ours=ours,
            direct=epoch,
            repeats=15,
            reach=1,
        )
        for normalization in ("none", "post")
    ),
)
