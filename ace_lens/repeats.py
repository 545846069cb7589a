"""Rows that begin alike, as all pairs of two numbers do: what acts on each position by itself runs once for them all.

In a causal model a position holds the same activation in every row that begins with the same tokens. This is never
taken for granted: the inputs of an MLP have to be equal to the last bit, and its outputs for two rows the right ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ace_lens.last_token import same_logits
from ace_lens.models import HookedModel

# Below this share of distinct beginnings, what is spared exceeds what it costs to find out.
_WORTH_WHILE = 0.75


@contextmanager
def mlps_spared(model: HookedModel, tokens: Tensor) -> Iterator[None]:
    """Within, MLPs run once for each beginning of the rows `tokens` `[batch, pos]`, where no graph is kept.

    An MLP that somebody's hooks look into runs as always, and so does one that gives more than one tensor.
    """
    first, kind = beginnings(tokens)
    blocks: Any = getattr(model, "blocks", ())
    mlps = [block.mlp for block in blocks if isinstance(getattr(block, "mlp", None), torch.nn.Module)]
    spared = [mlp for mlp in mlps if not _looked_into(mlp)] if len(first) < _WORTH_WHILE * kind.numel() else []
    try:
        for mlp in spared:
            # A bridge would hand an attribute on to the module that it wraps.
            vars(mlp)["forward"] = _once_each(mlp.forward, first, kind)
        yield
    finally:
        for mlp in spared:
            vars(mlp).pop("forward", None)


def beginnings(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Which positions have read the same tokens.

    Arguments:
        tokens: `[batch, pos]`.

    Returns:
        a position for each beginning, `[n_beginnings]`, as an index into the flattened rows; and the number of each
        position's beginning, `[batch, pos]`.
    """
    (n_rows, n_positions), width = tokens.shape, int(tokens.max()) + 1
    rows, so_far = torch.arange(n_rows, device=tokens.device), torch.zeros_like(tokens[:, 0])
    first, kind, total = [], torch.empty_like(tokens), 0
    for position in range(n_positions):
        each, so_far = (so_far * width + tokens[:, position]).unique(return_inverse=True)
        row = torch.empty_like(each).scatter_(0, so_far, rows)
        first.append(row * n_positions + position)
        kind[:, position] = so_far + total
        total += len(each)
    return torch.cat(first), kind


def _looked_into(mlp: torch.nn.Module) -> bool:
    names = ("fwd_hooks", "_forward_hooks", "_forward_pre_hooks")
    # Others than we put functions in the place of a module's forward, too.
    return "forward" in vars(mlp) or any(getattr(module, name, None) for module in mlp.modules() for name in names)


def _once_each(forward: Callable[..., Any], first: Tensor, kind: Tensor) -> Callable[..., Any]:
    """The same function of activations `[batch, pos, d_model]`, for the price of the distinct ones."""

    def spared(activations: Any, *args: Any, **kwargs: Any) -> Any:
        # With a graph, derivatives of all rows would run through one of them.
        alone = not (args or kwargs or torch.is_grad_enabled())
        if alone and isinstance(activations, Tensor) and activations.shape[:2] == kind.shape:
            distinct = activations.flatten(0, 1)[first]
            if torch.equal(distinct[kind], activations):
                outputs = forward(distinct[None])
                if isinstance(outputs, Tensor) and outputs.shape[:2] == (1, len(first)):
                    outputs = outputs[0][kind]
                    if same_logits(outputs[[0, -1]], forward(activations[[0, -1]])):
                        return outputs
        return forward(activations, *args, **kwargs)

    return spared
