"""Prompts for subject-verb agreement: a head noun, then an attractor of the other number, then the verb.

A model that only looks at the nearest noun is wrong on every prompt. They come as twins, which differ in nothing but
number ("The lamp near the chairs", "The lamps near the chair"), so no choice of words gives the answer away. There are
two halves that share no noun and no frame: one to find a core on, one to prove it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import ace_lens as ace


@dataclass(frozen=True)
class AgreementPrompt:
    """The beginning of a sentence, up to the verb that has to agree with its head noun.

    Arguments:
        text: ends right before the verb, without the space between.
        plural: the head noun's number, which the verb has to take.
        frame: the kind of frame (base, fronted, trailing, relative), or what a file says of it; None if nothing.
        head: the head noun, in the singular; None where it is not known.
        attractor: the noun between head and verb, in the singular; None where it is not known.
        right: the right verb, with the space before it, where a file gives one.
        wrong: the wrong verb, with the space before it, where a file gives one.
        template: the frame itself, with places for `{head}` and `{attractor}`; None where it is not known.
    """

    text: str
    plural: bool
    frame: str | None = None
    head: str | None = None
    attractor: str | None = None
    right: str | None = None
    wrong: str | None = None
    template: str | None = None


@dataclass(frozen=True)
class Vocabulary:
    """What one half of the prompts is made of.

    Arguments:
        people: plural forms by singular forms, of nouns that can do what the verbs in relative clauses say.
        others: plural forms by singular forms, of animals and things.
        frames: under each kind of frame, templates with a place for `{head}` and one for `{attractor}`. They show
            number nowhere else: relative clauses are in a past tense, adverbials are set phrases.
    """

    people: dict[str, str]
    others: dict[str, str]
    frames: dict[str, tuple[str, ...]]

    @property
    def nouns(self) -> dict[str, str]:
        """All nouns, plural forms by singular forms."""
        return self.people | self.others


TRAINING = Vocabulary(
    people={
        "teacher": "teachers",
        "doctor": "doctors",
        "boy": "boys",
        "farmer": "farmers",
        "painter": "painters",
        "guest": "guests",
        "student": "students",
        "waitress": "waitresses",
        "lady": "ladies",
        "man": "men",
        "child": "children",
        "policeman": "policemen",
    },
    others={
        "lamp": "lamps",
        "chair": "chairs",
        "bicycle": "bicycles",
        "letter": "letters",
        "suitcase": "suitcases",
        "bottle": "bottles",
        "horse": "horses",
        "box": "boxes",
        "bench": "benches",
        "pony": "ponies",
        "knife": "knives",
        "shelf": "shelves",
        "mouse": "mice",
    },
    frames={
        "base": (
            "The {head} near the {attractor}",
            "The {head} behind the {attractor}",
            "The {head} next to the {attractor}",
            "The {head} opposite the {attractor}",
            "The {head} by the {attractor}",
            "The {head} alongside the {attractor}",
            "The {head} not far from the {attractor}",
            "The {head} with the {attractor}",
        ),
        "fronted": (
            "Every morning, the {head} near the {attractor}",
            "At the moment, the {head} behind the {attractor}",
            "As far as we know, the {head} next to the {attractor}",
            "Most of the time, the {head} opposite the {attractor}",
            "For some reason, the {head} by the {attractor}",
            "In the picture, the {head} alongside the {attractor}",
            "After so long, the {head} not far from the {attractor}",
            "Believe it or not, the {head} with the {attractor}",
        ),
        "trailing": (
            "The {head} near the {attractor} over there",
            "The {head} behind the {attractor} outside",
            "The {head} next to the {attractor}, of course,",
            "The {head} opposite the {attractor}, in any case,",
            "The {head} by the {attractor} downstairs",
            "The {head} alongside the {attractor} in the background",
            "The {head} not far from the {attractor}, it seems,",
            "The {head} with the {attractor} at night",
        ),
        "relative": (
            "The {head} that the {attractor} noticed",
            "The {head} that the {attractor} remembered",
            "The {head} that the {attractor} described",
            "The {head} that the {attractor} drew",
            "The {head} that the {attractor} admired",
            "The {head} that the {attractor} had found",
            "The {head} that the {attractor} talked about",
            "The {head} that the {attractor} wanted",
        ),
    },
)

HELD_OUT = Vocabulary(
    people={
        "nurse": "nurses",
        "driver": "drivers",
        "girl": "girls",
        "singer": "singers",
        "lawyer": "lawyers",
        "sailor": "sailors",
        "tourist": "tourists",
        "actress": "actresses",
        "secretary": "secretaries",
        "woman": "women",
        "person": "people",
        "fisherman": "fishermen",
    },
    others={
        "statue": "statues",
        "basket": "baskets",
        "camera": "cameras",
        "mirror": "mirrors",
        "table": "tables",
        "kettle": "kettles",
        "bus": "buses",
        "dish": "dishes",
        "puppy": "puppies",
        "leaf": "leaves",
        "scarf": "scarves",
        "wolf": "wolves",
        "goose": "geese",
    },
    frames={
        "base": (
            "The {head} beside the {attractor}",
            "The {head} close to the {attractor}",
            "The {head} in front of the {attractor}",
            "The {head} across from the {attractor}",
            "The {head} facing the {attractor}",
            "The {head} past the {attractor}",
            "The {head} to the left of the {attractor}",
            "The {head} away from the {attractor}",
        ),
        "fronted": (
            "Right now, the {head} beside the {attractor}",
            "In the evening, the {head} close to the {attractor}",
            "According to Anna, the {head} in front of the {attractor}",
            "Once again, the {head} across from the {attractor}",
            "To our surprise, the {head} facing the {attractor}",
            "Since yesterday, the {head} past the {attractor}",
            "In the end, the {head} to the left of the {attractor}",
            "Without a doubt, the {head} away from the {attractor}",
        ),
        "trailing": (
            "The {head} beside the {attractor} up ahead",
            "The {head} close to the {attractor} right here",
            "The {head} in front of the {attractor}, as usual,",
            "The {head} across from the {attractor}, by the way,",
            "The {head} facing the {attractor} upstairs",
            "The {head} past the {attractor} in the distance",
            "The {head} to the left of the {attractor}, no doubt,",
            "The {head} away from the {attractor} today",
        ),
        "relative": (
            "The {head} that the {attractor} mentioned",
            "The {head} that the {attractor} photographed",
            "The {head} that the {attractor} liked",
            "The {head} that the {attractor} had seen",
            "The {head} that the {attractor} chose",
            "The {head} that the {attractor} pointed at",
            "The {head} that the {attractor} had lost",
            "The {head} that the {attractor} asked about",
        ),
    },
)


def make_prompts(n_per_number: int, *, held_out: bool, generator: torch.Generator) -> list[AgreementPrompt]:
    """Draw twins of one half, `n_per_number` with a singular head and as many with a plural head.

    Twins stand side by side, the singular head first, and the kinds of frame take turns, so that every stretch of the
    list is balanced. No two prompts are the same.

    Arguments:
        n_per_number: how many prompts of each number.
        held_out: draw from the nouns and frames of the held-out half; otherwise from those of the training half.
        generator: draws nouns and frames.

    Raises:
        ValueError: fewer than one prompt of each number, or more than there are.
    """
    vocabulary = HELD_OUT if held_out else TRAINING
    choices = {kind: _choices(vocabulary, kind) for kind in vocabulary.frames}
    largest = len(choices) * min(len(triples) for triples in choices.values())
    if not 1 <= n_per_number <= largest:
        raise ValueError(
            f"There are no {n_per_number} prompts of each number with the kinds of frame in equal parts: the "
            f"{'held-out' if held_out else 'training'} half has 1 to {largest}. Ask for as many as that."
        )
    orders = {kind: torch.randperm(len(triples), generator=generator).tolist() for kind, triples in choices.items()}
    kinds = list(choices)
    prompts = []
    for index in range(n_per_number):
        kind = kinds[index % len(kinds)]
        frame, head, attractor = choices[kind][orders[kind][index // len(kinds)]]
        prompts += _twins(vocabulary.nouns, kind, frame, head, attractor)
    return prompts


def frame_folds(prompts: Sequence[AgreementPrompt], n_folds: int) -> list[int]:
    """A fold for each prompt, so that no frame lies in two of them, and each has frames of every kind.

    Frames take turns, kind after kind. Prompts whose frame is not known are dealt out one by one.
    """
    frames = sorted({(prompt.frame or "", prompt.template) for prompt in prompts if prompt.template})
    place = {template: turn for turn, (_, template) in enumerate(frames)}
    return [
        (index if prompt.template is None else place[prompt.template]) % n_folds for index, prompt in enumerate(prompts)
    ]


def prompt_samples(model: ace.HookedModel, prompts: Sequence[AgreementPrompt]) -> ace.Samples:
    """One sample a prompt, at its last token, labelled with whether the head is plural.

    Raises:
        ValueError: no prompts, or a model without a tokenizer.
    """
    labels = [prompt.plural for prompt in prompts]
    return ace.Samples.from_prompts(model, [prompt.text for prompt in prompts], labels=labels)


def _choices(vocabulary: Vocabulary, kind: str) -> list[tuple[str, str, str]]:
    """Every frame of a kind, with every head and every other noun that can be its attractor."""
    attractors = vocabulary.people if kind == "relative" else vocabulary.nouns
    return [
        (frame, head, attractor)
        for frame in vocabulary.frames[kind]
        for head in vocabulary.nouns
        for attractor in attractors
        if attractor != head
    ]


def _twins(nouns: dict[str, str], kind: str, frame: str, head: str, attractor: str) -> list[AgreementPrompt]:
    singular = frame.format(head=head, attractor=nouns[attractor])
    plural = frame.format(head=nouns[head], attractor=attractor)
    return [
        AgreementPrompt(singular, False, kind, head, attractor, template=frame),
        AgreementPrompt(plural, True, kind, head, attractor, template=frame),
    ]
