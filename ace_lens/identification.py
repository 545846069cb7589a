"""Reading the algorithm inside a core: the linear operator that moves its coordinates from step to step."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Complex, Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ace_lens.shapes import typed


@typed
@dataclass(frozen=True)
class LinearOperator:
    """z_{t+1} = A z_t + b, fitted by least squares.

    Arguments:
        matrix: `[rank, rank]`, A, acting on columns.
        offset: `[rank]`, b.
        eigenvalues: `[rank]`, of A, by descending modulus.
        r2: R^2 of the next step on held-out sequences, in coordinates that are white there: the mean over the
            core's dimensions of 1 - residual variance / variance. Whitened, it does not depend on the basis,
            nor on how strongly a model happens to write each dimension.
    """

    matrix: Float[Tensor, "rank rank"]
    offset: Float[Tensor, "rank"]
    eigenvalues: Complex[Tensor, "rank"]
    r2: float


@typed
def fit_operator(
    trajectories: Float[Tensor, "sequence time rank"],
    held_out: Float[Tensor, "held_out_sequence held_out_time rank"],
) -> LinearOperator:
    """Fit one step of linear dynamics to core coordinates, never across the join of two sequences.

    Arguments:
        trajectories: `[sequence, time, rank]`, core coordinates to fit on.
        held_out: the same for other sequences; `r2` is taken on these.

    Raises:
        ValueError: sequences of one step, or fewer transitions than unknowns.
    """
    rank = trajectories.shape[2]
    before, after = (part.double().flatten(0, 1) for part in (trajectories[:, :-1], trajectories[:, 1:]))
    if len(before) <= rank:
        raise ValueError(
            f"{len(before)} transitions cannot determine an operator on {rank} dimensions. Give more or longer "
            "sequences."
        )
    solution = torch.linalg.lstsq(_affine(before), after).solution
    matrix, offset = solution[:rank].T.contiguous(), solution[rank]
    before, after = (part.double().flatten(0, 1) for part in (held_out[:, :-1], held_out[:, 1:]))
    residual = after - (before @ matrix.T + offset)
    values = torch.linalg.eigvals(matrix)
    return LinearOperator(
        matrix=matrix,
        offset=offset,
        eigenvalues=values[values.abs().argsort(descending=True)],
        r2=_whitened_r2(residual, after),
    )


def _affine(states: Tensor) -> Tensor:
    return torch.cat([states, torch.ones(len(states), 1, dtype=states.dtype)], dim=1)


def _whitened_r2(residual: Tensor, observed: Tensor) -> float:
    """1 - tr(Cov(observed)^-1 Cov(residual)) / rank, the residual about zero."""
    deviation = observed - observed.mean(0)
    share = torch.linalg.solve(deviation.T @ deviation, residual.T @ residual)
    return 1 - float(share.trace()) / len(share)


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
def oracle_r2(transition: Float[Tensor, "state state"]) -> float:
    """R^2 of the next one-hot state given the current one: the most that any one-step prediction explains.

    1 - mean_j E[Var(x_j | state)] / Var(x_j), with the current state drawn from the chain's stationary
    distribution. For a chain whose core holds every function of the state, it is also the ceiling of
    `LinearOperator.r2`.

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
