"""Activations and exact own-position Jacobians, from a live model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from ace_lens.hooks import CoreHook
from ace_lens.last_token import LastTokenPass, tried_on_few
from ace_lens.models import (
    HookedModel,
    is_pointwise_downstream,
    require_differentiable,
    require_residual,
    resolve_hook_point,
    run,
)
from ace_lens.samples import Samples
from ace_lens.shapes import Activations, Jacobians, Outputs, typed
from ace_lens.targets import Target, describe, task_outputs


@typed
@dataclass(frozen=True, eq=False)
class Probed:
    """What the probe found at one hook point, sample by sample.

    Arguments:
        activations: `[sample, d_model]`, the residual stream at each sample's position.
        jacobians: `[sample, target, d_model]`, the derivative of each output with respect to that activation.
        outputs: `[sample, target]`, the target's outputs.
    """

    activations: Activations
    jacobians: Jacobians
    outputs: Outputs


class JacobianProbe:
    """Measures where a task's outputs come from: h and d f / d h at each sample's own position.

    For sample i at position p_i of its sequence, row (i, k) of the Jacobian is the derivative of output k at
    p_i with respect to the activation at p_i alone. Where attention follows the hook point and several
    positions of a sequence are samples, a gradient of summed outputs would add what each position does to
    later ones; the probe then gives every sample a row of its own, so that one backward pass per output is
    exact, for all hook points together. Where the model has a cache that can be relied on, the graph holds the sample's
    position alone (see `ace_lens.last_token`), so that memory does not grow with layers times length of the prompt.

    The model runs in evaluation mode and in its own dtype. Its parameters' gradients, its hooks and its
    training mode are left as they were; frozen parameters and a surrounding `no_grad` or `inference_mode` do
    no harm.

    Arguments:
        model: the model.
        target: the task output (see `ace_lens.targets`).
        hook_points: one name or several.
        batch_size: rows in a forward pass.

    Raises:
        ValueError: an unknown hook point.
        TypeError: an encoder, or a model that runs elsewhere.
    """

    def __init__(
        self,
        model: HookedModel,
        target: Target,
        hook_points: str | Sequence[str],
        *,
        batch_size: int = 64,
    ) -> None:
        require_differentiable(model)
        self.model = model
        self.target = target
        names = [hook_points] if isinstance(hook_points, str) else hook_points
        self.hook_points = list(dict.fromkeys(resolve_hook_point(model, name) for name in names))
        for name in self.hook_points:
            require_residual(name)
        self.batch_size = batch_size
        self._shares_rows = all(is_pointwise_downstream(model, name) for name in self.hook_points)

    def stream(self, samples: Samples, *, progress: bool = False) -> Iterator[dict[str, Probed]]:
        """Probe in batches, each a dictionary by hook point. Samples keep their order, unless a sequence's
        samples lie apart in `samples`: those come together.

        Raises:
            ValueError: activations or derivatives are not finite (the message says where), the target has
                another shape, or the hook points cannot influence it.
        """
        rows = samples if self._shares_rows else samples.one_per_row()
        alone = not self._shares_rows and tried_on_few(self.model, rows) is not None
        batches = rows.batches(self.batch_size)
        total = -(-len(rows.tokens) // self.batch_size)
        for number, (_, batch) in enumerate(tqdm(batches, "Probing", total, leave=False, disable=not progress)):
            probed = self._probe_batch(batch, alone=alone)
            for name, found in probed.items():
                _require_finite(found.activations, "activation", name, number)
                _require_finite(found.jacobians, f"derivative of {describe(self.target)}", name, number)
            yield probed

    def __call__(self, samples: Samples) -> dict[str, Probed]:
        """Probe all samples, in their own order; a dictionary by hook point.

        Raises:
            ValueError: as `stream`.
        """
        rows = samples if self._shares_rows else samples.one_per_row()
        order = torch.cat([index for index, _ in rows.batches(self.batch_size)]).argsort()
        batches = list(self.stream(samples))
        return {
            name: Probed(
                *(
                    torch.cat([getattr(batch[name], part) for batch in batches])[order]
                    for part in ("activations", "jacobians", "outputs")
                )
            )
            for name in self.hook_points
        }

    def _probe_batch(self, samples: Samples, *, alone: bool) -> dict[str, Probed]:
        """With `alone`, the graph holds the samples' own positions and no others."""
        capture = CoreHook(*self.hook_points, live=True)
        with torch.inference_mode(False), torch.enable_grad():
            # Clones are ordinary tensors, even of what the caller made under inference_mode.
            names = ("tokens", "attention_mask", "sequence", "position")
            samples = replace(samples, **{name: getattr(samples, name).clone() for name in names})
            if alone:
                last = LastTokenPass(self.model, samples)
                logits, samples = last.run(capture.fwd_hooks()), last.samples
            else:
                logits = samples.at(run(self.model, samples.tokens, samples.attention_mask, capture.fwd_hooks()))
            residuals = [capture.activations[name] for name in self.hook_points]
            outputs = task_outputs(self.target, logits)
            if not outputs.requires_grad:
                raise ValueError(no_influence(describe(self.target), self.hook_points))
            n_outputs = outputs.shape[1]
            columns: list[list[Tensor]] = [[] for _ in residuals]
            for k in range(n_outputs):
                gradients = torch.autograd.grad(
                    outputs[:, k].sum(), residuals, retain_graph=k < n_outputs - 1, allow_unused=True
                )
                for column, gradient, residual in zip(columns, gradients, residuals, strict=True):
                    gradient = torch.zeros_like(residual) if gradient is None else gradient
                    self._require_causal(gradient, samples)
                    column.append(samples.at(gradient))
        return {
            name: Probed(samples.at(residual.detach()), torch.stack(column, 1), outputs.detach())
            for name, residual, column in zip(self.hook_points, residuals, columns, strict=True)
        }

    def _require_causal(self, gradient: Tensor, samples: Samples) -> None:
        """Later positions must not reach an output; a row of its own for each sample makes that visible."""
        if self._shares_rows:
            return
        column = torch.arange(gradient.shape[1], device=gradient.device)
        later = column > samples.position.to(gradient.device).unsqueeze(1)
        if gradient.abs().amax(-1)[later].any():
            raise ValueError(
                "Positions after a sample change its output: the model attends in both directions, like an "
                "encoder. Extraction needs a causal language model."
            )


def no_influence(target: str, hook_points: Sequence[str]) -> str:
    """The message for a target whose Jacobian is zero."""
    return (
        f"Nothing at {', '.join(hook_points)} influences {target}: the Jacobian is zero. Likely "
        "causes: the target does not depend on the logits differentiably (argmax, detach, a constant), or the "
        "hook point lies beside the path to the logits."
    )


def _require_finite(values: Tensor, what: str, hook_point: str, batch: int) -> None:
    bad = ~values.isfinite().flatten(1).all(1)
    if bad.any():
        raise ValueError(
            f"The {what} at {hook_point} is NaN or infinite in batch {batch}, for {int(bad.sum())} of {len(bad)} "
            "samples. Likely causes: overflow in float16 (load the model in bfloat16 or float32), or a row "
            "without a real token."
        )
