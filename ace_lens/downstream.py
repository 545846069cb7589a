"""What a task's outputs become when the residual stream is edited at the samples' positions.

One pass of the whole model gives the residual stream and the unedited outputs; each edit then costs only what
lies downstream of the hook point. Where a model class offers no way to start in the middle, every edit costs a
full pass instead, which the result says.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ace_lens.hooks import CoreHook
from ace_lens.models import HookedModel, evaluating, is_pointwise_downstream, resolve_hook_point, run
from ace_lens.samples import Samples
from ace_lens.targets import Target, task_outputs

Edit = Callable[[Tensor], Tensor]
"""Takes activations `[sample, d_model]` to edited ones."""


@dataclass(frozen=True)
class EditedOutputs:
    """The outputs of a task, unedited and under each edit.

    Arguments:
        clean: `[sample, target]`, without an edit.
        edited: the same under each edit, by the edit's name.
        restarted: whether edits were carried on from the cached residual stream (else by full passes).
    """

    clean: Tensor
    edited: dict[str, Tensor]
    restarted: bool


@torch.no_grad()
def edited_outputs(
    model: HookedModel,
    samples: Samples,
    target: Target,
    hook_point: str,
    edits: Mapping[str, Edit],
    *,
    batch_size: int = 64,
    progress: bool = False,
) -> EditedOutputs:
    """Run the model on the samples, once as it is and once under each edit of the activation at `hook_point`.

    Only the activation at each sample's own position is edited, and its output read there; samples of one
    sequence do not see each other's edits.

    Arguments:
        model: the model.
        samples: the samples.
        target: the task output.
        hook_point: where to edit.
        edits: functions of the activations `[sample, d_model]`, by name.
        batch_size: rows in a forward pass.
        progress: show a progress bar.

    Raises:
        ValueError: an unknown hook point, or a target of another shape.
    """
    hook_point = resolve_hook_point(model, hook_point)
    shares_rows = is_pointwise_downstream(model, hook_point)
    rows = samples if shares_rows else samples.one_per_row()
    clean: list[Tensor] = []
    edited: dict[str, list[Tensor]] = {name: [] for name in edits}
    order: list[Tensor] = []
    restart: _Restart | None = None
    total = -(-len(rows.tokens) // batch_size)
    for index, batch in tqdm(rows.batches(batch_size), "Intervening", total, disable=not progress):
        capture = CoreHook(hook_point)
        logits = batch.at(run(model, batch.tokens, batch.attention_mask, capture.fwd_hooks()))
        residual = capture.activations[hook_point]
        restart = restart or _choose_restart(model, hook_point, residual, batch, logits)
        order.append(index)
        clean.append(task_outputs(target, logits))
        own = batch.at(residual)
        for name, edit in edits.items():
            edited[name].append(task_outputs(target, restart(model, hook_point, residual, batch, edit(own))))
    undo = torch.cat(order).argsort()
    return EditedOutputs(
        clean=torch.cat(clean)[undo],
        edited={name: torch.cat(parts)[undo] for name, parts in edited.items()},
        restarted=restart is not _full_pass,
    )


_Restart = Callable[[HookedModel, str, Tensor, Samples, Tensor], Tensor]
"""Logits `[sample, d_vocab]` from the residual `[batch, pos, d_model]` with the samples' own activations
replaced."""


def _choose_restart(model: HookedModel, hook_point: str, residual: Tensor, batch: Samples, logits: Tensor) -> _Restart:
    """The cheapest way on from the hook point that reproduces the model's own logits on this batch."""
    cheap = _from_last_block if is_pointwise_downstream(model, hook_point) else _from_layer
    tolerance = torch.finfo(logits.dtype).eps ** 0.5
    try:
        again = cheap(model, hook_point, residual, batch, batch.at(residual))
    except (NotImplementedError, AttributeError, TypeError, ValueError):
        return _full_pass
    same = again.shape == logits.shape and torch.allclose(
        again, logits, rtol=tolerance, atol=tolerance * float(logits.abs().max())
    )
    return cheap if same else _full_pass


def _from_last_block(model: HookedModel, hook_point: str, residual: Tensor, batch: Samples, own: Tensor) -> Tensor:
    """After the last block: final norm, unembedding and soft cap, at the samples' positions only."""
    parts: Any = model
    cfg = parts.cfg
    with evaluating(model):
        stream = own.unsqueeze(1)
        if cfg.normalization_type is not None:
            stream = parts.ln_final(stream)
        logits = parts.unembed(stream)[:, 0]
    cap = getattr(cfg, "output_logits_soft_cap", None) or 0.0
    return cap * torch.tanh(logits / cap) if cap > 0 else logits


def _from_layer(model: HookedModel, hook_point: str, residual: Tensor, batch: Samples, own: Tensor) -> Tensor:
    """In the middle: TransformerLens's own `start_at_layer`."""
    match = re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", hook_point)
    if match is None:
        raise NotImplementedError
    layer = int(match[1]) + (match[2] == "post")
    masks = {} if bool(batch.attention_mask.all()) else {"attention_mask": batch.attention_mask}
    with evaluating(model):
        return batch.at(model(_replaced(residual, batch, own), start_at_layer=layer, **masks))


def _full_pass(model: HookedModel, hook_point: str, residual: Tensor, batch: Samples, own: Tensor) -> Tensor:
    """The whole model again, with the edited activations put in place on the way."""
    whole = _replaced(residual, batch, own)
    hooks = [(hook_point, lambda activation, hook: whole)]
    return batch.at(run(model, batch.tokens, batch.attention_mask, hooks))


def _replaced(residual: Tensor, batch: Samples, own: Tensor) -> Tensor:
    whole = residual.clone()
    whole[batch.sequence, batch.position] = own.to(whole.dtype)
    return whole
