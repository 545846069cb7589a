"""How alike independently trained models are: in weights, in where their cores lie, and in what these carry."""

import torch
from jaxtyping import Float
from torch import Tensor

from ace_lens.core import Core
from ace_lens.shapes import typed


@typed
def weight_cosine(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Cosine of two models' weights, flattened into one vector each.

    Weights that every model starts from alike, such as normalisation gains of one, force it above zero. Leave
    them out to see what is left.

    Arguments:
        first: parameters by name, as `dict(model.named_parameters())`.
        second: parameters of the other model, of the same names and shapes.

    Raises:
        ValueError: the names differ.
    """
    if first.keys() != second.keys():
        raise ValueError("The two models have different parameters, so their weights have no cosine.")
    vectors = [
        torch.cat([parameters[name].detach().double().flatten() for name in sorted(first)])
        for parameters in (first, second)
    ]
    return float(torch.nn.functional.cosine_similarity(*vectors, dim=0))


def overlap(first: Core, second: Core) -> float:
    """Projector overlap ||Qa^T Qb||_F^2 / sqrt(ra rb): 1 for the same subspace, 0 for orthogonal ones.

    Two random subspaces of ranks ra and rb in d dimensions overlap by sqrt(ra rb) / d on average.
    """
    inner = first.basis.double().T @ second.basis.double()
    return float(inner.square().sum() / (first.rank * second.rank) ** 0.5)


@typed
def canonical_correlations(
    first: Float[Tensor, "sample rank_a"],
    second: Float[Tensor, "sample rank_b"],
    held_out_first: Float[Tensor, "held_out rank_a"],
    held_out_second: Float[Tensor, "held_out rank_b"],
) -> Float[Tensor, "n_pairs"]:
    """Canonical correlations of two cores' coordinates on the same inputs, largest first.

    The pairs of directions are fitted on the first two arguments; the correlations are those of the held-out
    coordinates along them, which chance does not inflate.

    Arguments:
        first: `[sample, rank_a]`, coordinates in one core.
        second: `[sample, rank_b]`, coordinates in the other, on the same samples.
        held_out_first: the same, on other samples.
        held_out_second: the same, on those other samples.

    Raises:
        ValueError: too few samples to fit that many dimensions.
    """
    n_samples, needed = len(first), 5 * (first.shape[1] + second.shape[1])
    if n_samples < needed:
        raise ValueError(
            f"{n_samples} samples are too few for canonical correlations of {first.shape[1]} with "
            f"{second.shape[1]} dimensions: they would be near 1 by chance. Give at least {needed}."
        )
    means = first.double().mean(0), second.double().mean(0)
    (q_a, r_a), (q_b, r_b) = (
        torch.linalg.qr(part.double() - mean) for part, mean in zip((first, second), means, strict=True)
    )
    left, _, right = torch.linalg.svd(q_a.T @ q_b, full_matrices=False)
    a = (held_out_first.double() - means[0]) @ torch.linalg.solve_triangular(r_a, left, upper=True)
    b = (held_out_second.double() - means[1]) @ torch.linalg.solve_triangular(r_b, right.T, upper=True)
    a, b = a - a.mean(0), b - b.mean(0)
    return (a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0))
