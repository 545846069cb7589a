"""Reading the algorithm inside a core: the linear operator that moves its coordinates from step to step."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ace_lens.shapes import typed


@typed
@dataclass(frozen=True, eq=False)
class LinearOperator:
    """z_{t+1} = A z_t + b, fitted by least squares.

    Arguments:
        matrix: `[rank, rank]`, A, acting on columns.
        offset: `[rank]`, b; zero for a fit about the mean.
        eigenvalues: `[rank]`, of A on the subspace it was fitted in, by descending modulus; fewer than the rank if that
            subspace was cut.
        r2: R^2 of the next step, on steps that were held out, in coordinates that are white there: the mean over the
            dimensions of that subspace of 1 - residual variance / variance. Whitened, it does not depend on the basis,
            nor on how strongly a model happens to write each dimension. Below zero, the fit is worse than the mean.
    """

    matrix: Float[Tensor, "rank rank"]
    offset: Float[Tensor, "rank"]
    eigenvalues: Complex[Tensor, "n_eigenvalues"]
    r2: float

    def unit_circle_share(self, period: int) -> float:
        """The share of eigenvalues within sin(pi / period) of the unit circle.

        That is half the distance between neighbouring p-th roots of unity.
        """
        return float(((self.eigenvalues.abs() - 1).abs() <= math.sin(math.pi / period)).double().mean())

    def modes(self, period: int) -> list[int]:
        """The frequencies present: angles rounded to multiples of 2 pi / period, folded to 0 .. period // 2."""
        turns = (self.eigenvalues.angle() * period / (2 * math.pi)).round().long() % period
        return sorted({min(turn, period - turn) for turn in turns.tolist()})


@typed
def fit_operator(
    trajectories: Float[Tensor, "sequence time rank"],
    held_out: Float[Tensor, "held_out_sequence held_out_time rank"],
    *,
    affine: bool = True,
    ridge: float = 0.0,
    cut: float = 0.0,
) -> LinearOperator:
    """Fit one step of linear dynamics to core coordinates, never across the join of two sequences.

    Arguments:
        trajectories: `[sequence, time, rank]`, core coordinates to fit on.
        held_out: the same for other sequences; `r2` is taken on these.
        affine: fit an offset; if not, the coordinates are taken as they are, about the core's mean.
        ridge: penalty on the entries of A, as a share of the coordinates' mean variance.
        cut: fit only in the directions whose singular value reaches this share of the largest.

    Raises:
        ValueError: sequences of one step, or fewer transitions than unknowns.
    """
    before, after = _transitions(trajectories)
    if len(before) < before.shape[1] + affine:
        raise ValueError(
            f"{len(before)} transitions cannot determine an operator on {before.shape[1]} dimensions. Give more or "
            "longer sequences."
        )
    matrix, offset, frame = _least_squares(before, after, affine=affine, ridge=ridge, cut=cut)
    before, after = _transitions(held_out)
    residual = after - (before @ matrix.T + offset)
    return LinearOperator(matrix, offset, _spectrum(matrix, frame), whitened_r2(residual @ frame, after @ frame))


@typed
def fit_cycle(
    coordinates: Float[Tensor, "sample rank"], classes: Int[Tensor, "sample"], period: int, *, cut: float = 1e-3
) -> LinearOperator:
    """Fit the step from each class of a cyclic task to the next, to the class means of core coordinates.

    z_c is the mean coordinate of answer class c about the mean of all classes; A z_c ~ z_{c+1 mod p} by least squares,
    in the directions whose singular value reaches `cut` of the largest, at most p - 1 of them.

    `r2` is by leaving one out: each step is predicted by the operator that the other steps determine. The fit's own
    R^2 would be about k / (p - 1) for means that have nothing to do with one another, in k dimensions; and in p - 1
    dimensions any p points are stepped through exactly, with every eigenvalue on the unit circle, which says nothing.
    There `r2` is NaN.

    Arguments:
        coordinates: `[sample, rank]`.
        classes: `[sample]`, 0 to period - 1.
        period: p, the number of classes.
        cut: see above.

    Raises:
        ValueError: a class without samples, or classes out of range.
    """
    counts = torch.bincount(classes, minlength=period)
    if len(counts) > period or bool((counts == 0).any()):
        raise ValueError(
            f"Every class from 0 to {period - 1} needs samples, and no other may have any; missing: "
            f"{(counts[:period] == 0).nonzero()[:, 0].tolist()[:5]}, highest class: {len(counts) - 1}."
        )
    means = torch.zeros(period, coordinates.shape[1], dtype=torch.float64)
    means.index_add_(0, classes, coordinates.double())
    means = means / counts[:, None]
    means = means - means.mean(0)
    following = means.roll(-1, 0)
    matrix, offset, frame = _least_squares(means, following, affine=False, ridge=0.0, cut=cut, at_most=period - 1)
    residual = (following - means @ matrix.T) @ frame
    # How far each step pulls the fit to itself; 1 / p of it through the mean.
    leverage = torch.linalg.qr(means @ frame).Q.square().sum(1, keepdim=True) + 1 / period
    alone = bool((leverage > 1 - 1e-9).any())
    r2 = math.nan if alone else whitened_r2(residual / (1 - leverage), following @ frame)
    return LinearOperator(matrix, offset, _spectrum(matrix, frame), r2)


@typed
def fourier_power(vectors: Float[Tensor, "period d_model"]) -> Float[Tensor, "n_frequencies"]:
    """The share of each frequency, 0 to period // 2, in what varies from one class of a cyclic task to the next.

    The squared modulus of the discrete Fourier transform along the cycle, summed over d_model and over both signs of a
    frequency, as a share of all of it; the mean over classes is taken off, so that frequency 0 has none. On the token
    embedding this is the progress measure of earlier work on grokking (Nanda et al. 2023).

    Arguments:
        vectors: `[period, d_model]`, one for each class, in the order of the cycle.
    """
    period = len(vectors)
    centred = vectors.double() - vectors.double().mean(0)
    power = torch.fft.rfft(centred, dim=0).abs().square().sum(1)
    # Every frequency but 0 and period / 2 stands for itself and its negative.
    power[1 : (period + 1) // 2] *= 2
    return power / power.sum()


@typed
def bootstrap_eigenvalues(
    trajectories: Float[Tensor, "sequence time rank"],
    *,
    n_resamples: int,
    generator: torch.Generator,
    affine: bool = True,
) -> Complex[Tensor, "resample n_eigenvalues"]:
    """Eigenvalues refitted on resampled sequences, in the order of those fitted on all of them.

    Whole sequences are drawn, with replacement; each refit is matched to the fit on all sequences.

    Arguments:
        trajectories: `[sequence, time, rank]`.
        n_resamples: how many refits.
        generator: draws the sequences.
        affine: as for `fit_operator`.

    Raises:
        ValueError: fewer than ten sequences.
    """
    if len(trajectories) < 10:
        raise ValueError(
            f"{len(trajectories)} sequences say too little of how much eigenvalues vary between sequences. Give at "
            "least ten, cut from longer ones if need be."
        )

    def spectrum(states: Tensor) -> Tensor:
        matrix, _, frame = _least_squares(*_transitions(states), affine=affine, ridge=0.0, cut=0.0)
        return _spectrum(matrix, frame)

    reference = spectrum(trajectories)
    found = torch.empty(n_resamples, len(reference), dtype=torch.complex128)
    for row in range(n_resamples):
        drawn = torch.randint(len(trajectories), (len(trajectories),), generator=generator)
        found[row] = match_eigenvalues(spectrum(trajectories[drawn]), reference)[0]
    return found


@typed
def eigenvalue_intervals(
    trajectories: Float[Tensor, "sequence time rank"],
    *,
    n_resamples: int = 200,
    generator: torch.Generator,
    affine: bool = True,
) -> tuple[Complex[Tensor, "n_eigenvalues"], Complex[Tensor, "n_eigenvalues"]]:
    """95% bootstrap intervals of the eigenvalues, as lower and upper corners in the complex plane.

    The intervals are reflected about the estimate (the basic bootstrap), real and imaginary parts apart. They are in
    the order of `fit_operator(...).eigenvalues`; arguments are those of `bootstrap_eigenvalues`.
    """
    found = bootstrap_eigenvalues(trajectories, n_resamples=n_resamples, generator=generator, affine=affine)
    matrix, _, frame = _least_squares(*_transitions(trajectories), affine=affine, ridge=0.0, cut=0.0)
    estimate = _spectrum(matrix, frame)
    share = torch.tensor([0.975, 0.025], dtype=torch.float64)
    real, imaginary = (
        2 * centre - part.quantile(share, dim=0)
        for centre, part in ((estimate.real, found.real), (estimate.imag, found.imag))
    )
    return torch.complex(real[0], imaginary[0]), torch.complex(real[1], imaginary[1])


@typed
def match_eigenvalues(
    found: Complex[Tensor, "n_found"], reference: Complex[Tensor, "n_reference"]
) -> tuple[Complex[Tensor, "n_reference"], Float[Tensor, "n_reference"]]:
    """The found eigenvalues in the order of a reference spectrum, matched so that the distances sum to least.

    Returns:
        the matched eigenvalues, and the distance of each to its reference.

    Raises:
        ValueError: fewer were found than are to be matched.
    """
    if len(found) < len(reference):
        raise ValueError(f"{len(found)} eigenvalues cannot be matched to {len(reference)}.")
    distances = (reference[:, None] - found[None, :]).abs()
    _, columns = linear_sum_assignment(distances.numpy())
    chosen = torch.as_tensor(columns)
    return found[chosen], distances[torch.arange(len(reference)), chosen].double()


@typed
def spectrum_p_value(
    trajectories: Float[Tensor, "sequence time rank"],
    reference: Complex[Tensor, "n_reference"],
    *,
    n_permutations: int = 200,
    generator: torch.Generator,
) -> float:
    """How often states in shuffled order come as close to a reference spectrum as in their own.

    The statistic is the mean distance of the matched eigenvalues. Under the null, which state follows which is
    permuted over all transitions, so that nothing moves by a rule. A small value says that the states follow a rule
    whose spectrum is nearer to the reference than none would be; that the spectrum *is* the reference is for
    `match_eigenvalues` and `eigenvalue_intervals` to show. With the usual correction, the smallest p-value is
    1 / (n_permutations + 1).

    Arguments:
        trajectories: `[sequence, time, rank]`.
        reference: the spectrum, of at most `rank` eigenvalues.
        n_permutations: draws from the null.
        generator: draws the permutations.
    """
    before, after = _transitions(trajectories)

    def distance(after: Tensor) -> float:
        matrix, _, frame = _least_squares(before, after, affine=True, ridge=0.0, cut=0.0)
        return float(match_eigenvalues(_spectrum(matrix, frame), reference)[1].mean())

    observed = distance(after)
    null = [distance(after[torch.randperm(len(after), generator=generator)]) for _ in range(n_permutations)]
    return (1 + sum(value <= observed for value in null)) / (n_permutations + 1)


@typed
def oracle_r2(transition: Float[Tensor, "state state"]) -> float:
    """R^2 of the next one-hot state given the current one: the most that the current state alone explains.

    1 - mean_j E[Var(x_j | state)] / Var(x_j), with the current state drawn from the chain's stationary distribution.
    For a core that holds every function of the current state and nothing else, it is also the value of
    `LinearOperator.r2`. A core that remembers earlier states too can pass it, because what it remembers persists.

    Arguments:
        transition: `[state, state]`, row i the distribution of the state after i.
    """
    values, vectors = np.linalg.eig(transition.T.double().numpy())
    stationary = np.real(vectors[:, np.argmin(np.abs(values - 1))])
    stationary = torch.as_tensor(stationary / stationary.sum())
    rows = transition.double()
    next_state = stationary @ rows
    unexplained = stationary @ (rows * (1 - rows))
    return 1 - float((unexplained / (next_state * (1 - next_state))).mean())


def _transitions(trajectories: Tensor) -> tuple[Tensor, Tensor]:
    """States `[transition, rank]` before and after each step inside a sequence."""
    states = trajectories.double().cpu()
    return states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1)


def _least_squares(
    before: Tensor, after: Tensor, *, affine: bool, ridge: float, cut: float, at_most: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A, b, and the frame `[rank, k]` of directions that A was fitted in: A = frame A' frame^T."""
    shift_before = before.mean(0) if affine else torch.zeros_like(before[0])
    shift_after = after.mean(0) if affine else torch.zeros_like(after[0])
    states, following = before - shift_before, after - shift_after
    _, sizes, directions = torch.linalg.svd(states, full_matrices=False)
    # Directions without any variation say nothing of the operator.
    kept = sizes > sizes.max() * max(cut, len(states) * torch.finfo(torch.float64).eps)
    frame = directions[kept].T[:, :at_most]
    states, following = states @ frame, following @ frame
    if ridge:
        weight = (ridge * float(states.square().sum()) / states.shape[1]) ** 0.5
        states = torch.cat([states, weight * torch.eye(states.shape[1], dtype=states.dtype)])
        following = torch.cat([following, torch.zeros_like(states[-states.shape[1] :])])
    inner = torch.linalg.lstsq(states, following).solution.T
    matrix = frame @ inner @ frame.T
    return matrix, shift_after - matrix @ shift_before, frame


def _spectrum(matrix: Tensor, frame: Tensor) -> Tensor:
    """Eigenvalues inside the frame, by descending modulus."""
    values = torch.linalg.eigvals(frame.T @ matrix @ frame)
    return values[values.abs().argsort(descending=True, stable=True)]


def whitened_r2(residual: Tensor, observed: Tensor) -> float:
    """R^2 in white coordinates, 1 - tr(Cov(observed)^-1 E[residual residual^T]) / rank, for `[n, rank]` each.

    The mean over dimensions of the share of variance explained; no change of basis alters it.
    """
    deviation = observed - observed.mean(0)
    _, factor = torch.linalg.qr(deviation)
    if len(deviation) <= deviation.shape[1] or bool(factor.diagonal().abs().min() <= 1e-12 * factor.abs().max()):
        raise ValueError(
            f"{len(deviation)} held-out states do not vary in all {deviation.shape[1]} dimensions, so R^2 has no "
            "meaning in some of them. Give more, or fewer dimensions (cut=...)."
        )
    white = torch.linalg.solve_triangular(factor, residual, upper=True, left=False)
    return 1 - float(white.square().sum()) / deviation.shape[1]
