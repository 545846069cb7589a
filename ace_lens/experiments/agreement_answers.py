"""The verbs by which a model shows what number it takes the head noun to have."""

from collections.abc import Sequence
from dataclasses import dataclass

import ace_lens as ace
from ace_lens.targets import answer_pieces


@dataclass(frozen=True)
class AnswerSets:
    """Plural and singular verbs that are one token each in a model's tokenizer.

    Arguments:
        plural: token ids by plural verb.
        singular: token ids by singular verb.
        left_out: verbs that are several tokens, and so have no single logit, with the text of their tokens.
    """

    plural: dict[str, int]
    singular: dict[str, int]
    left_out: dict[str, tuple[str, ...]]

    def margin(self, model: ace.HookedModel) -> ace.LogitMargin:
        """How far the plural verbs' logits lie above the singular ones'."""
        return ace.LogitMargin(model, positive=list(self.plural), negative=list(self.singular))

    def __str__(self) -> str:
        lines = [f"plural: {_listed(self.plural)}", f"singular: {_listed(self.singular)}"]
        if self.left_out:
            lines.append(f"left out, being several tokens: {_in_pieces(self.left_out)}")
        return "\n".join(lines)


def answer_sets(
    model: ace.HookedModel,
    *,
    plural: Sequence[str] = (" are", " were"),
    singular: Sequence[str] = (" is", " was"),
    leave_out_split: bool = False,
) -> AnswerSets:
    """Look up verbs in a model's tokenizer.

    Arguments:
        model: whose tokenizer reads the verbs.
        plural: plural verbs, as they continue a sentence: most tokenizers want the space before them.
        singular: singular verbs.
        leave_out_split: leave out verbs that are several tokens, and report them, where they are an error otherwise.

    Raises:
        ValueError: a verb that is several tokens, a side without verbs, or a model without a tokenizer.
    """
    if isinstance(plural, str) or isinstance(singular, str):
        raise ValueError("Answer sets are lists of verbs: write [' are'], not ' are'.")
    split: dict[str, tuple[str, ...]] = {}
    sides: dict[str, dict[str, int]] = {"plural": {}, "singular": {}}
    for side, verbs in (("plural", plural), ("singular", singular)):
        for verb in verbs:
            tokens, pieces = answer_pieces(model, verb)
            if len(tokens) == 1:
                sides[side][verb] = tokens[0]
            else:
                split[verb] = tuple(pieces)
    if split and not leave_out_split:
        raise ValueError(
            f"Not one token each, so without a single logit: {_in_pieces(split)}. Give other verbs, with the space "
            "before them, or leave these out with leave_out_split=True."
        )
    for side, found in sides.items():
        if not found:
            why = f" after {_in_pieces(split)} are left out" if split else ""
            raise ValueError(f"There is no {side} verb{why}. Give at least one that is one token.")
    return AnswerSets(sides["plural"], sides["singular"], split)


def _listed(verbs: dict[str, int]) -> str:
    return ", ".join(f"{verb!r} ({token})" for verb, token in verbs.items())


def _in_pieces(split: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{verb!r} {list(pieces)}" for verb, pieces in split.items())
