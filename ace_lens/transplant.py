"""Causal sharedness: does one model still work when its core is fed by another's?"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ace_lens.controls import random_subspace
from ace_lens.core import Core
from ace_lens.downstream import edited_outputs, paused_passes
from ace_lens.identification import whitened_r2
from ace_lens.models import HookedModel
from ace_lens.reports import Report
from ace_lens.samples import Samples
from ace_lens.scores import Score
from ace_lens.targets import Target, describe
from ace_lens.validation import Bootstrap, Estimate


@dataclass(frozen=True)
class Transplant(Report):
    """A model run with another's core coordinates, mapped, in place of its own.

    Arguments:
        description: from where to where, in words.
        fitted_on: the samples that the map was fitted on, in words.
        judged_on: the samples that the scores were taken on, in words.
        score: the score's name.
        baseline: the receiving model as it is.
        chance: the score of an answer that ignores the input; None where there is no such thing.
        transplanted: with the donor's core coordinates, mapped.
        from_random: with coordinates in random subspaces of the donor, of the same rank, each mapped likewise; the
            interval is over draws.
        shuffled: with the donor's mapped coordinates of other samples.
        map_r2: R^2 of the map on the judging samples, in white coordinates of the receiver.
    """

    description: str
    fitted_on: str
    judged_on: str
    score: str
    baseline: Estimate
    chance: float | None
    transplanted: Estimate
    from_random: Estimate
    shuffled: Estimate
    map_r2: float

    def __str__(self) -> str:
        chance = "" if self.chance is None else f", chance {self.chance:.3f}"
        return "\n".join(
            [
                self.description,
                f"map fitted on {self.fitted_on}; judged on {self.judged_on}; R2 of the map {self.map_r2:.3f}",
                f"{self.score}: baseline {self.baseline}{chance} (95% intervals)",
                f"  transplanted   {self.transplanted}",
                f"  random donor   {self.from_random}",
                f"  shuffled pairs {self.shuffled}",
            ]
        )


def transplant(
    donor: HookedModel,
    donor_core: Core,
    receiver: HookedModel,
    receiver_core: Core,
    samples: Samples,
    target: Target,
    score: Score | None = None,
    *,
    fit: Samples,
    donor_samples: Samples | None = None,
    donor_fit: Samples | None = None,
    n_draws: int = 8,
    n_bootstrap: int = 200,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
) -> Transplant:
    """Fit an affine map from the donor's core coordinates to the receiver's, and run the receiver on mapped ones.

    On other samples than those of the fit, the receiver's core coordinate at each sample's own position is replaced:
    h -> h + Q (map(z_donor) - z). All else in the receiver stays. If it still does the task, the two cores are shared
    in the causal sense, not only correlated.

    Arguments:
        donor: the model whose core is transplanted.
        donor_core: its core.
        receiver: the model that receives it.
        receiver_core: its core.
        samples: the samples to judge on.
        target: the task output, in the receiver.
        score: as for `validate`.
        fit: other samples, to fit the map on.
        donor_samples: the same samples in the donor's tokens, where its tokenizer is another one.
        donor_fit: the same for `fit`.
        n_draws: random subspaces of the donor to compare with.
        n_bootstrap: how often the sequences are resampled for the intervals.
        generator: draws shuffles, subspaces and resamples; seeded with 0 if not given.
        batch_size: rows in a forward pass.

    Raises:
        ValueError: a core does not fit its model, or the donor's samples are not as many as the receiver's.
    """
    donor_core.check_model(donor)
    receiver_core.check_model(receiver)
    generator = generator or torch.Generator().manual_seed(0)
    if (donor_fit is None) != (donor_samples is None):
        raise ValueError("In the donor's tokens are needed both parts, donor_fit and donor_samples, or neither.")
    if n_draws < 1:
        raise ValueError("A transplant is compared with at least one random subspace of the donor: n_draws >= 1.")
    donor_fit, donor_samples = donor_fit or fit, donor_samples or samples
    if len(donor_fit) != len(fit) or len(donor_samples) != len(samples):
        raise ValueError("Donor and receiver need the same samples, in the same order, each in its own tokens.")
    given_fit = _activations(donor, donor_fit, donor_core.hook_point, batch_size)
    given = _activations(donor, donor_samples, donor_core.hook_point, batch_size)
    wanted_fit = receiver_core.coordinates(_activations(receiver, fit, receiver_core.hook_point, batch_size))

    def mapped(basis: Tensor) -> Tensor:
        """Receiver coordinates `[n, rank]` predicted from the donor's coordinates along a basis."""
        ones = torch.ones(len(given_fit), 1, dtype=torch.float64)
        solution = torch.linalg.lstsq(torch.cat([given_fit @ basis, ones], 1), wanted_fit.double()).solution
        return given @ basis @ solution[:-1] + solution[-1]

    coordinates = {"transplanted": mapped(donor_core.basis.double())}
    coordinates["shuffled"] = coordinates["transplanted"][torch.randperm(len(samples), generator=generator)]
    for draw in range(n_draws):
        subspace = random_subspace(donor_core.d_model, donor_core.rank, generator)
        coordinates[f"random {draw}"] = mapped(subspace)
    own = torch.empty(len(samples), receiver_core.rank, dtype=torch.float64)

    def edits(activations: Tensor, index: Tensor) -> Iterator[tuple[str, Tensor]]:
        wide = activations.to(torch.promote_types(activations.dtype, torch.float32))
        basis = receiver_core.basis.to(wide)
        current = receiver_core.coordinates(wide)
        own[index] = current.double().cpu()
        for name, values in coordinates.items():
            change = (values[index].to(current) - current).to(wide.dtype)
            yield name, (wide + change @ basis.T).to(activations.dtype)

    result = edited_outputs(receiver, samples, target, receiver_core.hook_point, edits, batch_size=batch_size)
    estimate = Bootstrap(score, samples, result, n_bootstrap, generator)
    return Transplant(
        description=(
            f"Core of {donor_core.provenance.model_name} at {donor_core.hook_point} into "
            f"{receiver_core.provenance.model_name} at {receiver_core.hook_point}, target {describe(target)}"
        ),
        fitted_on=f"{len(fit)} samples",
        judged_on=f"{len(samples)} samples in {len(samples.tokens)} sequences",
        score=estimate.score.name,
        baseline=estimate(result.clean),
        chance=estimate.chance,
        transplanted=estimate(result.edited["transplanted"]),
        from_random=estimate.over_draws([result.edited[f"random {draw}"] for draw in range(n_draws)]),
        shuffled=estimate(result.edited["shuffled"]),
        map_r2=whitened_r2(own - coordinates["transplanted"], own),
    )


def _activations(model: HookedModel, samples: Samples, hook_point: str, batch_size: int) -> Tensor:
    """`[n, d_model]` in float64, in the order of the samples."""
    paused = [
        (each.index, each.activations) for each in paused_passes(model, samples, hook_point, batch_size=batch_size)
    ]
    order = torch.cat([index for index, _ in paused]).argsort()
    return torch.cat([activations.double().cpu() for _, activations in paused])[order]
