import pytest
import torch

import ace_lens as ace

LOGITS = torch.tensor([[1.0, 2.0, 4.0, 8.0], [0.0, 0.0, 1.0, -1.0]])


def test_margin_is_the_difference_of_mean_logits(native):
    margin = ace.LogitMargin(native, positive=[2, 3], negative=[0])
    assert margin(LOGITS).tolist() == [[5.0], [0.0]]


def test_margin_reads_answers_as_text(gpt2):
    margin = ace.LogitMargin(gpt2, positive=[" are", " were"], negative=[" is", " was"])
    tokens = [gpt2.to_single_token(word) for word in (" are", " were", " is", " was")]
    assert margin.positive + margin.negative == tokens
    assert repr(margin) == "LogitMargin(positive=[' are', ' were'], negative=[' is', ' was'])"


def test_centred_logits_ignore_a_constant():
    assert torch.equal(ace.CentredLogits()(LOGITS), ace.CentredLogits()(LOGITS + 3))
    assert ace.CentredLogits([3, 0])(LOGITS).tolist() == [[3.5, -3.5], [-0.5, 0.5]]


def test_bad_answers_are_refused(gpt2, native):
    with pytest.raises(ValueError, match=r"'are is' is 2 tokens \['are', ' is'\], so it has no single logit"):
        ace.LogitMargin(gpt2, ["are is"], [" was"])
    with pytest.raises(ValueError, match=r"is 2 tokens .* with a space: ' the key'"):
        ace.LogitMargin(gpt2, ["the key"], [" was"])
    with pytest.raises(ValueError, match="between lists of answers"):
        ace.LogitMargin(gpt2, " are", [" is"])
    with pytest.raises(ValueError, match="at least one positive and one negative"):
        ace.LogitMargin(gpt2, [" are"], [])
    with pytest.raises(ValueError, match=r"Tokens \[3\] are on both sides"):
        ace.LogitMargin(native, [3, 4], [3])
    with pytest.raises(ValueError, match="has no tokenizer: give the answer ' are' as a token id"):
        ace.LogitMargin(native, [" are"], [3])
