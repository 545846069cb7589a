"""What reads outputs off the last residual stream: a final norm or none, and then one affine map.

Outputs are f(h) = W n(h) + b, where n(h) is the activation itself or its normalised form: n(h) = x / s with
s^2 = |x|^2 / d_model + eps, and x = h for RMSNorm or h less its mean over d_model for LayerNorm. The derivative is then
W (P - n n^T / d_model) / s, with P the projection that takes the mean off (the identity for RMSNorm). Where a model is
seen to be of this form, no edit has to run through it, and the Jacobians of all samples enter in closed form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ace_lens.core import Core
from ace_lens.downstream import PausedPass
from ace_lens.models import HookedModel, is_pointwise_downstream
from ace_lens.targets import Target, task_outputs
from ace_lens.threads import threads_for

Norm = Literal["none", "layer", "rms"]

# A target over a large vocabulary is differentiated in parts.
_OUTPUTS_AT_ONCE = 256
# An activation so near to zero that what a norm adds to its mean square shows.
_NEAR = 2.0**-8


@dataclass(frozen=True, eq=False)
class Readout:
    """Outputs as an affine function of the activation, or of its normalised form.

    Arguments:
        weight: W, `[target, d_model]`.
        bias: b, `[target]`.
        norm: none, LayerNorm or RMSNorm.
        eps: what the norm adds to the mean square.
    """

    weight: Tensor
    bias: Tensor
    norm: Norm
    eps: float

    def outputs(self, activations: Tensor) -> Tensor:
        """Outputs `[n, target]` at activations `[n, d_model]`."""
        normalised, _ = _normalised(activations.to(self.weight), self.norm, self.eps)
        return normalised @ self.weight.T + self.bias

    def jacobians(self, activations: Tensor) -> Tensor:
        """The derivatives `[n, target, d_model]` at activations `[n, d_model]`."""
        if self.norm == "none":
            return self.weight.expand(len(activations), -1, -1)
        normalised, scale = _normalised(activations.to(self.weight), self.norm, self.eps)
        along = (normalised @ self.weight.T)[:, :, None] * normalised[:, None, :] / normalised.shape[1]
        return (self.weight - along) / scale[:, :, None]

    def jacobian_factor(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        """The Jacobians at activations `[n, d_model]`, summed up: for `CoreExtractor.update_factored`.

        J^T J is the sum over samples of (P - n n^T / d_model) W^T W (P - n n^T / d_model) / s^2. So with a norm the
        factor comes from a square, in which singular values below the square root of d_model times 2e-16 of the largest
        are lost: about 2e-7, the rounding of float32, for d_model = 128.

        Returns:
            rows R `[row, d_model]` with R^T R = J^T J, and the mean Jacobian `[target, d_model]`, in float64.
        """
        weight, n = self.weight.double(), len(activations)
        if self.norm == "none":
            return n**0.5 * weight, weight
        normalised, scale = _normalised(activations.to(weight), self.norm, self.eps)
        seen, d_model = normalised @ weight.T, weight.shape[1]
        over, gram = normalised / scale.square(), weight.T @ weight
        once = over.T @ normalised @ gram / d_model
        twice = (over * seen.square().sum(1, keepdim=True)).T @ normalised / d_model**2
        squared = scale.pow(-2).sum() * gram - once - once.T + twice
        values, vectors = torch.linalg.eigh(squared)
        kept = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
        factor = values[kept].sqrt()[:, None] * vectors[:, kept].T
        return factor, scale.reciprocal().mean() * weight - (seen / scale).T @ normalised / (n * d_model)

    def right_by_rank(self, core: Core, activations: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Which samples have their label's output as the largest under "keep" and "remove", by rank.

        Arguments:
            core: a core at the hook point.
            activations: `[n, d_model]`.
            labels: `[n]`, each the number of an output.

        Returns:
            for each of the two, `[rank, n]` true or false, for the ranks from 1 on.
        """
        mean, basis = (part.to(self.weight.device) for part in (core.mean, core.basis))
        whole, label = activations.to(mean), labels.to(self.weight.device).long()
        coordinates = basis.T @ (whole - mean).T
        keep, remove = self._scales(whole, mean, basis, coordinates)
        coordinates, basis = coordinates.to(self.weight), basis.to(self.weight)
        start = torch.cat([mean.expand_as(whole), whole])
        steps, scales = torch.cat([coordinates, -coordinates], 1), torch.cat([keep, remove], 1)
        keep, remove = self._largest(start, basis, steps, scales, label.repeat(2)).cpu().chunk(2, 1)
        return {"keep": keep, "remove": remove}

    def _largest(self, start: Tensor, basis: Tensor, steps: Tensor, scales: Tensor, label: Tensor) -> Tensor:
        """Whether the label's output is the largest at `start + steps_1 basis_1 + ... + steps_r basis_r`, `[rank, n]`.

        Outputs times s are followed, W x + b s: s is positive, so the largest stays the largest, and a rank more adds
        one outer product to either term.
        """
        writes = (self.weight @ basis).T
        ways = torch.stack([writes, self.bias.expand_as(writes)], 2)
        changes = torch.stack([steps, scales.diff(dim=0, prepend=torch.zeros_like(scales[:1]))], 1)
        # Classes first, which makes the largest of them several times faster to find.
        outputs = self.weight @ start.to(self.weight).T
        own, most = torch.empty_like(steps), torch.empty_like(steps)
        with threads_for(outputs.numel()):
            for way, change, its_own, the_most in zip(ways, changes, own[:, None], most, strict=True):
                outputs.addmm_(way, change)
                torch.amax(outputs, 0, out=the_most)
                torch.gather(outputs, 0, label[None], out=its_own)
        return (own == most) & ~self._always_second()[label]

    def _always_second(self) -> Tensor:
        """Which outputs equal an earlier one whatever the activation, so that they are never the first largest."""
        rows = torch.cat([self.weight, self.bias[:, None]], 1)
        _, kinds = rows.unique(dim=0, return_inverse=True)
        number = torch.arange(len(rows), device=rows.device)
        return number > torch.full_like(number, len(rows)).scatter_reduce_(0, kinds, number, "amin")[kinds]

    def _scales(self, whole: Tensor, mean: Tensor, basis: Tensor, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """s with nothing but the core and s without it, `[rank, n]` each.

        d_model s^2 is |h|^2, for LayerNorm less (1 . h)^2 / d_model, and eps. The basis is orthonormal, so that what a
        rank adds to |h|^2 where it is kept, it takes from it where it is removed; and so with 1 . h.
        """
        if self.norm == "none":
            ones = torch.ones_like(coordinates).to(self.weight)
            return ones, ones
        d_model = len(mean)
        kept = (coordinates + 2 * (mean @ basis)[:, None]).mul_(coordinates).cumsum_(0)
        keep, remove = mean.square().sum() + kept, whole.square().sum(1) - kept
        if self.norm == "layer":
            kept = (coordinates * basis.sum(0)[:, None]).cumsum_(0)
            for squares, sums in ((keep, mean.sum() + kept), (remove, whole.sum(1) - kept)):
                squares.addcmul_(sums, sums, value=-1 / d_model)
        keep, remove = (each.clamp_(min=0).to(self.weight).div_(d_model) for each in (keep, remove))
        return keep.add_(self.eps).sqrt_(), remove.add_(self.eps).sqrt_()


def find_readout(model: HookedModel, passes: Sequence[PausedPass], target: Target) -> Readout | None:
    """The readout behind the hook point of some passes, where it has the form that this module is about; else None.

    Nothing is taken from the model's configuration. The readout is recovered from outputs and derivatives at made-up
    activations, and then held against the derivatives at two samples and the outputs of all.
    """
    paused = passes[0]
    if not (paused.restarted and is_pointwise_downstream(model, paused.hook_point)):
        return None
    samples = [(each.activations.detach(), task_outputs(target, each.logits)) for each in passes]
    activations, outputs = samples[0]
    pole = torch.ones_like(activations[:1])
    pole[:, 1::2] = -1
    two = activations[[0, -1]]
    slopes = _differentiated(paused, target, torch.cat([pole, two]), outputs.shape[1])
    if slopes is None:
        return None
    with torch.no_grad():
        at = task_outputs(target, paused.resume(torch.cat([pole, -pole, _NEAR * pole])))
    norms: tuple[Norm, ...] = ("none", "layer", "rms")
    for norm in norms:
        readout = _recovered(norm, pole.to(at), at, slopes[0])
        if _close(readout.jacobians(two), slopes[1:]) and all(
            _close(readout.outputs(activations), outputs) for activations, outputs in samples
        ):
            return readout
    return None


def _recovered(norm: Norm, pole: Tensor, at: Tensor, slope: Tensor) -> Readout:
    """The readout, if it has this norm, from a pole `[1, d_model]`.

    Arguments:
        norm: its norm.
        pole: an activation.
        at: the outputs `[3, target]` there, at the opposite pole, and between them at `_NEAR` of the pole.
        slope: the derivative `[target, d_model]` at the pole.
    """
    bias, odd = (at[0] + at[1]) / 2, (at[0] - at[1]) / 2
    if norm == "none":
        return Readout(slope, bias, norm, 0.0)
    # With m the mean square of x at the pole, so much of |W n|^2 is left near zero: (m + eps) / (m + eps / _NEAR^2).
    left = float((at[2] - bias).square().sum() / odd.square().sum().clamp(min=1e-30))
    mean_square = float(_centred(pole, norm).square().mean())
    eps = max(0.0, mean_square * _NEAR**2 * (1 - left) / max(left - _NEAR**2, 1e-30))
    normalised, scale = _normalised(pole, norm, eps)
    # The derivative misses what lies along n itself, which the outputs tell.
    return Readout(_centred(scale * slope + odd[:, None] * normalised / pole.shape[1], norm), bias, norm, eps)


def _differentiated(paused: PausedPass, target: Target, activations: Tensor, n_outputs: int) -> Tensor | None:
    """The derivatives of the outputs `[n, target, d_model]` at a few activations; None if they have none."""
    slopes: list[Tensor] = []
    with torch.inference_mode(False), torch.enable_grad():
        for part in torch.arange(n_outputs).split(_OUTPUTS_AT_ONCE):
            # Rows do not see each other here: output k of copy k gives row k of the Jacobian in one backward pass.
            copies = activations.clone().repeat_interleave(len(part), dim=0).requires_grad_(True)
            outputs = task_outputs(target, paused.resume(copies)).unflatten(0, (len(activations), len(part)))
            if not outputs.requires_grad:
                return None
            (slope,) = torch.autograd.grad(outputs[:, :, part].diagonal(dim1=1, dim2=2).sum(), copies)
            slopes.append(slope.unflatten(0, (len(activations), len(part))).to(outputs))
    return torch.cat(slopes, 1)


def _centred(activations: Tensor, norm: Norm) -> Tensor:
    """x: the activations, less their mean over d_model where the norm takes it off."""
    return activations - activations.mean(1, keepdim=True) if norm == "layer" else activations


def _normalised(activations: Tensor, norm: Norm, eps: float) -> tuple[Tensor, Tensor]:
    """n(h) `[n, d_model]` and s `[n, 1]`, which is 1 without a norm."""
    x = _centred(activations, norm)
    if norm == "none":
        return x, torch.ones_like(x[:, :1])
    scale = (x.square().mean(1, keepdim=True) + eps).sqrt()
    return x / scale, scale


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether `[n, target, ...]` agree to half the digits of the dtype, each output in proportion to its largest."""
    eps = torch.finfo(expected.dtype).eps
    others = [dim for dim in range(expected.ndim) if dim != 1]
    sizes, errors = (part.abs().amax(others) for part in (expected, found - expected))
    # What is zero for all samples is still rounded as its neighbours are.
    return bool((errors <= eps**0.5 * sizes + 100 * eps * sizes.max()).all())
