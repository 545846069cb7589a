"""How alike independently trained models are: in weights, in where their cores lie, and in what these carry."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from scipy.stats import rankdata
from torch import Tensor

from ace_lens.core import Core
from ace_lens.reports import Report
from ace_lens.shapes import typed
from ace_lens.validation import Estimate


@typed
def weight_cosine(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Cosine of two models' weights, flattened into one vector each.

    Weights that every model starts from alike, such as normalisation gains of one, force it above zero. Leave them out
    to see what is left.

    Arguments:
        first: parameters by name, as `dict(model.named_parameters())`.
        second: parameters of the other model, of the same names and shapes.

    Raises:
        ValueError: names or shapes differ.
    """
    shapes = [{name: value.shape for name, value in parameters.items()} for parameters in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError("The two models have different parameters, so their weights have no cosine.")
    vectors = [
        torch.cat([parameters[name].detach().double().flatten() for name in sorted(first)])
        for parameters in (first, second)
    ]
    return float(torch.nn.functional.cosine_similarity(*vectors, dim=0))


def overlap(first: Core, second: Core) -> float:
    """Projector overlap ||Qa^T Qb||_F^2 / sqrt(ra rb): 1 for the same subspace, 0 for orthogonal ones.

    Two random subspaces of ranks ra and rb in d dimensions overlap by sqrt(ra rb) / d on average.

    Raises:
        ValueError: the cores live in residual streams of different widths.
    """
    return float(_inner(first, second).square().sum() / (first.rank * second.rank) ** 0.5)


def principal_angles(first: Core, second: Core) -> Tensor:
    """Angles between two subspaces in radians, smallest first: 0 for a shared direction, pi / 2 for none.

    Raises:
        ValueError: the cores live in residual streams of different widths.
    """
    inner = _inner(first, second)
    cosines = torch.linalg.svdvals(inner)
    # Near 1 the cosine hardly changes with the angle: there the sine is the accurate one (Bjorck and Golub 1973).
    lower = first if first.rank <= second.rank else second
    higher = second if lower is first else first
    basis, other = lower.basis.double(), higher.basis.double()
    sines = torch.linalg.svdvals(basis - other @ (other.T @ basis)).flip(0)
    return torch.where(cosines > 0.5**0.5, torch.asin(sines.clamp(max=1)), torch.acos(cosines.clamp(max=1)))


def _inner(first: Core, second: Core) -> Tensor:
    if first.d_model != second.d_model:
        raise ValueError(
            f"The cores live in residual streams of widths {first.d_model} and {second.d_model}, which have no "
            "directions in common. Compare their coordinates instead, with canonical_correlations."
        )
    return first.basis.double().T @ second.basis.double()


@typed
def canonical_correlations(
    first: Float[Tensor, "sample rank_a"],
    second: Float[Tensor, "sample rank_b"],
    held_out_first: Float[Tensor, "held_out rank_a"],
    held_out_second: Float[Tensor, "held_out rank_b"],
) -> Float[Tensor, "n_pairs"]:
    """Canonical correlations of two cores' coordinates on the same inputs, in the order of the fit.

    The pairs of directions are fitted on the first two arguments; the correlations are those of the held-out
    coordinates along them, which chance does not inflate.

    Arguments:
        first: `[sample, rank_a]`, coordinates in one core.
        second: `[sample, rank_b]`, coordinates in the other, on the same samples.
        held_out_first: the same, on other samples.
        held_out_second: the same, on those other samples.

    Raises:
        ValueError: too few samples to fit that many dimensions, or coordinates that do not vary in all of them.
    """
    n_samples, needed = len(first), 5 * (first.shape[1] + second.shape[1])
    if n_samples < needed:
        raise ValueError(
            f"{n_samples} samples are too few for canonical correlations of {first.shape[1]} with {second.shape[1]} "
            f"dimensions: they would be near 1 by chance. Give at least {needed}."
        )
    for part in (first, second, held_out_first, held_out_second):
        _require_variation(part)
    return _held_out_correlations(first, second, held_out_first, held_out_second)


def _held_out_correlations(first: Tensor, second: Tensor, held_out_first: Tensor, held_out_second: Tensor) -> Tensor:
    """`canonical_correlations` of coordinates that are known to vary."""
    means = first.double().mean(0), second.double().mean(0)
    (q_a, r_a), (q_b, r_b) = (
        torch.linalg.qr(part.double() - mean) for part, mean in zip((first, second), means, strict=True)
    )
    left, _, right = torch.linalg.svd(q_a.T @ q_b, full_matrices=False)
    a = (held_out_first.double() - means[0]) @ torch.linalg.solve_triangular(r_a, left, upper=True)
    b = (held_out_second.double() - means[1]) @ torch.linalg.solve_triangular(r_b, right.T, upper=True)
    return _correlations(a, b)


@typed
def canonical_correlation_p_values(
    first: Float[Tensor, "sample rank_a"],
    second: Float[Tensor, "sample rank_b"],
    held_out_first: Float[Tensor, "held_out rank_a"],
    held_out_second: Float[Tensor, "held_out rank_b"],
    *,
    sequence_length: int = 1,
    n_permutations: int = 200,
    generator: torch.Generator,
) -> Float[Tensor, "n_pairs"]:
    """How often shuffled samples correlate as strongly, for each canonical pair.

    Under the null, samples of the second core are permuted against those of the first, in both parts. Samples of one
    sequence resemble each other, which by itself makes shuffled samples correlate less than unrelated sequences do:
    whole sequences are permuted then. With the usual correction, the smallest p-value is 1 / (n_permutations + 1).

    Arguments:
        first, second, held_out_first, held_out_second: as for `canonical_correlations`.
        sequence_length: how many consecutive samples belong to one sequence.
        n_permutations: draws from the null.
        generator: draws the permutations.

    Raises:
        ValueError: as `canonical_correlations`, or samples that are no whole number of sequences.
    """
    observed = canonical_correlations(first, second, held_out_first, held_out_second)
    exceeded = torch.ones_like(observed)
    for _ in range(n_permutations):
        shuffled = second[_permuted(len(second), sequence_length, generator)]
        held_out = held_out_second[_permuted(len(held_out_second), sequence_length, generator)]
        null = _held_out_correlations(first, shuffled, held_out_first, held_out)
        exceeded += null.abs() >= observed
    return exceeded / (n_permutations + 1)


@dataclass(frozen=True)
class RankCorrelation(Report):
    """Spearman's rank correlation, with a bootstrap interval and a permutation p-value.

    Arguments:
        rho: the correlation, with its 95% interval.
        p: the share of shuffled samples that correlate at least as strongly, in either direction.
        n_samples: how many samples.
    """

    rho: Estimate
    p: float
    n_samples: int

    def __str__(self) -> str:
        return f"Spearman {self.rho} (95% interval), p = {self.p:.2g}, {self.n_samples} samples"


@typed
def spearman(
    first: Float[Tensor, "sample"],
    second: Float[Tensor, "sample"],
    *,
    sequence_length: int = 1,
    n_resamples: int = 1000,
    generator: torch.Generator,
) -> RankCorrelation:
    """Spearman's rank correlation of two one-dimensional cores' coordinates on the same inputs.

    Arguments:
        first: `[sample]`, coordinates in one core, whose sign is set by the target.
        second: `[sample]`, coordinates in the other.
        sequence_length: how many consecutive samples belong to one sequence; sequences are drawn whole.
        n_resamples: bootstrap resamples, and permutations; the smallest p-value is 1 / (n_resamples + 1).
        generator: draws them.

    Raises:
        ValueError: fewer than three samples, samples that are no whole number of sequences, or values all alike.
    """
    n_samples = len(first)
    if n_samples < 3:
        raise ValueError(f"{n_samples} samples have no rank correlation to speak of. Give at least three.")

    for part in (first, second):
        _require_variation(part[:, None])

    def rho(a: Tensor, b: Tensor) -> float:
        ranks = (torch.as_tensor(rankdata(part.double().numpy()))[:, None] for part in (a, b))
        return float(_correlations(*ranks))

    observed = rho(first, second)
    rows = _sequences(n_samples, sequence_length)
    draws = [rows[torch.randint(len(rows), (len(rows),), generator=generator)].flatten() for _ in range(n_resamples)]
    resampled = torch.tensor([rho(first[draw], second[draw]) for draw in draws], dtype=torch.float64)
    null = [rho(first, second[_permuted(n_samples, sequence_length, generator)]) for _ in range(n_resamples)]
    p = (1 + sum(abs(value) >= abs(observed) for value in null)) / (n_resamples + 1)
    return RankCorrelation(Estimate.from_draws(observed, resampled), p, n_samples)


@typed
def linear_cka(first: Float[Tensor, "sample d_a"], second: Float[Tensor, "sample d_b"]) -> float:
    """Linear centred kernel alignment (Kornblith et al. 2019): ||X^T Y||_F^2 / (||X^T X||_F ||Y^T Y||_F).

    Given for reference: unlike canonical correlations, it weighs directions by their variance.
    """
    x, y = (part.double() - part.double().mean(0) for part in (first, second))
    cross = torch.linalg.matrix_norm(x.T @ y).square()
    return float(cross / (torch.linalg.matrix_norm(x.T @ x) * torch.linalg.matrix_norm(y.T @ y)))


def _sequences(n_samples: int, sequence_length: int) -> Tensor:
    """Indices of the samples, `[sequence, sequence_length]`."""
    if n_samples % sequence_length:
        raise ValueError(f"{n_samples} samples are no whole number of sequences of {sequence_length}.")
    return torch.arange(n_samples).reshape(-1, sequence_length)


def _permuted(n_samples: int, sequence_length: int, generator: torch.Generator) -> Tensor:
    """Indices of the samples with whole sequences in a random order."""
    rows = _sequences(n_samples, sequence_length)
    return rows[torch.randperm(len(rows), generator=generator)].flatten()


def _require_variation(coordinates: Tensor) -> None:
    """Refuse coordinates of which some combination is constant: nothing correlates with it."""
    deviation = coordinates.double() - coordinates.double().mean(0)
    sizes = torch.linalg.svdvals(deviation)
    if len(sizes) < coordinates.shape[1] or bool(sizes[-1] <= sizes[0] * 1e-12):
        raise ValueError(
            f"These coordinates of {coordinates.shape[1]} dimensions do not vary in all of them, so they have no "
            "correlations. Give more samples, or a core of lower rank."
        )


def _correlations(a: Tensor, b: Tensor) -> Tensor:
    """Correlation of each column of `a` with the same column of `b`."""
    a, b = a - a.mean(0), b - b.mean(0)
    return (a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0))


def consensus_cores(cores: Sequence[Core], coordinates: Sequence[Tensor], rank: int) -> list[Core]:
    """The part of each core that all models share, as a core of its own in each model.

    Generalised canonical correlation (MAXVAR; Kettenring 1971): the shared coordinates g `[sample, rank]` are the
    leading left singular vectors of the whitened coordinates of all models side by side; in each model, the shared core
    is spanned by the directions whose coordinates go with g. Validate each with `validate` in its own model.

    Arguments:
        cores: a core for each model.
        coordinates: for each, its coordinates `[sample, rank]` on the same samples (`Core.coordinates`).
        rank: dimensions of the consensus.

    Raises:
        ValueError: fewer than two models, coordinates of different samples, or a rank beyond the smallest core's.
    """
    if len(cores) < 2 or len(cores) != len(coordinates):
        raise ValueError("A consensus is between at least two cores, with coordinates for each.")
    if len({len(part) for part in coordinates}) != 1:
        raise ValueError("The coordinates are of different numbers of samples. Take them all on the same samples.")
    if any(part.shape[1] != core.rank for core, part in zip(cores, coordinates, strict=True)):
        raise ValueError("Coordinates of other dimensions than their core's. Take them with Core.coordinates.")
    if not 1 <= rank <= min(core.rank for core in cores):
        raise ValueError(f"A consensus of rank {rank} does not fit into cores of rank {min(c.rank for c in cores)}.")
    centred = [part.double() - part.double().mean(0) for part in coordinates]
    whitened = torch.cat([torch.linalg.qr(part).Q for part in centred], dim=1)
    shared = torch.linalg.svd(whitened, full_matrices=False).U[:, :rank]
    result = []
    for core, part in zip(cores, centred, strict=True):
        # The part of the core's activity that goes with g, h ~ Q (z^T g): its span, in order of strength.
        inner, values, _ = torch.linalg.svd(part.T @ shared, full_matrices=False)
        basis = core.basis.double() @ inner
        source = replace(core.provenance, target=f"consensus of {len(cores)} models on {core.provenance.target}")
        result.append(Core(basis, core.mean.double(), values, core.hook_point, source))
    return result
