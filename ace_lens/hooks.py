"""The hook functions: capture the residual stream, project it onto or off a core, flip a core's sign, set coordinates.

Each is a callable `(activation, hook)` that goes wherever TransformerLens takes a hook function. `fwd_hooks()`
gives the `[(name, function)]` list for `model.hooks` and `model.run_with_hooks`; `attach(model)` does the same
with more care: it checks that the core fits the model, and makes a hook that never fired an error.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ace_lens.core import Core
from ace_lens.models import HookedModel, HookFunction, attached, canonical_hook_point
from ace_lens.positions import Positions, PositionSelector
from ace_lens.shapes import Residual, typed


class CoreHook:
    """Captures the residual stream where it passes.

    After a pass, `hook.activations[name]` holds what passed the hook point of that TransformerLens name:
    `[batch, pos, d_model]` for all positions, `[n, d_model]` for chosen ones, row by row. A later pass replaces
    it.

    Arguments:
        hook_points: names for `fwd_hooks()`; not needed when the hook is put on by hand.
        positions: which positions to keep (see `Positions`).
        attention_mask: `[batch, pos]`, needed for `"last"` where rows are padded on the right.
        live: keep the activations in the autograd graph, so that derivatives with respect to them can be
            taken. Where no graph reaches the hook point (parameters are frozen), one is begun there.
    """

    def __init__(
        self,
        *hook_points: str,
        positions: Positions = "all",
        attention_mask: Tensor | None = None,
        live: bool = False,
    ) -> None:
        self.hook_points = list(dict.fromkeys(canonical_hook_point(name) for name in hook_points))
        self.live = live
        self._everywhere = isinstance(positions, str) and positions == "all"
        self._positions: Positions = positions
        self._attention_mask = attention_mask
        self._selectors: dict[str, PositionSelector] = {}
        self._captured: dict[str, Tensor] = {}

    @typed
    def __call__(self, activation: Residual, hook: Any) -> Tensor | None:
        """Keep the activation; hand on the same values."""
        name = canonical_hook_point(hook.name)
        replaced = None
        if self.live and not activation.requires_grad:
            activation = replaced = activation.detach().requires_grad_(True)
        kept = activation if self.live else activation.detach()
        if not self._everywhere:
            selector = self._selectors.setdefault(name, PositionSelector(self._positions, self._attention_mask))
            kept = kept[selector.mask(activation)]
        self._captured[name] = kept
        return replaced

    @property
    def activations(self) -> dict[str, Tensor]:
        """What passed last, by hook point.

        Raises:
            RuntimeError: nothing has passed yet.
        """
        if missing := [name for name in self.hook_points if name not in self._captured] or (
            [] if self._captured else ["any hook point"]
        ):
            raise RuntimeError(
                f"No activation has passed {', '.join(missing)}. Run the model while the hook is attached, and "
                "check the names against model.hook_dict."
            )
        return self._captured

    def fwd_hooks(self) -> list[tuple[str, HookFunction]]:
        """The list that `model.hooks(fwd_hooks=...)` takes."""
        return [(name, self) for name in self.hook_points]


class CoreIntervention(ABC):
    """An edit of the residual stream inside a core: h -> h + (what `edit` makes of the core's part of h).

    The edit is computed in float32 or wider and returned in the activation's own dtype, device and shape, as a
    new tensor. One intervention serves one model at a time: it follows the positions of a generation, and takes a pass
    of one position for the next step of the last prompt, until `fwd_hooks()` or `attach()` is called again.

    Every position includes the first, where many language models have an activation of enormous norm (an attention
    sink), of which a core found at other positions says nothing. Where that matters, choose the positions.
    """

    def __init__(
        self,
        core: Core,
        *,
        positions: Positions = "all",
        attention_mask: Tensor | None = None,
        centred: bool = True,
    ) -> None:
        self.core = core
        self.centred = centred
        self._selector = PositionSelector(positions, attention_mask)
        self._moved: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def edit(self, deviation: Tensor, projection: Tensor) -> Tensor:
        """What to add to h, given h - mu and its projection P (h - mu), both `[..., d_model]`."""

    @typed
    def __call__(
        self, activation: Float[Tensor, "batch pos width"], hook: Any = None
    ) -> Float[Tensor, "batch pos width"]:
        """The edited activation.

        Raises:
            ValueError: the core lives at another hook point or has another width, or positions do not fit.
        """
        self.core.check_activation(activation, getattr(hook, "name", None))
        chosen = self._selector.mask(activation)
        return torch.where(chosen.unsqueeze(-1), self.apply(activation), activation)

    @typed
    def apply(self, activations: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The edit by itself, of every activation given."""
        wide = activations.to(torch.promote_types(activations.dtype, torch.float32))
        basis, mean = self._core_on(wide)
        deviation = wide - mean
        return (wide + self.edit(deviation, deviation @ basis @ basis.T)).to(activations.dtype)

    def _core_on(self, activation: Tensor) -> tuple[Tensor, Tensor]:
        key = (activation.device, activation.dtype)
        if key not in self._moved:
            # Tensors made under inference_mode (HookedTransformer.generate) could not enter a graph later.
            with torch.inference_mode(False):
                mean = self.core.mean if self.centred else torch.zeros_like(self.core.mean)
                self._moved[key] = (self.core.basis.to(*key), mean.to(*key))
        return self._moved[key]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.core!r})"

    def fwd_hooks(self) -> list[tuple[str, HookFunction]]:
        """The list that `model.hooks(fwd_hooks=...)` and `model.run_with_hooks(fwd_hooks=...)` take.

        Asking for it also forgets the prompt that was under way.
        """
        self._selector.reset()
        return [(self.core.hook_point, self)]

    def attach(self, model: HookedModel) -> AbstractContextManager[None]:
        """Intervene for the length of a `with` block.

        Raises:
            ValueError: the core does not fit the model (see `Core.check_model`).
            RuntimeError: at the end of the block, if nothing passed the hook point.
        """
        self.core.check_model(model)
        return attached(model, self.fwd_hooks())


class ProjectionAblator(CoreIntervention):
    """Keeps nothing but the core, or removes the core, with P = Q Q^T about the mean mu.

    keep:   h -> mu + P (h - mu), which asks whether the core is sufficient;
    remove: h -> h - P (h - mu), which asks whether it is necessary.

    Arguments:
        core: the core.
        mode: `"keep"` or `"remove"`.
        positions: where to intervene (see `Positions`); everywhere by default.
        attention_mask: `[batch, pos]`, needed for `"last"` where rows are padded on the right.
        centred: act about the core's mean; if not, about zero, as in the paper's toy experiments.
    """

    def __init__(
        self,
        core: Core,
        mode: Literal["keep", "remove"],
        *,
        positions: Positions = "all",
        attention_mask: Tensor | None = None,
        centred: bool = True,
    ) -> None:
        if mode not in ("keep", "remove"):
            raise ValueError(f'The mode of a ProjectionAblator is "keep" or "remove", not {mode!r}.')
        super().__init__(core, positions=positions, attention_mask=attention_mask, centred=centred)
        self.mode = mode

    def edit(self, deviation: Tensor, projection: Tensor) -> Tensor:
        """Take off what lies in the core (remove), or what lies outside it (keep)."""
        return -projection if self.mode == "remove" else projection - deviation


class SignFlipSteerer(CoreIntervention):
    """Mirrors the core's coordinates: h -> h - 2 s P (h - mu).

    Arguments:
        core: the core.
        strength: s. 1 is the exact flip, an involution that keeps |h - mu|; 0 does nothing, 1/2 removes. Or `[batch]`,
            one for each row of a pass, such as `smallest_flips` gives; a row with NaN is left as it is.
        positions: where to intervene (see `Positions`); everywhere by default.
        attention_mask: `[batch, pos]`, needed for `"last"` where rows are padded on the right.
        centred: act about the core's mean; if not, about zero.

    Raises:
        ValueError: strengths of another shape; when a pass comes, another number of them than it has rows.
    """

    def __init__(
        self,
        core: Core,
        strength: float | Tensor = 1.0,
        *,
        positions: Positions = "all",
        attention_mask: Tensor | None = None,
        centred: bool = True,
    ) -> None:
        super().__init__(core, positions=positions, attention_mask=attention_mask, centred=centred)
        if isinstance(strength, Tensor) and strength.ndim > 1:
            raise ValueError(
                f"Strengths are one number, or one for each row [batch]; not a tensor of shape {tuple(strength.shape)}."
            )
        self.strength = strength

    def edit(self, deviation: Tensor, projection: Tensor) -> Tensor:
        """Take off the projection 2 s times."""
        if not isinstance(self.strength, Tensor) or self.strength.ndim == 0:
            return -2 * self.strength * projection
        strength = self.strength.masked_fill(self.strength.isnan(), 0)
        return -2 * _by_row(strength.unsqueeze(1), "strengths", projection) * projection


class CoordinateSetter(CoreIntervention):
    """Sets the core's coordinates, whatever they are: h -> h - P (h - mu) + Q z.

    Unlike flips, setters at several layers do not undo each other: each leaves its own z behind.

    Arguments:
        core: the core.
        coordinates: z, `[batch, rank]`, in the core's own units about its mean: one for each row of a pass.
        positions: where to intervene (see `Positions`); everywhere by default.
        attention_mask: `[batch, pos]`, needed for `"last"` where rows are padded on the right.

    Raises:
        ValueError: coordinates of another shape; when a pass comes, of another number than it has rows.
    """

    def __init__(
        self,
        core: Core,
        coordinates: Tensor,
        *,
        positions: Positions = "all",
        attention_mask: Tensor | None = None,
    ) -> None:
        super().__init__(core, positions=positions, attention_mask=attention_mask)
        if coordinates.ndim != 2 or coordinates.shape[1] != core.rank:
            raise ValueError(
                f"Coordinates of a core of rank {core.rank} are [batch, {core.rank}], one row for each row of a pass; "
                f"not {list(coordinates.shape)}. core.coordinates(activations) gives them."
            )
        self.coordinates = coordinates

    def edit(self, deviation: Tensor, projection: Tensor) -> Tensor:
        """Take off the projection, and put in the point with the given coordinates."""
        basis, _ = self._core_on(projection)
        return _by_row(self.coordinates.to(basis) @ basis.T, "rows of coordinates", projection) - projection


def _by_row(values: Tensor, what: str, like: Tensor) -> Tensor:
    """Values `[batch, k]`, to be used with every position of activations `[batch, ..., d_model]`."""
    if like.ndim < 2 or len(values) != len(like):
        raise ValueError(
            f"There are {len(values)} {what} for a pass of shape {list(like.shape)}. Give one for each row of the "
            "batch, in its order."
        )
    return values.to(like).reshape(len(values), *(1 for _ in like.shape[1:-1]), values.shape[1])
