"""Which positions of a pass a hook looks at or edits, also while a key-value cache feeds them one by one."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Positions: TypeAlias = Literal["all", "last"] | slice | list[int] | Tensor
"""`"all"`; `"last"`, the last real position of each row; a slice or a list of positions, the same in every row; or a
boolean tensor `[batch, pos]`, true at the chosen ones. Positions count from the start of the sequence, as the tokens
handed to the model do, padding included. Negative ones count from the end of the prompt, or of each pass where
`generate` runs without a cache and hands the model everything again."""


class PositionSelector:
    """Turns `Positions` into a boolean mask over each pass that a hook sees.

    In `generate` with a key-value cache, the first pass holds the prompt and each later one a single new
    position. A pass of one position after an earlier pass is therefore taken to continue it, so that positions
    keep counting from the start of the prompt; any longer pass starts afresh. `"last"` is the last position of
    each pass: with a cache that is every generated token in turn.

    Arguments:
        positions: the positions to choose.
        attention_mask: `[batch, pos]`, needed for `"last"` where rows are padded on the right.
    """

    def __init__(self, positions: Positions, attention_mask: Tensor | None = None) -> None:
        if not isinstance(positions, (slice, list, Tensor)) and positions not in ("all", "last"):
            raise ValueError(f'Positions are "all", "last", a slice, a list of positions or a mask; not {positions!r}.')
        if isinstance(positions, Tensor) and positions.dtype != torch.bool:
            raise ValueError(
                "A tensor of positions is a boolean mask [batch, pos]; for the same positions in every row, "
                "give a list of integers."
            )
        self.positions = positions
        self.attention_mask = attention_mask
        self.reset()

    def reset(self) -> None:
        """Take the next pass for a new prompt, whatever its length."""
        self._prompt_length = 0
        self._seen = 0

    def mask(self, activation: Tensor) -> Tensor:
        """Boolean `[batch, pos]`: the chosen positions of the next pass, whose activation `[batch, pos, ...]` is given.

        Raises:
            ValueError: a mask of another batch, or a position outside the prompt.
        """
        batch, length = activation.shape[:2]
        by_count = not isinstance(self.positions, str)
        if length == 1 and self._prompt_length == 1 and by_count:
            raise ValueError(
                "A pass of one position came after a prompt of one position: it may be the next step of a generation, "
                'or another prompt. Ask for fwd_hooks() or attach() anew for each prompt, or choose "last" or "all".'
            )
        continues = length == 1 and self._seen > 0
        if not continues:
            self._prompt_length, self._seen = length, 0
        start = self._seen
        self._seen += length
        return self._whole(batch, self._seen).to(activation.device)[:, start:]

    def _whole(self, batch: int, length: int) -> Tensor:
        """The mask over the first `length` positions of the sequence."""
        mask = torch.zeros(batch, length, dtype=torch.bool)
        if isinstance(self.positions, Tensor):
            return self._fitted(self.positions, "mask of positions", mask)
        if isinstance(self.positions, slice):
            start, stop, step = self.positions.start, self.positions.stop, self.positions.step
            # Negative bounds count from the end of the prompt, not of what has been generated since.
            start = start + self._prompt_length if start is not None and start < 0 else start
            stop = stop + self._prompt_length if stop is not None and stop < 0 else stop
            mask[:, start:stop:step] = True
        elif self.positions == "all":
            mask[:] = True
        elif isinstance(self.positions, str):
            given = self.attention_mask
            if given is None or length > given.shape[1]:
                mask[:, -1] = True
            else:
                real = self._fitted(given.bool(), "attention mask", mask)
                last = length - 1 - real.flip(1).long().argmax(1)
                mask[torch.arange(batch), last] = True
        else:
            for position in self.positions:
                if not -self._prompt_length <= position < max(self._prompt_length, length):
                    raise ValueError(
                        f"Position {position} is outside the {self._prompt_length} positions of this pass."
                    )
                mask[:, position if position >= 0 else position + self._prompt_length] = True
        return mask

    @staticmethod
    def _fitted(given: Tensor, what: str, mask: Tensor) -> Tensor:
        """A given `[batch, pos]` mask, cut or filled up with False to the length of this pass."""
        if len(given) != len(mask):
            raise ValueError(f"The {what} is for a batch of {len(given)}, but this pass has a batch of {len(mask)}.")
        mask = mask.clone()
        shared = min(given.shape[1], mask.shape[1])
        mask[:, :shared] = given[:, :shared].to(mask.device)
        return mask
