"""The last token of each prompt by itself, against cached keys and values of what stands before it.

In a causal model nothing that happens at a sample's own position reaches the positions before it. Those run once,
without a graph, and leave their keys and values in the cache of a Hugging Face model. After that one token a prompt
gives the activations of every layer, derivatives with respect to them come from a graph of that token alone, and an
edited activation only has to pass the blocks behind it.

A cache is never trusted: `tried_on_few` and `replayable` hold it against full passes before anything relies on
it.
"""

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ace_lens.hooks import CoreHook
from ace_lens.models import FwdHooks, HookedModel, evaluating, run, unembed
from ace_lens.samples import Samples
from ace_lens.shapes import SampleIndex

_N_TRIED = 4

# What a model raises that is not made for a cache, or for being started in the middle.
_MISFITS = (NotImplementedError, AttributeError, TypeError, ValueError, RuntimeError, LookupError)


class LastTokenPass:
    """A batch that has run up to, and not including, its samples.

    Hooks of the user's own fire: once over what stands before the samples, and then whenever the last tokens pass, with
    one position a row.

    Arguments:
        model: a bridge around a Hugging Face model.
        batch: samples in rows of their own; what follows a sample in its row is left out.
    """

    def __init__(self, model: HookedModel, batch: Samples) -> None:
        self.model: Any = model
        self._tokens, self._mask = _left_padded(batch)
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._widened: dict[int, LastTokenPass] = {}
        cache = None
        if self.n_before:
            options = {"use_cache": True, "return_type": "logits_and_cache", **_last_logits_only(model)}
            with torch.no_grad():
                _, cache = run(model, self._tokens[:, :-1], self._mask[:, :-1], **options)
        self._hold(cache)

    @property
    def samples(self) -> Samples:
        """The samples as they stand in what `run` shows to hooks: sequences of one token."""
        return Samples.from_tokens(self._tokens[:, -1:])

    @property
    def n_before(self) -> int:
        """Positions before the last token, padding included."""
        return self._tokens.shape[1] - 1

    @property
    def n_cached(self) -> int:
        """Positions that the cache holds."""
        return 0 if self._cache is None else int(self._cache.get_seq_length())

    def run(self, fwd_hooks: FwdHooks = ()) -> Tensor:
        """Logits `[n, d_vocab]` of the last tokens, with the given hooks; these see `[n, 1, d_model]`."""
        # Left to itself, a model would begin a cache that nobody puts back.
        cached: dict[str, Any] = {"use_cache": False}
        if self._cache is not None:
            cached = {"use_cache": True, "past_key_values": self._cache}
        with self._cache_kept(), self._calls_recorded():
            return run(self.model, self._tokens[:, -1:], self._mask, fwd_hooks, **cached)[:, -1]

    def run_with(self, hook_point: str, activations: Tensor) -> Tensor:
        """Logits of the last tokens, if these are their activations at a hook point.

        Arguments:
            hook_point: the hook point.
            activations: `[n, d_model]`, to logits `[n, d_vocab]`; or several at once, `[k, n, d_model]`, to
                `[k, n, d_vocab]`.
        """
        if activations.ndim == 3:
            return self._at_once(LastTokenPass.run_with, hook_point, activations)

        def put(activation: Tensor, hook: Any) -> Tensor:
            return activations.to(activation.dtype).unsqueeze(1)

        return self.run([(hook_point, put)])

    def resume(self, hook_point: str, activations: Tensor, *, tokens: Sequence[int] | None = None) -> Tensor:
        """The same, through nothing but the blocks behind the hook point; `run` has to come first.

        Each block is called as it was called then, so that its hooks fire. `replayable` says for which hook points this
        is right. With `tokens`, all other logits are NaN; see `unembed`.
        """
        if activations.ndim == 3:
            return self._at_once(partial(LastTokenPass.resume, tokens=tokens), hook_point, activations)
        first = _first_block_behind(self.model, hook_point)
        stream = activations.unsqueeze(1)
        with evaluating(self.model), self._cache_kept():
            for block, (args, kwargs) in list(zip(self.model.blocks, self._calls, strict=True))[first:]:
                output = block(stream, *args, **kwargs)
                stream = output[0] if isinstance(output, tuple) else output
            return unembed(self.model, stream, tokens)[:, 0]

    def _at_once(
        self, way: "Callable[[LastTokenPass, str, Tensor], Tensor]", hook_point: str, several: Tensor
    ) -> Tensor:
        """Several edits as one wide batch: the weights of the model are read once for all of them."""
        k, n = several.shape[:2]
        if k not in self._widened:
            self._widened[k] = self if k == 1 else self._repeated(k)
        logits = way(self._widened[k], hook_point, several.transpose(0, 1).flatten(0, 1))
        return logits.unflatten(0, (n, k)).transpose(0, 1)

    def _repeated(self, k: int) -> "LastTokenPass":
        """The same pass with each row `k` times in sequence."""
        wide = copy.copy(self)
        wide._tokens, wide._mask = (part.repeat_interleave(k, 0) for part in (self._tokens, self._mask))
        cache = copy.copy(self._cache)
        if cache is not None:
            cache.layers = [copy.copy(layer) for layer in cache.layers]
            cache.batch_repeat_interleave(k)
        wide._hold(cache)
        with torch.no_grad():
            wide.run()
        return wide

    def _hold(self, cache: Any) -> None:
        """Keep a cache, and the state that it is in."""
        self._cache = cache
        self._layers: list[Any] = [] if cache is None else list(cache.layers)
        self._states = [dict(vars(layer)) for layer in self._layers]

    @contextmanager
    def _cache_kept(self) -> Iterator[None]:
        """Whatever is cached inside is forgotten afterwards.

        Layers that grow bind new tensors and leave the old ones as they are, so putting back their attributes is
        enough; `replayable` notices any that write in place.
        """
        try:
            yield
        finally:
            for layer, state in zip(self._layers, self._states, strict=True):
                vars(layer).clear()
                vars(layer).update(state)

    @contextmanager
    def _calls_recorded(self) -> Iterator[None]:
        """Keep what each block is called with, but for the residual stream."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def record(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append((args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}))

        handles = [block.register_forward_pre_hook(record, with_kwargs=True) for block in self.model.blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._calls = calls


def by_length(samples: Samples) -> tuple[SampleIndex, Samples]:
    """The samples in rows of their own, those with much before them last, and their indices in `samples`.

    Batches of rows of like length hold little padding.
    """
    length = samples.attention_mask.cumsum(1)[samples.sequence, samples.position]
    order = length.argsort(stable=True)
    return order, samples[order].one_per_row()


def tried_on_few(model: HookedModel, samples: Samples) -> LastTokenPass | None:
    """A pass over a few of the samples, if it gives the logits that full passes over the prompts give; else None.

    For a model that keeps no cache there is none, in silence; one whose cache does not do what it should is worth a
    warning.
    """
    if not getattr(getattr(model, "original_model", None), "can_generate", lambda: False)():
        return None
    order, rows = by_length(samples)
    chosen = torch.linspace(0, len(order) - 1, min(_N_TRIED, len(order))).round().long()
    (_, few), *_ = rows[chosen].batches(_N_TRIED)
    with torch.no_grad():
        expected = few.at(run(model, few.tokens, few.attention_mask))
        if not expected.isfinite().all():
            # That is for the full passes to report.
            return None
        try:
            last = LastTokenPass(model, few)
            found = last.run()
        except _MISFITS as error:
            problem = f"running them raised {type(error).__name__} ({error})"
        else:
            if same_logits(found, expected) and last.n_cached == last.n_before:
                return last
            problem = (
                f"the key-value cache holds {last.n_cached} of {last.n_before} positions, and logits are off by up to "
                f"{float((found - expected).abs().max()):.2g}"
            )
    warnings.warn(
        f"Prompts run in full where their last tokens would be enough, because {problem}. Results are right, but take "
        "longer. Likely causes: transformers 5.24 or later, whose caches TransformerLens up to 4.3 leaves empty (pip "
        "install 'transformers<5.24'), or a hook of your own that counts on seeing whole prompts.",
        stacklevel=3,
    )
    return None


def replayable(last: LastTokenPass, hook_points: Sequence[str], *, tokens: Sequence[int] | None = None) -> set[str]:
    """The hook points from which `LastTokenPass.resume` gives the model's own logits, all of them or those of tokens.

    Tried from the first of them on, two edits at once: that covers the blocks behind all the others.
    """
    hooks = last.model.hook_dict.items()
    if tokens is not None and any(hook.fwd_hooks for name, hook in hooks if name.startswith("unembed.")):
        return set()
    starts = {name: start for name in hook_points if (start := _first_block_behind(last.model, name)) is not None}
    if not starts:
        return set()
    first = min(starts, key=lambda name: starts[name])
    capture = CoreHook(first)
    with torch.no_grad():
        logits = last.run(capture.fwd_hooks())
        activations = capture.activations[first][:, 0]
        try:
            again = last.resume(first, activations.expand(2, *activations.shape), tokens=tokens)
        except _MISFITS:
            return set()
        if tokens is not None:
            again, logits = again[..., tokens], logits[..., tokens]
        return set(starts) if same_logits(again, logits.expand_as(again)) else set()


def _first_block_behind(model: HookedModel, hook_point: str) -> int | None:
    """The first block that an edit at a hook point passes; None where no block can be started with it."""
    match = re.fullmatch(r"blocks\.(\d+)\.hook_resid_(pre|post)", hook_point)
    if match is None:
        return None
    if match[2] == "pre" and model.hook_dict[hook_point].fwd_hooks:
        # A block fires its own hook_resid_pre: the user's hook there would come after our edit.
        return None
    return int(match[1]) + (match[2] == "post")


def _left_padded(batch: Samples) -> tuple[Tensor, Tensor]:
    """Tokens and mask `[n, pos]` of each sample and the real tokens before it, padded on the left."""
    ends = zip(batch.sequence.tolist(), batch.position.tolist(), strict=True)
    rows = [batch.tokens[row, : end + 1][batch.attention_mask[row, : end + 1] != 0] for row, end in ends]
    pad = torch.nn.utils.rnn.pad_sequence
    masks = [torch.ones_like(row) for row in rows]
    return pad(rows, True, padding_side="left"), pad(masks, True, padding_side="left")


def _last_logits_only(model: Any) -> dict[str, int]:
    """The option that spares a Hugging Face model the unembedding of every position, where it has it."""
    takes = inspect.signature(model.original_model.forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in takes else {}


def same_logits(found: Tensor, expected: Tensor) -> bool:
    """Whether logits are equal up to rounding in their dtype."""
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    atol = tolerance * float(expected.abs().max())
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=tolerance, atol=atol)
