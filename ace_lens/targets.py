"""Task outputs: differentiable functions of the logits that say how the model answers.

A target takes the logits at each sample's position, `[sample, d_vocab]`, to the task's outputs,
`[sample, target]`, each row from its own row only. Any callable of that kind serves; two are given here.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ace_lens.models import HookedModel
from ace_lens.shapes import Outputs, SampleLogits, typed

Target: TypeAlias = Callable[[Tensor], Tensor]
Answer: TypeAlias = int | str


def single_token(model: HookedModel, answer: Answer) -> int:
    """The token id of an answer.

    Raises:
        ValueError: the answer is several tokens, or none (they are shown), or no token of the model.
    """
    if not isinstance(answer, str):
        token, d_vocab = operator.index(answer), getattr(getattr(model, "cfg", None), "d_vocab", None)
        if token < 0 or (d_vocab is not None and token >= d_vocab):
            raise ValueError(f"There is no token {token}: the model has tokens 0 to {d_vocab}, the last not included.")
        return token
    tokens, pieces = answer_pieces(model, answer)
    if len(tokens) != 1:
        hint = (
            ""
            if answer.startswith(" ")
            else f" Most tokenizers write a word inside a sentence with a space: {' ' + answer!r}."
        )
        raise ValueError(
            f"The answer {answer!r} is {len(tokens)} tokens {pieces}, so it has no single logit. "
            f"Give an answer that is one token.{hint}"
        )
    return tokens[0]


def answer_pieces(model: HookedModel, answer: str) -> tuple[list[int], list[str]]:
    """The token ids that an answer consists of, and the text of each.

    Raises:
        ValueError: a model without a tokenizer.
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"{type(model).__name__} has no tokenizer: give the answer {answer!r} as a token id.")
    tokens = model.to_tokens(answer, prepend_bos=False)[0].tolist()  # type: ignore[attr-defined]
    return tokens, [tokenizer.decode([token]) for token in tokens]


class LogitMargin:
    """How far the logits of some answers lie above those of others, `[sample, 1]`.

    The mean logit of the positive answers minus the mean logit of the negative ones: positive where the
    model prefers a positive answer.

    Arguments:
        model: whose tokenizer reads the answers.
        positive: answers, as token ids or as strings of one token each.
        negative: answers on the other side.

    Raises:
        ValueError: a side is no list or is empty, an answer is several tokens, or a token is on both sides.
    """

    def __init__(self, model: HookedModel, positive: Sequence[Answer], negative: Sequence[Answer]) -> None:
        if isinstance(positive, str) or isinstance(negative, str):
            raise ValueError("A logit margin is between lists of answers: write [' are'], not ' are'.")
        self.positive = [single_token(model, answer) for answer in positive]
        self.negative = [single_token(model, answer) for answer in negative]
        if not self.positive or not self.negative:
            raise ValueError("A logit margin needs at least one positive and one negative answer.")
        if both := set(self.positive) & set(self.negative):
            raise ValueError(f"Tokens {sorted(both)} are on both sides of the logit margin.")
        self.tokens = self.positive + self.negative
        self._description = f"LogitMargin(positive={list(positive)}, negative={list(negative)})"

    @typed
    def __call__(self, logits: SampleLogits) -> Outputs:
        """The margin of each sample, `[sample, 1]`."""
        margin = logits[:, self.positive].mean(1) - logits[:, self.negative].mean(1)
        return margin.unsqueeze(1)

    def __repr__(self) -> str:
        return self._description


class CentredLogits:
    """Logits of some tokens, or of a whole small vocabulary, less their mean, `[sample, target]`.

    The mean is taken off because softmax does not see it: left in, a direction that changes no probability
    would enter the core.

    Arguments:
        tokens: the token ids to look at, in the order of the labels; the whole vocabulary if not given.
    """

    def __init__(self, tokens: Sequence[int] | None = None) -> None:
        self.tokens = None if tokens is None else list(tokens)

    @typed
    def __call__(self, logits: SampleLogits) -> Outputs:
        """The centred logits of each sample."""
        chosen = logits if self.tokens is None else logits[:, self.tokens]
        return chosen - chosen.mean(dim=1, keepdim=True)

    def __repr__(self) -> str:
        return f"CentredLogits({'' if self.tokens is None else self.tokens})"


def task_outputs(target: Target, logits: Tensor) -> Tensor:
    """The target's outputs, checked to be `[sample, target]`, at least in float32.

    Raises:
        ValueError: the target returned another shape.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    outputs = target(logits)
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(logits):
        shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"The target {describe(target)} gave {shape} for logits {tuple(logits.shape)}. A target takes logits "
            "[sample, d_vocab] to outputs [sample, target]; for one output a sample, keep the second axis."
        )
    return outputs


def tokens_read(target: Target) -> list[int] | None:
    """The tokens whose logits a target reads, by its attribute `tokens`; None where it may be any."""
    return getattr(target, "tokens", None) or None


def tokens_outside(target: Target, d_vocab: int) -> Tensor | None:
    """The tokens that a target does not read, in order; None unless there are two, among which to choose.

    Of a plain function nothing is known, so every token counts as outside; `tokens = None` stands for the whole
    vocabulary.
    """
    read = getattr(target, "tokens", [])
    if read is None:
        return None
    outside = torch.ones(d_vocab, dtype=torch.bool)
    outside[read] = False
    return outside.nonzero()[:, 0] if int(outside.sum()) > 1 else None


def describe(target: Target) -> str:
    """A target's name, for reports and provenance."""
    return getattr(target, "__name__", None) or repr(target)
