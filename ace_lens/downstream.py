"""Forward passes stopped at hook points, and carried on from there with edited activations.

What stands before the samples runs once, where the model has a cache that can be relied on (see `last_token`); each
edit then costs one token a sample, from the hook point on. Elsewhere one pass of the whole model gives the residual
stream, and an edit costs what lies downstream of the hook point. Where a model class offers no way to start in the
middle either, every edit costs a full pass, which the result says.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm

from ace_lens.hooks import CoreHook
from ace_lens.last_token import LastTokenPass, by_length, replayable, same_logits, tried_on_few
from ace_lens.models import HookedModel, is_pointwise_downstream, resolve_hook_point, run, unembed
from ace_lens.repeats import mlps_spared
from ace_lens.samples import Samples
from ace_lens.targets import Target, task_outputs, tokens_outside, tokens_read

Edits: TypeAlias = Callable[[Tensor, Tensor], Iterable[tuple[str, Tensor]]]
"""Takes the activations `[n, d_model]` of some samples and their indices `[n]`; gives edited activations by name."""


# Keep, remove and flip. More would be no faster, and their logits over a large vocabulary take much memory.
_EDITS_AT_ONCE = 3
# So many samples tell whether a way on from the last block gives the model's own logits.
_N_COMPARED = 64


@dataclass(frozen=True)
class PausedPass:
    """A forward pass of a batch, stopped at a hook point.

    Arguments:
        hook_point: where the pass stands.
        index: `[n]`, the indices of its samples among all samples.
        activations: `[n, d_model]`, the activation at each sample's own position.
        logits: `[n, d_vocab]`, the samples' logits if it goes on as it is.
        resume: takes other activations `[n, d_model]` in place of these to the samples' logits `[n, d_vocab]`; or
            several at once, `[k, n, d_model]`, to `[k, n, d_vocab]`.
        restarted: whether `resume` starts from the activations (else it is a full pass over the prompts).
    """

    hook_point: str
    index: Tensor
    activations: Tensor
    logits: Tensor
    resume: Callable[[Tensor], Tensor]
    restarted: bool


def paused_passes(
    model: HookedModel,
    samples: Samples,
    hook_point: str,
    *,
    tokens: Sequence[int] | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> Iterator[PausedPass]:
    """Run the model on the samples, batch by batch, and stop at the hook point.

    Samples of one sequence share a row only where they cannot reach each other from the hook point on. Arguments and
    errors are those of `paused_at_each`.
    """
    for paused in paused_at_each(model, samples, [hook_point], tokens=tokens, batch_size=batch_size, progress=progress):
        yield from paused


def paused_at_each(
    model: HookedModel,
    samples: Samples,
    hook_points: Sequence[str],
    *,
    tokens: Sequence[int] | None = None,
    batch_size: int = 64,
    progress: bool = False,
) -> Iterator[list[PausedPass]]:
    """The same for several hook points, at all of which one pass of a batch stops.

    Where the model has a cache of keys and values that can be relied on, what stands before the samples runs once, and
    every edit costs one token a sample from the hook point on.

    Arguments:
        model: the model.
        samples: the samples.
        hook_points: where to stop.
        tokens: the tokens whose logits are looked at after an edit: `resume` may leave out the others, as NaN.
        batch_size: rows in a forward pass.
        progress: show a progress bar.

    Raises:
        ValueError: an unknown hook point.
    """
    hook_points = [resolve_hook_point(model, name) for name in hook_points]
    shares_rows = all(is_pointwise_downstream(model, name) for name in hook_points)
    rows = samples if shares_rows else samples.one_per_row()
    tried = None if shares_rows else tried_on_few(model, rows)
    if tried is None:
        batches = rows.batches(batch_size)
        pause: Callable[..., list[PausedPass]] = partial(_pause_rows, model, restarts={})
    else:
        order, rows = by_length(rows)
        batches = ((order[index], batch) for index, batch in rows.batches(batch_size))
        replayed: dict[str, _Replay] = dict.fromkeys(replayable(tried, hook_points), LastTokenPass.resume)
        if tokens is not None:
            some = replayable(tried, hook_points, tokens=tokens)
            replayed |= dict.fromkeys(some & replayed.keys(), partial(LastTokenPass.resume, tokens=list(tokens)))
        pause = partial(_pause_last_tokens, model, replayed=replayed)
    total = -(-len(rows.tokens) // batch_size)
    for index, batch in tqdm(batches, "Intervening", total, leave=False, disable=not progress):
        with torch.no_grad():
            paused = pause(hook_points, index, batch)
        yield paused


_Replay: TypeAlias = Callable[[LastTokenPass, str, Tensor], Tensor]


def _pause_last_tokens(
    model: HookedModel,
    hook_points: Sequence[str],
    index: Tensor,
    batch: Samples,
    *,
    replayed: Mapping[str, _Replay],
) -> list[PausedPass]:
    last, capture = LastTokenPass(model, batch), CoreHook(*hook_points)
    logits = last.run(capture.fwd_hooks())
    return [
        PausedPass(
            hook_point=name,
            index=index,
            activations=capture.activations[name][:, 0],
            logits=logits,
            resume=partial(replayed.get(name, LastTokenPass.run_with), last, name),
            restarted=True,
        )
        for name in hook_points
    ]


def _pause_rows(
    model: HookedModel, hook_points: Sequence[str], index: Tensor, batch: Samples, *, restarts: dict[str, "_Restart"]
) -> list[PausedPass]:
    """`restarts` holds the ways on that were found on the first batch."""
    capture = CoreHook(*hook_points)
    with mlps_spared(model, batch.tokens):
        logits = batch.at(run(model, batch.tokens, batch.attention_mask, capture.fwd_hooks()))
    paused = []
    for name in hook_points:
        rows = _Rows(model, name, batch, capture.activations[name], logits)
        activations = batch.at(rows.residual)
        if name not in restarts:
            restarts[name] = _cheapest_restart(rows, activations)
        paused.append(
            PausedPass(
                hook_point=name,
                index=index,
                activations=activations,
                logits=logits,
                resume=partial(_resume_rows, restarts[name], rows),
                restarted=restarts[name] is not _full_pass,
            )
        )
    return paused


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
    each = edited_at_each(model, samples, target, {hook_point: edits}, batch_size=batch_size, progress=progress)
    return each[hook_point]


@torch.no_grad()
def edited_at_each(
    model: HookedModel,
    samples: Samples,
    target: Target,
    edits: Mapping[str, Edits],
    *,
    side_effects: bool = True,
    batch_size: int = 64,
    progress: bool = False,
) -> dict[str, EditedOutputs]:
    """The same for several hook points, each with edits of its own, from one pass over the samples.

    Arguments and errors are otherwise those of `edited_outputs`; without `side_effects`, `outside_kl` stays empty, and
    where the target says what it reads (by `tokens`), other logits need not be computed.
    """
    order: list[Tensor] = []
    clean: list[Tensor] = []
    found: dict[str, dict[str, list[Tensor]]] = {name: {} for name in edits}
    outside_kl: dict[str, dict[str, list[Tensor]]] = {name: {} for name in edits}
    restarted: dict[str, bool] = {}
    tokens = None if side_effects else tokens_read(target)
    for paused in paused_at_each(model, samples, list(edits), tokens=tokens, batch_size=batch_size, progress=progress):
        logits = paused[0].logits
        order.append(paused[0].index)
        clean.append(_finite(task_outputs(target, logits), "the unedited model", len(clean)))
        outside = tokens_outside(target, logits.shape[1]) if side_effects else None
        before = _log_probabilities(logits, outside)
        for each, (name, edit) in zip(paused, edits.items(), strict=True):
            for edited, logits in _resumed(each, edit):
                outputs = _finite(task_outputs(target, logits), edited, len(clean) - 1)
                found[name].setdefault(edited, []).append(outputs)
                if len(found[name][edited]) != len(clean):
                    raise ValueError(f"Two edits are called {edited!r}. Give each a name of its own.")
                if before is not None:
                    kl = (before.exp() * (before - _log_probabilities(logits, outside))).sum(1)
                    outside_kl[name].setdefault(edited, []).append(kl)
            restarted[name] = each.restarted
    undo = torch.cat(order).argsort()

    def joined(parts: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat(batches)[undo] for name, batches in parts.items()}

    return {
        name: EditedOutputs(torch.cat(clean)[undo], joined(found[name]), joined(outside_kl[name]), restarted[name])
        for name in edits
    }


def _resumed(paused: PausedPass, edit: Edits) -> Iterator[tuple[str, Tensor]]:
    """Logits under each edit by name; a few edits go on at once."""
    edits = iter(edit(paused.activations, paused.index))
    while few := list(islice(edits, _EDITS_AT_ONCE)):
        names, activations = zip(*few, strict=True)
        yield from zip(names, paused.resume(torch.stack(activations)), strict=True)


def _finite(outputs: Tensor, name: str, batch: int) -> Tensor:
    if not outputs.isfinite().all():
        raise ValueError(
            f"The task's outputs are NaN or infinite in batch {batch} under {name}. Likely causes: overflow in "
            "float16, a row without a real token, or a target that divides by zero or reads other logits than those of "
            "its attribute tokens."
        )
    return outputs


def _log_probabilities(logits: Tensor, outside: Tensor | None) -> Any:
    """`[n, outside]`, of the tokens outside the target, given that the next one is among them; None without any."""
    return None if outside is None else logits[:, outside.to(logits.device)].float().log_softmax(1)


@dataclass(frozen=True)
class _Rows:
    """A batch of whole prompts at a hook point: residual stream `[batch, pos, d_model]`, logits `[n, d_vocab]`."""

    model: HookedModel
    hook_point: str
    batch: Samples
    residual: Tensor
    logits: Tensor

    def replaced(self, activations: Tensor) -> Tensor:
        """The residual stream with other activations at the samples' positions."""
        whole = self.residual.clone()
        whole[self.batch.sequence, self.batch.position] = activations.to(whole.dtype)
        return whole


_Restart: TypeAlias = Callable[[_Rows, Tensor], Tensor]


def _resume_rows(restart: _Restart, rows: _Rows, activations: Tensor) -> Tensor:
    """Several at once are taken one by one: whole prompts fill a batch by themselves."""
    if activations.ndim == 3:
        return torch.stack([restart(rows, each) for each in activations])
    return restart(rows, activations)


def _cheapest_restart(rows: _Rows, activations: Tensor) -> _Restart:
    """The cheapest way on from the hook point that takes a batch's activations to the model's own logits."""
    if rows.hook_point.endswith("hook_resid_pre") and rows.model.hook_dict[rows.hook_point].fwd_hooks:
        # Starting at a layer fires its hook_resid_pre again: the user's hook there would come after our edit.
        return _full_pass
    cheap, logits = _from_layer, rows.logits
    if is_pointwise_downstream(rows.model, rows.hook_point):
        # Samples do not see each other here, so a few of them tell.
        cheap, activations, logits = _from_last_block, activations[:_N_COMPARED], logits[:_N_COMPARED]
    if not logits.isfinite().all():
        return _full_pass
    try:
        again = cheap(rows, activations)
    except (NotImplementedError, AttributeError, TypeError, ValueError, RuntimeError, IndexError):
        return _full_pass
    return cheap if same_logits(again, logits) else _full_pass


def _from_last_block(rows: _Rows, activations: Tensor) -> Tensor:
    """After the last block, at the samples' positions only."""
    return unembed(rows.model, activations.unsqueeze(1))[:, 0]


def _from_layer(rows: _Rows, activations: Tensor) -> Tensor:
    """In the middle: TransformerLens's own `start_at_layer`."""
    match = re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", rows.hook_point)
    if match is None:
        raise NotImplementedError
    layer = int(match[1]) + (match[2] == "post")
    stream, mask = rows.replaced(activations), rows.batch.attention_mask
    return rows.batch.at(run(rows.model, stream, mask, start_at_layer=layer))


def _full_pass(rows: _Rows, activations: Tensor) -> Tensor:
    """The whole model again, with the edited activations put in place on the way."""
    whole = rows.replaced(activations)
    hooks = [(rows.hook_point, lambda activation, hook: whole)]
    return rows.batch.at(run(rows.model, rows.batch.tokens, rows.batch.attention_mask, hooks))
