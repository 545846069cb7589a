"""Core extraction from given activations and Jacobians: triangular factors, or two D x D Gramians.

Ours never forms anything larger than the factors of H `[n, d_model]` and J `[n * target, d_model]`; see
`ace_lens.extraction`. The direct way is balanced truncation as it is written down: C = H^T H / (n - 1) and
O = J^T J / n, and the directions of C O from symmetric D x D eigenproblems.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import ace_lens as ace
from benchmarks.case import Case, Disagreement

RANK = 4

# The direct way works with squared singular values, so it gets the weakest of those asked for wrong by up to
# some d_model * eps * (S_1 / S_RANK)^2, relative: 6e-11 for the inputs below at d_model = 4096; by way of the gaps
# it is much the same for the projectors. What was found there is far less, some 4e-15 for both.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Samples:
    """Activations `[n, d_model]` and Jacobians `[n, target, d_model]`, float64."""

    activations: Tensor
    jacobians: Tensor


@dataclass(frozen=True)
class Directions:
    """The leading directions of C O: an ordered orthonormal basis `[d_model, rank]`, eigenvalues `[rank]`."""

    basis: Tensor
    eigenvalues: Tensor


def samples(n_samples: int, d_model: int, n_outputs: int = 1, seed: int = 0) -> Samples:
    """`RANK` planted directions with strengths apart, in noise, about a mean that is not zero."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    planted = torch.linalg.qr(normal(d_model, RANK)).Q
    strengths = 10 * 0.7 ** torch.arange(RANK, dtype=torch.float64)
    return Samples(
        activations=normal(d_model)
        + normal(n_samples, RANK) * strengths @ planted.T
        + 0.1 * normal(n_samples, d_model),
        jacobians=normal(n_samples, n_outputs, RANK) * strengths @ planted.T
        + 0.1 * normal(n_samples, n_outputs, d_model),
    )


def ours(given: Samples) -> Directions:
    """The library's way; C O has the eigenvalues S^2 / ((n - 1) n), with S from H J^T = U S V^T."""
    core = ace.CoreExtractor("hook_embed").update(given.activations, given.jacobians).core(rank=RANK)
    n_samples = len(given.activations)
    return Directions(core.basis, core.singular_values[:RANK].square() / ((n_samples - 1) * n_samples))


def direct(given: Samples) -> Directions:
    """Balanced truncation from the two Gramians, for any number of outputs.

    With C = E diag(lambda) E^T and C^{1/2} = E diag(lambda)^{1/2} E^T, the eigenvectors w of the symmetric
    C^{1/2} O C^{1/2} give C^{1/2} w as those of C O, with the same eigenvalues. In order of the eigenvalues
    they span what H^T U spans, H J^T = U S V^T. For given Gramians this is what one does; it makes no use of
    their low rank when there are fewer samples, or rows of J, than dimensions.
    """
    n_samples = len(given.activations)
    centred = given.activations - given.activations.mean(0)
    rows = given.jacobians.flatten(0, 1)
    covariance = centred.T @ centred / (n_samples - 1)
    gramian = rows.T @ rows / n_samples
    variances, axes = torch.linalg.eigh(covariance)
    # Rounding makes some variances that are zero negative.
    root = axes * variances.clamp(min=0).sqrt() @ axes.T
    eigenvalues, vectors = torch.linalg.eigh(root @ gramian @ root)
    leading = vectors.flip(1)[:, :RANK]
    return Directions(torch.linalg.qr(root @ leading).Q, eigenvalues.flip(0)[:RANK])


def check(found: Directions, expected: Directions) -> None:
    """Hold the projectors and the eigenvalues to `TOLERANCE`."""
    projector, eigenvalue = differences(found, expected)
    # NaN is within no tolerance.
    if not (projector <= TOLERANCE and eigenvalue <= TOLERANCE):
        raise Disagreement(
            f"projectors by {projector:.1e}, eigenvalues by {eigenvalue:.1e} (relative). Only {TOLERANCE:.0e} "
            "can be rounding, so one way is wrong: compare each with H J^T = U S V^T at a small size."
        )


def differences(found: Directions, expected: Directions) -> tuple[float, float]:
    """The largest difference of the projectors on the leading 1, 2, ... directions (Frobenius), and of the
    eigenvalues, relative.
    """
    projectors = [
        torch.linalg.matrix_norm(ours @ ours.T - theirs @ theirs.T)
        for ours, theirs in ((found.basis[:, :rank], expected.basis[:, :rank]) for rank in range(1, RANK + 1))
    ]
    relative = (found.eigenvalues - expected.eigenvalues).abs() / expected.eigenvalues
    # Unlike Python's max, torch's lets no NaN slip by.
    return float(torch.stack(projectors).max()), float(relative.max())


def case(
    name: str, n_samples: int, d_model: int, *, repeats: int, n_outputs: int = 1, reach: float | None = None
) -> Case[Samples, Directions]:
    """Extraction at one size."""
    return Case(
        name=name,
        inputs=lambda: samples(n_samples, d_model, n_outputs),
        ours=ours,
        direct=direct,
        check=check,
        repeats=repeats,
        reach=reach,
    )


CASES = (
    case("extraction-576", 600, 576, repeats=9),
    # The direct way takes half a minute here on two idle cores, and minutes on busy ones; it runs three times in all.
    case("extraction-4096", 600, 4096, repeats=2, reach=50),
)
