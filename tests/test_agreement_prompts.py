import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ace_lens.experiments.agreement_prompts import (
    HELD_OUT,
    TRAINING,
    AgreementPrompt,
    frame_folds,
    make_prompts,
    prompt_samples,
)

KINDS = ["base", "fronted", "trailing", "relative"]
HALVES = pytest.mark.parametrize("held_out", [False, True])
VOCABULARIES = pytest.mark.parametrize("vocabulary", [TRAINING, HELD_OUT], ids=["training", "held-out"])


def draw(n_per_number, held_out, seed=0):
    return make_prompts(n_per_number, held_out=held_out, generator=torch.Generator().manual_seed(seed))


def words(text):
    return text.replace(",", "").split()


@given(st.integers(1, 60), st.booleans(), st.integers(0, 2**31))
def test_twins_differ_in_the_number_of_both_nouns_and_in_nothing_else(n_per_number, held_out, seed):
    nouns = (HELD_OUT if held_out else TRAINING).nouns
    prompts = draw(n_per_number, held_out, seed)
    assert len(prompts) == 2 * n_per_number
    for singular, plural in zip(prompts[::2], prompts[1::2], strict=True):
        assert (singular.plural, plural.plural) == (False, True)
        head, attractor = singular.head, singular.attractor
        assert (plural.head, plural.attractor, plural.frame) == (head, attractor, singular.frame)
        pairs = zip(words(singular.text), words(plural.text), strict=True)
        assert [pair for pair in pairs if pair[0] != pair[1]] == [(head, nouns[head]), (nouns[attractor], attractor)]


@given(st.integers(1, 60), st.booleans(), st.integers(0, 2**31))
def test_draws_follow_the_generator_alone_and_kinds_take_turns(n_per_number, held_out, seed):
    before = torch.get_rng_state()
    prompts = draw(n_per_number, held_out, seed)
    assert torch.equal(torch.get_rng_state(), before)
    assert draw(n_per_number, held_out, seed) == prompts
    assert [prompt.frame for prompt in prompts[::2]] == [KINDS[index % 4] for index in range(n_per_number)]


@given(st.integers(16, 60), st.booleans(), st.integers(0, 2**31))
def test_no_frame_lies_in_two_folds_and_each_has_every_kind(n_per_number, held_out, seed):
    prompts = draw(n_per_number, held_out, seed)
    folds = frame_folds(prompts, 2)
    for prompt, fold in zip(prompts, folds, strict=True):
        assert all(
            other == fold for each, other in zip(prompts, folds, strict=True) if each.template == prompt.template
        )
    templates = {(prompt.frame, prompt.template, fold) for prompt, fold in zip(prompts, folds, strict=True)}
    for kind in KINDS:
        inside = [fold for frame, _, fold in templates if frame == kind]
        assert abs(inside.count(0) - inside.count(1)) <= 1


def test_prompts_without_a_frame_are_dealt_out():
    prompts = [AgreementPrompt(f"Prompt {index}", plural=False, frame=None) for index in range(7)]
    assert frame_folds(prompts, 3) == [0, 1, 2, 0, 1, 2, 0]


@HALVES
def test_seeds_draw_differently(held_out):
    first, second = ({prompt.text for prompt in draw(40, held_out, seed)} for seed in (0, 1))
    assert len(first & second) < 20


@HALVES
def test_all_there_are_can_be_drawn_and_no_more(held_out):
    # Relative clauses are the fewest: 8 frames, 25 heads, and 12 people for attractors, of whom none is its own.
    largest = 4 * 8 * (25 * 12 - 12)
    prompts = draw(largest, held_out)
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 2 * largest
    assert {prompt.head for prompt in prompts} == set((HELD_OUT if held_out else TRAINING).nouns)
    half = "held-out" if held_out else "training"
    for n_per_number in (largest + 1, 0):
        with pytest.raises(
            ValueError, match=rf"no {n_per_number} prompts of each number .* the {half} half has 1 to 9216"
        ):
            draw(n_per_number, held_out)


@HALVES
def test_texts_read_as_their_kind_of_frame_says(held_out):
    people = (HELD_OUT if held_out else TRAINING).people
    for prompt in draw(400, held_out):
        assert prompt.text == prompt.text.strip()
        noun = words(prompt.text)
        noun_forms = (prompt.attractor, (HELD_OUT if held_out else TRAINING).nouns[prompt.attractor])
        assert (noun[-1] in noun_forms) == (prompt.frame in ("base", "fronted"))
        assert prompt.text.startswith("The ") != (prompt.frame == "fronted")
        assert (" that the " in prompt.text) == (prompt.frame == "relative")
        assert prompt.frame != "relative" or prompt.attractor in people


def test_halves_share_neither_nouns_nor_frames():
    forms = [set(half.nouns) | set(half.nouns.values()) for half in (TRAINING, HELD_OUT)]
    assert not forms[0] & forms[1]
    assert len(TRAINING.nouns) + len(HELD_OUT.nouns) >= 40
    frames = [{frame for kind in half.frames.values() for frame in kind} for half in (TRAINING, HELD_OUT)]
    assert not frames[0] & frames[1]
    # Nor is a frame of one half another one's beginning, with the same preposition or verb.
    assert not any(a.startswith(b) or b.startswith(a) for a in frames[0] for b in frames[1])


@VOCABULARIES
def test_nouns_show_their_number_and_frames_do_not(vocabulary):
    assert not set(vocabulary.people) & set(vocabulary.others)
    assert not set(vocabulary.nouns) & set(vocabulary.nouns.values())
    assert len(set(vocabulary.nouns.values())) == len(vocabulary.nouns)
    for nouns in (vocabulary.people, vocabulary.others):
        regular = [plural == singular + "s" for singular, plural in nouns.items()]
        assert any(regular)
        assert not all(regular)
    assert list(vocabulary.frames) == KINDS
    for frames in vocabulary.frames.values():
        assert len(set(frames)) == len(frames) == 8
        for frame in frames:
            assert frame.index("{head}") < frame.index("{attractor}")
            assert not set(words(frame)) & {"is", "are", "was", "were", "has", "have", "does", "do", "this", "these"}


def test_samples_lie_at_the_last_token_and_are_labelled_with_number(gpt2):
    prompts = [AgreementPrompt("The keys near the cabinet", True), AgreementPrompt("The man", False)]
    samples = prompt_samples(gpt2, prompts)
    assert samples.labels.tolist() == [True, False]
    last = [gpt2.to_single_token(word) for word in (" cabinet", " man")]
    assert samples.at(samples.tokens).tolist() == last
    with pytest.raises(ValueError, match="There are no prompts"):
        prompt_samples(gpt2, [])
