"""What a task is asked on: sequences of tokens, and in them the positions that count as samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from ace_lens.models import HookedModel
from ace_lens.shapes import SampleIndex, typed


@typed
@dataclass(frozen=True, eq=False)
class Samples:
    """`n` samples: a sequence and a position in it each, with a label if the task has one.

    Arguments:
        tokens: `[batch, pos]`, the sequences, padded on either side.
        attention_mask: `[batch, pos]`, 1 at real tokens and 0 at padding.
        sequence: `[n]`, the row of `tokens` that each sample lies in.
        position: `[n]`, each sample's position: a column of `tokens`.
        labels: `[n]`, the right answers, or None.
        prepend_bos: whether a begin token was put before each prompt; None where that is not known.

    Raises:
        ValueError: no samples, a row or position out of range, a sample on padding, or labels of another
            length.
    """

    tokens: Int[Tensor, "batch pos"]
    attention_mask: Int[Tensor, "batch pos"]
    sequence: Int[Tensor, "sample"]
    position: Int[Tensor, "sample"]
    labels: Shaped[Tensor, "n_labels"] | None = None
    prepend_bos: bool | None = None

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise ValueError("There are no samples. Give at least one prompt and one position in it.")
        rows, columns = self.tokens.shape
        if int(self.sequence.min()) < 0 or int(self.sequence.max()) >= rows:
            raise ValueError(f"A sample's sequence is a row of the tokens, 0 to {rows - 1}.")
        in_range = (self.position >= 0) & (self.position < columns)
        real = in_range.clone()
        real[in_range] = self.attention_mask[self.sequence[in_range], self.position[in_range]] != 0
        if not real.all():
            first = int((~real).nonzero()[0])
            where = "padding" if in_range[first] else f"outside the {columns} positions there are"
            raise ValueError(
                f"Sample {first} (sequence {int(self.sequence[first])}, position {int(self.position[first])}) "
                f"is {where}. Give positions at which the attention mask is 1; the last real position is "
                'positions="last".'
            )
        if self.labels is not None and len(self.labels) != len(self):
            raise ValueError(f"{len(self.labels)} labels for {len(self)} samples: give one label a sample.")

    def __len__(self) -> int:
        return len(self.sequence)

    def __getitem__(self, index: Tensor | slice | Sequence[int] | int) -> "Samples":
        """The chosen samples, with the sequences that they lie in and no others."""
        chosen = torch.arange(len(self))[index].reshape(-1)
        if len(chosen) == 0:
            raise ValueError("There are no samples in this selection.")
        rows, sequence = self.sequence[chosen].unique(return_inverse=True)
        return replace(
            self,
            tokens=self.tokens[rows],
            attention_mask=self.attention_mask[rows],
            sequence=sequence,
            position=self.position[chosen],
            labels=None if self.labels is None else self.labels[chosen],
        )

    @classmethod
    def from_tokens(
        cls,
        tokens: Int[Tensor, "batch pos"],
        positions: Literal["last", "all"] | Shaped[Tensor, "batch ..."] | list[int] = "last",
        *,
        labels: Shaped[Tensor, "..."] | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        prepend_bos: bool | None = None,
    ) -> "Samples":
        """Samples at the last real position of each sequence, at all of them, or at given ones.

        Arguments:
            tokens: `[batch, pos]`.
            positions: `"last"`, `"all"`, `[batch]` or `[batch, k]`, the positions chosen in each sequence, or a boolean
                mask `[batch, pos]`.
            labels: one label a sample: `[batch]` for the last position, `[batch, pos]` for all or for a mask (labels at
                other positions are left out), or the shape of `positions`.
            attention_mask: `[batch, pos]`, 1 at real tokens; all of them if not given.
            prepend_bos: whether the tokens begin with a begin token; recorded with a core.
        """
        # Samples are kept on the CPU: they are only indices, and go where the model is when it runs.
        tokens = tokens.cpu()
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask.cpu()
        labels = None if labels is None else labels.cpu()
        chosen = torch.as_tensor(positions).cpu() if not isinstance(positions, str) else None
        if positions == "last":
            sequence = torch.arange(len(tokens))
            position = tokens.shape[1] - 1 - mask.flip(1).long().argmax(1)
        elif chosen is None or chosen.dtype == torch.bool:
            chosen = mask != 0 if chosen is None else chosen
            sequence, position = chosen.nonzero(as_tuple=True)
            labels = None if labels is None else labels.reshape(mask.shape)[chosen]
        else:
            chosen = chosen.reshape(len(tokens), -1)
            sequence = torch.arange(len(tokens)).repeat_interleave(chosen.shape[1])
            position = chosen.flatten()
            labels = None if labels is None else labels.flatten()
        return cls(tokens, mask, sequence, position, labels, prepend_bos)

    @classmethod
    def from_prompts(
        cls,
        model: HookedModel,
        prompts: Sequence[str],
        labels: Sequence[Any] | Shaped[Tensor, "sample"] | None = None,
        *,
        prepend_bos: bool | None = None,
    ) -> "Samples":
        """One sample a prompt, at its last token.

        Arguments:
            model: a model with a tokenizer.
            prompts: the prompts, as text.
            labels: the right answer for each prompt.
            prepend_bos: put a begin token before each prompt. By default as the tokenizer does on its own,
                outside TransformerLens, whose default is always to put one: models that were not trained on
                one, such as GPT-2, are out of their element there. Recorded with a core; for text that goes
                to `model.generate` or `model(...)`, hand the same choice on.

        Raises:
            ValueError: no prompts, an empty prompt, a model without a tokenizer, or labels that are not numbers.
        """
        tokens, mask, prepend_bos = _tokenized(model, prompts, prepend_bos)
        try:
            labels = None if labels is None else torch.as_tensor(labels)
        except (TypeError, ValueError) as error:
            raise ValueError("Labels are numbers or booleans. Number the classes first.") from error
        return cls.from_tokens(
            tokens,
            labels=labels,
            attention_mask=mask,
            prepend_bos=prepend_bos,
        )

    @classmethod
    def from_text(cls, model: HookedModel, texts: Sequence[str], *, prepend_bos: bool | None = None) -> "Samples":
        """Every token of the texts that is followed by another, labelled with the one that follows.

        Arguments and errors are those of `from_prompts`.
        """
        tokens, mask, prepend_bos = _tokenized(model, texts, prepend_bos)
        sequence, position = (mask[:, :-1] * mask[:, 1:]).nonzero(as_tuple=True)
        return cls(tokens, mask, sequence, position, tokens[sequence, position + 1], prepend_bos)

    def split(self, fraction: float, generator: torch.Generator) -> tuple["Samples", "Samples"]:
        """Two parts that share no sequence: `fraction` of the sequences, drawn at random, and the rest."""
        order = torch.randperm(len(self.tokens), generator=generator)
        first = torch.isin(self.sequence, order[: round(fraction * len(order))])
        return self[first.nonzero()[:, 0]], self[(~first).nonzero()[:, 0]]

    def contents(self) -> list[tuple[int, ...]]:
        """The real tokens of each sequence, by which equal sequences are known."""
        pairs = zip(self.tokens, self.attention_mask, strict=True)
        return [tuple(tokens[mask != 0].tolist()) for tokens, mask in pairs]

    def one_per_row(self) -> "Samples":
        """The same samples, each in a row of its own.

        Then nothing that happens at one sample's position can reach another sample.
        """
        return replace(
            self,
            tokens=self.tokens[self.sequence],
            attention_mask=self.attention_mask[self.sequence],
            sequence=torch.arange(len(self)),
        )

    def batches(self, batch_size: int) -> Iterator[tuple[SampleIndex, "Samples"]]:
        """Batches of at most `batch_size` sequences, each with the indices of its samples in `self`.

        Columns after a batch's last sample are cut off: in a causal model they change nothing.
        """
        for start in range(0, len(self.tokens), batch_size):
            inside = (self.sequence >= start) & (self.sequence < start + batch_size)
            index = inside.nonzero()[:, 0]
            if len(index):
                batch = self[index]
                used = int(batch.position.max()) + 1
                yield (
                    index,
                    replace(batch, tokens=batch.tokens[:, :used], attention_mask=batch.attention_mask[:, :used]),
                )

    def at(self, values: Shaped[Tensor, "batch pos ..."]) -> Shaped[Tensor, "sample ..."]:
        """The entry of each sample in a tensor over `[batch, pos]`."""
        return values[self.sequence.to(values.device), self.position.to(values.device)]

    def position_mask(self) -> Tensor:
        """Boolean `[batch, pos]`: true where a sample lies."""
        mask = torch.zeros_like(self.tokens, dtype=torch.bool)
        mask[self.sequence, self.position] = True
        return mask


def _tokenized(model: HookedModel, texts: Sequence[str], prepend_bos: bool | None) -> tuple[Tensor, Tensor, bool]:
    """Tokens and attention mask `[batch, pos]`, padded on the right, and whether they start with a begin token."""
    if isinstance(texts, str):
        raise ValueError(f"Prompts are a list of texts: write [{texts!r}] for one.")
    if len(texts) == 0:
        raise ValueError("There are no prompts. Give at least one.")
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(
            f"{type(model).__name__} has no tokenizer. Tokenize the prompts yourself and use Samples.from_tokens(...)."
        )
    if prepend_bos is None:
        prepend_bos = _prepends_bos(tokenizer)
    # One text at a time: the mask then comes from lengths, never from looking for padding tokens, which may be begin
    # or end tokens too.
    to_tokens = model.to_tokens  # type: ignore[attr-defined]
    rows = [to_tokens(text, prepend_bos=prepend_bos)[0].cpu() for text in texts]
    if empty := [index for index, row in enumerate(rows) if len(row) == 0]:
        raise ValueError(f"Prompt {empty[0]} has no tokens.")
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
    return tokens, pad([torch.ones_like(row) for row in rows], batch_first=True), prepend_bos


def _prepends_bos(tokenizer: Any) -> bool:
    """Whether a tokenizer puts a begin token first, before TransformerLens set it up to do so always."""
    from transformers import AutoTokenizer

    def prepends(tokenizer: Any) -> bool:
        return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]

    if not prepends(tokenizer):
        return False
    try:
        return prepends(AutoTokenizer.from_pretrained(tokenizer.name_or_path, local_files_only=True))
    except (OSError, ValueError):
        # It did not come from files that lie here: what it does now is all there is to go by.
        return True
