"""Steering text by a core: flips that are plain, only as strong as they need be, or spread over a band of layers.

A `Steer` says how to intervene on given samples. Its hooks go into `model.hooks(fwd_hooks=steer(samples))` as any
others do, and `generate_steered` asks it anew at every token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ace_lens.core import Core, check_cores
from ace_lens.downstream import PausedPass, paused_passes
from ace_lens.hooks import CoordinateSetter, CoreHook, SignFlipSteerer
from ace_lens.models import FwdHooks, HookedModel, run
from ace_lens.samples import Samples
from ace_lens.targets import Target, describe, task_outputs, tokens_read

Steer: TypeAlias = Callable[[Samples], FwdHooks]
"""Takes samples to the hooks that steer a pass over them, whose rows are those of the samples."""

# Each round splits the bracket that holds the change of sign into so many parts.
_N_PARTS = 16
_N_ROUNDS = 3
# The logits of more than a few strengths over a large vocabulary take much memory.
_STRENGTHS_AT_ONCE = 4
_ROWS_AT_ONCE = 64


@torch.no_grad()
def smallest_flips(
    model: HookedModel,
    core: Core,
    samples: Samples,
    target: Target,
    *,
    beyond: float = 0.0,
    largest: float = 4.0,
    batch_size: int = 64,
) -> Float[Tensor, "sample"]:
    """The smallest strength of a flip that brings each sample's output to the other side; NaN where none does.

    Strengths are those of `SignFlipSteerer`, h -> h - 2 s P (h - mu), at the sample's own position. They are looked for
    at 16 even steps up to the largest, and within the first step that ends on the other side again, to 1/4096 of the
    largest. What is given lies on the other side; an excursion there and back within one of the 16 steps goes unseen.
    Where the model can be restarted at the core's hook point, the prompts run once and each strength costs one token,
    from there on; see `paused_passes`.

    Arguments:
        model: the model.
        core: the core to flip.
        samples: the samples.
        target: a task output of one component, such as a `LogitMargin`.
        beyond: how far on the other side the output has to come, as a share of its own size: 0 for a change of sign, 1
            for an output turned round whole.
        largest: the largest strength to try.
        batch_size: rows in a forward pass.

    Raises:
        ValueError: the core does not fit the model, a target of more outputs than one, outputs that are not finite, a
            largest strength that is not above 0, or a share below 0.
    """
    core.check_model(model)
    if not largest > 0:
        raise ValueError(f"Strengths are tried from 0 up to the largest, which {largest} does not lie above.")
    if not beyond >= 0:
        raise ValueError(f"An output comes a share of at least 0 of its size to the other side, not {beyond}.")
    found = torch.full((len(samples),), torch.nan)
    for paused in paused_passes(model, samples, core.hook_point, tokens=tokens_read(target), batch_size=batch_size):
        found[paused.index] = _smallest_flips(paused, core, target, beyond, largest)
    return found


def _smallest_flips(paused: PausedPass, core: Core, target: Target, beyond: float, largest: float) -> Tensor:
    before = _only_output(target, paused.logits)

    def across(strengths: Tensor) -> Tensor:
        """Whether strengths `[k, n]` bring the outputs far enough to the other side."""
        flipped = [SignFlipSteerer(core, each).apply(paused.activations) for each in strengths]
        outputs = [_only_output(target, logits) for logits in paused.resume(torch.stack(flipped))]
        return (torch.stack(outputs) * before.sign() < -beyond * before.abs()).cpu()

    steps = torch.arange(1, _N_PARTS + 1).unsqueeze(1)
    high, width = torch.full((len(before),), largest), largest
    found_any = torch.zeros(len(before), dtype=torch.bool)
    for _ in range(_N_ROUNDS):
        low, width = high - width, width / _N_PARTS
        ends = low + width * steps
        crossed = torch.cat([across(few) for few in ends.split(_STRENGTHS_AT_ONCE)])
        found_any |= crossed.any(0)
        # The end of a bracket has been seen to be across; rounding may say otherwise the second time.
        crossed[-1] = True
        high = low + width * (1 + crossed.int().argmax(0))
    return torch.where(found_any, high, torch.nan)


def _only_output(target: Target, logits: Tensor) -> Tensor:
    """The target's single output, `[n]`."""
    outputs = task_outputs(target, logits)
    if outputs.shape[1] != 1:
        raise ValueError(
            f"A flip is sought that turns the sign of one output, but {describe(target)} has {outputs.shape[1]}. "
            "Give a target of one output a sample, such as a LogitMargin."
        )
    if not outputs.isfinite().all():
        raise ValueError(
            "The target's outputs are NaN or infinite, so they have no sign to turn. Likely causes: overflow in "
            "float16 (load the model in bfloat16 or float32), or a target that reads other logits than those of its "
            "attribute tokens."
        )
    return outputs[:, 0]


def plain_flip(core: Core, strength: float = 1.0) -> Steer:
    """Flip a core at each sample's own position.

    Arguments:
        core: the core.
        strength: as for `SignFlipSteerer`.
    """
    return lambda samples: SignFlipSteerer(core, strength, **_where(samples)).fwd_hooks()


def adaptive_flip(
    model: HookedModel, core: Core, target: Target, *, beyond: float = 0.0, largest: float = 4.0
) -> Steer:
    """Flip a core with the smallest strength that brings each sample's output to the other side.

    Samples that no strength brings there, as far as `beyond` says, are left as they are. Arguments and errors
    are those of `smallest_flips`.
    """

    def steer(samples: Samples) -> FwdHooks:
        strengths = smallest_flips(model, core, samples, target, beyond=beyond, largest=largest)
        return SignFlipSteerer(core, strengths, **_where(samples)).fwd_hooks()

    return steer


def band_flip(model: HookedModel, cores: Mapping[str, Core], strength: float = 1.0) -> Steer:
    """Flip cores at several layers at once, so that the flips do not cancel.

    A flip at one layer would mirror what the flip before it has left, and so undo it. Here one pass without
    intervention gives each layer's own coordinates z, and each is set to (1 - 2 s) z, which is -z for strength 1.

    Arguments:
        model: the model.
        cores: a core for each hook point, such as `extract_cores` gives.
        strength: s.

    Raises:
        ValueError: no cores, a core that stands under another hook point than its own, or one that does not fit the
            model.
    """
    check_cores(model, cores)

    @torch.no_grad()
    def steer(samples: Samples) -> FwdHooks:
        where = _where(samples)
        clean: dict[str, list[Tensor]] = {name: [] for name in cores}
        for _, batch in samples.batches(_ROWS_AT_ONCE):
            capture = CoreHook(*cores)
            run(model, batch.tokens, batch.attention_mask, capture.fwd_hooks())
            for name, core in cores.items():
                clean[name].append(core.coordinates(batch.at(capture.activations[name])))
        return [
            hook
            for name, core in cores.items()
            for hook in CoordinateSetter(core, (1 - 2 * strength) * torch.cat(clean[name]), **where).fwd_hooks()
        ]

    return steer


def _where(samples: Samples) -> dict[str, Any]:
    """The samples' own positions, for hooks: in passes over whole rows, and over the last token of each alone."""
    if samples.sequence.tolist() != list(range(len(samples.tokens))):
        raise ValueError(
            "Steering acts at one position of each row, but these samples do not lie one in each row, in order. Give "
            "samples.one_per_row()."
        )
    until_there = torch.arange(samples.tokens.shape[1]) <= samples.position.unsqueeze(1)
    return {"positions": "last", "attention_mask": samples.attention_mask * until_there}


@torch.no_grad()
def generate_steered(
    model: HookedModel,
    prompts: Sequence[str],
    steer: Steer,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
) -> list[str]:
    """Continue each prompt, steered anew at every token: greedily, or by sampling.

    At each step the texts so far are samples at their last tokens, `steer` gives hooks for them, and one pass over the
    whole texts with these hooks gives the next tokens. So the strengths of `adaptive_flip` and the coordinates of
    `band_flip` follow the text; and only the current last token is steered, never those before it, while
    `model.generate` with a cache keeps in it what hooks made of earlier tokens. A text ends at the end-of-text token,
    which is not part of it.

    Arguments:
        model: a model with a tokenizer.
        prompts: the prompts, as text; begin tokens are put as `Samples.from_prompts` puts them.
        steer: from samples to hooks, such as `plain_flip(core)`, `adaptive_flip(model, core, target)`,
            `band_flip(model, cores)` or `lambda samples: []`.
        max_new_tokens: the most tokens to add to a prompt.
        temperature: 0 takes the likeliest token; above that tokens are drawn from softmax(logits / temperature).
        generator: draws tokens; needed for temperatures above 0. What a prompt's continuation is depends on its place
            among the prompts, but not on the batch size.
        batch_size: prompts in a forward pass.

    Returns:
        The continuations, without the prompts.

    Raises:
        ValueError: no prompts, a model without a tokenizer, fewer than one token to add, a temperature below 0 or
            without a generator, or logits that are NaN.
    """
    if max_new_tokens < 1:
        raise ValueError(f"There are tokens to add, at least one; max_new_tokens is {max_new_tokens}.")
    if temperature < 0:
        raise ValueError(f"A temperature is 0, for the likeliest token, or above; not {temperature}.")
    if temperature > 0 and generator is None:
        raise ValueError(
            f"At temperature {temperature} tokens are drawn at random: give a generator, such as "
            "torch.Generator().manual_seed(0), or leave the temperature at 0 for the likeliest token."
        )
    samples = Samples.from_prompts(model, prompts)
    tokenizer: Any = getattr(model, "tokenizer", None)
    draws = torch.zeros(len(prompts), max_new_tokens)
    if generator is not None and temperature > 0:
        draws = torch.rand(draws.shape, generator=generator, device=generator.device, dtype=torch.float64).cpu()
    continuations = []
    for index, batch in samples.batches(batch_size):
        rows = [row[mask != 0].tolist() for row, mask in zip(batch.tokens, batch.attention_mask, strict=True)]
        texts = [list(row) for row in rows]
        unfinished = list(range(len(texts)))
        for step in range(max_new_tokens):
            now = _at_last_tokens([texts[row] for row in unfinished], samples.prepend_bos)
            logits = now.at(run(model, now.tokens, now.attention_mask, steer(now)))
            tokens = _chosen(logits, temperature, draws[index[unfinished], step])
            for row, token in zip(list(unfinished), tokens, strict=True):
                if token == tokenizer.eos_token_id:
                    unfinished.remove(row)
                else:
                    texts[row].append(token)
            if not unfinished:
                break
        # A tokenizer may drop the space before a continuation that it reads by itself.
        whole, prompt = (
            [tokenizer.decode(tokens, clean_up_tokenization_spaces=False) for tokens in part] for part in (texts, rows)
        )
        continuations += [text[len(start) :] for text, start in zip(whole, prompt, strict=True)]
    return continuations


def _at_last_tokens(texts: list[list[int]], prepend_bos: bool | None) -> Samples:
    """Texts of many lengths as samples at the last token of each."""
    pad = torch.nn.utils.rnn.pad_sequence
    rows = [torch.tensor(text) for text in texts]
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
    return Samples.from_tokens(pad(rows, batch_first=True), attention_mask=mask, prepend_bos=prepend_bos)


def _chosen(logits: Tensor, temperature: float, draws: Tensor) -> list[int]:
    """The likeliest tokens, or those that draws `[n]`, even in [0, 1), fall on."""
    if logits.isnan().any():
        raise ValueError(
            "The logits of a steered pass are NaN. Likely causes: overflow in float16 (load the model in bfloat16 or "
            "float32), or a hook that gives NaN."
        )
    if temperature == 0:
        return logits.argmax(1).tolist()
    cumulative = (logits.double().cpu() / temperature).softmax(1).cumsum(1)
    # Rounding leaves the last sum a little off 1, where a draw could fall behind it.
    return torch.searchsorted(cumulative / cumulative[:, -1:], draws.unsqueeze(1), right=True)[:, 0].tolist()
