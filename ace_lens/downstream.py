"""Forward passes stopped at a hook point, and carried on from there with edited activations.

One pass of the whole model gives the residual stream and the unedited outputs; each edit then costs only what lies
downstream of the hook point. Where a model class offers no way to start in the middle, every edit costs a full pass
instead, which the result says.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm

from ace_lens.hooks import CoreHook
from ace_lens.models import HookedModel, evaluating, is_pointwise_downstream, resolve_hook_point, run
from ace_lens.samples import Samples
from ace_lens.targets import Target, task_outputs, tokens_outside

Edits: TypeAlias = Callable[[Tensor, Tensor], Iterable[tuple[str, Tensor]]]
"""Takes the activations `[n, d_model]` of some samples and their indices `[n]`; gives edited activations by name."""

_Restart: TypeAlias = Callable[["PausedPass", Tensor], Tensor]


@dataclass(frozen=True)
class PausedPass:
    """A forward pass of a batch, stopped at a hook point.

    Arguments:
        model: the model.
        hook_point: where the pass stands.
        batch: the samples in it.
        index: `[n]`, their indices among all samples.
        residual: `[batch, pos, d_model]`, the residual stream there.
        logits: `[n, d_vocab]`, the samples' logits if it goes on as it is.
        restart: how it goes on.
    """

    model: HookedModel
    hook_point: str
    batch: Samples
    index: Tensor
    residual: Tensor
    logits: Tensor
    restart: _Restart

    @property
    def activations(self) -> Tensor:
        """`[n, d_model]`, the activation at each sample's own position."""
        return self.batch.at(self.residual)

    def resume(self, activations: Tensor) -> Tensor:
        """Logits `[n, d_vocab]` if the samples' own activations are replaced by `[n, d_model]` other ones."""
        return self.restart(self, activations)


def paused_passes(
    model: HookedModel, samples: Samples, hook_point: str, *, batch_size: int = 64, progress: bool = False
) -> Iterator[PausedPass]:
    """Run the model on the samples, batch by batch, and stop at the hook point.

    Samples of one sequence share a row only where they cannot reach each other from the hook point on.

    Raises:
        ValueError: an unknown hook point.
    """
    hook_point = resolve_hook_point(model, hook_point)
    rows = samples if is_pointwise_downstream(model, hook_point) else samples.one_per_row()
    restart: _Restart | None = None
    total = -(-len(rows.tokens) // batch_size)
    for index, batch in tqdm(rows.batches(batch_size), "Intervening", total, leave=False, disable=not progress):
        with torch.no_grad():
            capture = CoreHook(hook_point)
            logits = batch.at(run(model, batch.tokens, batch.attention_mask, capture.fwd_hooks()))
            residual = capture.activations[hook_point]
            paused = PausedPass(model, hook_point, batch, index, residual, logits, _full_pass)
            restart = restart or _cheapest_restart(paused)
        yield replace(paused, restart=restart)


@dataclass(frozen=True)
class EditedOutputs:
    """The outputs of a task, unedited and under each edit.

    Arguments:
        clean: `[sample, target]`, without an edit.
        edited: the same under each edit, by the edit's name.
        outside_kl: `[sample]` for each edit, KL(unedited || edited) in nats of the next token's distribution over the
            tokens that the target does not read; empty unless there are at least two.
        restarted: whether edits were carried on from the cached residual stream (else by full passes).
    """

    clean: Tensor
    edited: dict[str, Tensor]
    outside_kl: dict[str, Tensor] = field(default_factory=dict)
    restarted: bool = True


@torch.no_grad()
def edited_outputs(
    model: HookedModel,
    samples: Samples,
    target: Target,
    hook_point: str,
    edits: Edits,
    *,
    batch_size: int = 64,
    progress: bool = False,
) -> EditedOutputs:
    """Run the model on the samples, once as it is and once under each edit of the activation at `hook_point`.

    Only the activation at each sample's own position is edited, and its output read there; samples of one sequence do
    not see each other's edits.

    Arguments:
        model: the model.
        samples: the samples.
        target: the task output.
        hook_point: where to edit.
        edits: from activations `[n, d_model]` and the samples' indices `[n]` to edited activations by name, such as
            `lambda activations, index: [("halved", activations / 2)]`.
        batch_size: rows in a forward pass.
        progress: show a progress bar.

    Raises:
        ValueError: an unknown hook point, a target of another shape, outputs that are not finite, or two edits of one
            name.
    """
    order: list[Tensor] = []
    clean: list[Tensor] = []
    edited: dict[str, list[Tensor]] = {}
    outside_kl: dict[str, list[Tensor]] = {}
    restarted = True
    for paused in paused_passes(model, samples, hook_point, batch_size=batch_size, progress=progress):
        restarted = paused.restart is not _full_pass
        order.append(paused.index)
        clean.append(_finite(task_outputs(target, paused.logits), "the unedited model", len(clean)))
        outside = tokens_outside(target, paused.logits.shape[1])
        before = _log_probabilities(paused.logits, outside)
        for name, activations in edits(paused.activations, paused.index):
            logits = paused.resume(activations)
            edited.setdefault(name, []).append(_finite(task_outputs(target, logits), name, len(clean) - 1))
            if len(edited[name]) != len(clean):
                raise ValueError(f"Two edits are called {name!r}. Give each a name of its own.")
            if before is not None:
                kl = (before.exp() * (before - _log_probabilities(logits, outside))).sum(1)
                outside_kl.setdefault(name, []).append(kl)
    undo = torch.cat(order).argsort()
    return EditedOutputs(
        clean=torch.cat(clean)[undo],
        edited={name: torch.cat(parts)[undo] for name, parts in edited.items()},
        outside_kl={name: torch.cat(parts)[undo] for name, parts in outside_kl.items()},
        restarted=restarted,
    )


def constant_jacobian(paused: PausedPass, target: Target) -> Tensor | None:
    """The derivative of the outputs with respect to the activation, `[target, d_model]`, where it is the same for all.

    It is where nothing but linear maps follows the hook point, as in toy models without a final norm. That is not taken
    from the model's configuration but seen: the derivatives at two samples are equal, and every sample's outputs follow
    from the first's. None where it is not so.
    """
    if paused.restart is not _from_last_block:
        return None
    with torch.inference_mode(False), torch.enable_grad():
        activations = paused.activations.clone()
        outputs = task_outputs(target, paused.logits.clone())
        n_outputs = outputs.shape[1]
        # Rows do not see each other here, so output k of copy k gives row k of the Jacobian in one backward pass.
        copies = activations[[0, -1]].repeat_interleave(n_outputs, dim=0).requires_grad_(True)
        again = task_outputs(target, paused.resume(copies)).unflatten(0, (2, n_outputs))
        if not again.requires_grad:
            return None
        (gradient,) = torch.autograd.grad(again.diagonal(dim1=1, dim2=2).sum(), copies)
        first, last = gradient.unflatten(0, (2, n_outputs))
    predicted = outputs[0] + (activations - activations[0]).to(first) @ first.T
    tolerance = torch.finfo(activations.dtype).eps ** 0.5
    same = all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))
        for a, b in ((last, first), (predicted, outputs))
    )
    return first.detach() if same else None


def _finite(outputs: Tensor, name: str, batch: int) -> Tensor:
    if not outputs.isfinite().all():
        raise ValueError(
            f"The task's outputs are NaN or infinite in batch {batch} under {name}. Likely causes: overflow in "
            "float16, a row without a real token, or a target that divides by zero."
        )
    return outputs


def _log_probabilities(logits: Tensor, outside: Tensor | None) -> Any:
    """`[n, outside]`, of the tokens outside the target, given that the next one is among them; None without any."""
    return None if outside is None else logits[:, outside.to(logits.device)].float().log_softmax(1)


def _cheapest_restart(paused: PausedPass) -> _Restart:
    """The cheapest way on from the hook point that reproduces the model's own logits on this batch."""
    if paused.hook_point.endswith("hook_resid_pre") and paused.model.hook_dict[paused.hook_point].fwd_hooks:
        # Starting at a layer fires its hook_resid_pre again: the user's hook there would come after our edit.
        return _full_pass
    if not paused.logits.isfinite().all():
        return _full_pass
    pointwise = is_pointwise_downstream(paused.model, paused.hook_point)
    cheap = _from_last_block if pointwise else _from_layer
    tolerance = torch.finfo(paused.logits.dtype).eps ** 0.5
    try:
        again = cheap(paused, paused.activations)
    except (NotImplementedError, AttributeError, TypeError, ValueError, RuntimeError, IndexError):
        return _full_pass
    same = again.shape == paused.logits.shape and torch.allclose(
        again, paused.logits, rtol=tolerance, atol=tolerance * float(paused.logits.abs().max())
    )
    return cheap if same else _full_pass


def _from_last_block(paused: PausedPass, activations: Tensor) -> Tensor:
    """After the last block: final norm, unembedding and soft cap, at the samples' positions only.

    None of them depends on the training mode.
    """
    model: Any = paused.model
    stream = activations.unsqueeze(1)
    if model.cfg.normalization_type is not None:
        stream = model.ln_final(stream)
    logits = model.unembed(stream)[:, 0]
    cap = getattr(model.cfg, "output_logits_soft_cap", None) or 0.0
    return cap * torch.tanh(logits / cap) if cap > 0 else logits


def _from_layer(paused: PausedPass, activations: Tensor) -> Tensor:
    """In the middle: TransformerLens's own `start_at_layer`."""
    match = re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", paused.hook_point)
    if match is None:
        raise NotImplementedError
    layer = int(match[1]) + (match[2] == "post")
    mask = paused.batch.attention_mask
    masks = {} if bool(mask.all()) else {"attention_mask": mask}
    with evaluating(paused.model):
        return paused.batch.at(paused.model(_replaced(paused, activations), start_at_layer=layer, **masks))


def _full_pass(paused: PausedPass, activations: Tensor) -> Tensor:
    """The whole model again, with the edited activations put in place on the way."""
    whole = _replaced(paused, activations)
    hooks = [(paused.hook_point, lambda activation, hook: whole)]
    return paused.batch.at(run(paused.model, paused.batch.tokens, paused.batch.attention_mask, hooks))


def _replaced(paused: PausedPass, activations: Tensor) -> Tensor:
    whole = paused.residual.clone()
    whole[paused.batch.sequence, paused.batch.position] = activations.to(whole.dtype)
    return whole
