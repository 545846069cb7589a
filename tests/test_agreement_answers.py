import pytest
import torch

import ace_lens as ace
from ace_lens.experiments.agreement_answers import AnswerSets, answer_sets


def test_answers_are_looked_up_in_the_tokenizer(gpt2):
    answers = answer_sets(gpt2)
    assert answers == AnswerSets(
        plural={word: gpt2.to_single_token(word) for word in (" are", " were")},
        singular={word: gpt2.to_single_token(word) for word in (" is", " was")},
        left_out={},
    )
    assert str(answers) == (
        f"plural: ' are' ({answers.plural[' are']}), ' were' ({answers.plural[' were']})\n"
        f"singular: ' is' ({answers.singular[' is']}), ' was' ({answers.singular[' was']})"
    )


def test_their_margin_is_the_plural_verbs_over_the_singular_ones(gpt2):
    logits = torch.randn(5, gpt2.cfg.d_vocab, generator=torch.Generator().manual_seed(0))
    same = ace.LogitMargin(gpt2, positive=[" are", " were"], negative=[" is", " was"])
    assert torch.equal(answer_sets(gpt2).margin(gpt2)(logits), same(logits))


def test_split_verbs_are_refused_or_left_out_and_always_shown(gpt2):
    verbs = {"plural": [" are", " are near"], "singular": [" sees to", " is"]}
    with pytest.raises(ValueError, match=r"without a single logit: ' are near' \[' are', ' near'\], ' sees to' \["):
        answer_sets(gpt2, **verbs)
    answers = answer_sets(gpt2, **verbs, leave_out_split=True)
    assert (list(answers.plural), list(answers.singular)) == ([" are"], [" is"])
    assert answers.left_out == {" are near": (" are", " near"), " sees to": (" sees", " to")}
    assert str(answers).splitlines()[-1] == (
        "left out, being several tokens: ' are near' [' are', ' near'], ' sees to' [' sees', ' to']"
    )
    assert answers.margin(gpt2).tokens == [answers.plural[" are"], answers.singular[" is"]]


def test_bad_answers_are_refused(gpt2, native):
    with pytest.raises(
        ValueError, match=r"no singular verb after ' sees to' \[' sees', ' to'\] are left out\. Give at"
    ):
        answer_sets(gpt2, singular=[" sees to"], leave_out_split=True)
    with pytest.raises(ValueError, match=r"There is no plural verb\. Give at least one"):
        answer_sets(gpt2, plural=[])
    with pytest.raises(ValueError, match=r"lists of verbs: write \[' are'\]"):
        answer_sets(gpt2, plural=" are")
    with pytest.raises(ValueError, match="has no tokenizer"):
        answer_sets(native)
