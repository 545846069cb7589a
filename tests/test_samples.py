import pytest
import torch

import ace_lens as ace

TOKENS = torch.arange(1, 13).reshape(3, 4)
RIGHT = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]])
LEFT = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


def test_last_position_on_either_side():
    assert ace.Samples.from_tokens(TOKENS, attention_mask=RIGHT).position.tolist() == [1, 3, 2]
    assert ace.Samples.from_tokens(TOKENS, attention_mask=LEFT).position.tolist() == [3, 3, 3]


def test_all_positions_leave_padding_out():
    samples = ace.Samples.from_tokens(TOKENS, "all", labels=TOKENS, attention_mask=RIGHT)
    assert samples.labels.tolist() == [1, 2, 5, 6, 7, 8, 9, 10, 11]
    assert torch.equal(samples.at(TOKENS), samples.labels)


def test_given_positions():
    samples = ace.Samples.from_tokens(TOKENS, torch.tensor([[0, 2], [1, 3], [0, 1]]))
    assert samples.at(TOKENS).tolist() == [1, 3, 6, 8, 9, 10]


def test_prompts_are_padded_by_length_and_follow_the_tokenizer(gpt2):
    samples = ace.Samples.from_prompts(gpt2, ["The keys", "the man sees the key"], labels=[True, False])
    assert samples.prepend_bos is False
    assert samples.attention_mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert samples.position.tolist() == [1, 4]
    with_bos = ace.Samples.from_prompts(gpt2, ["The keys"], prepend_bos=True)
    assert with_bos.tokens[0, 0] == 1
    assert with_bos.position.tolist() == [2]


def test_a_padding_token_inside_a_prompt_is_a_token(gpt2):
    """The mask comes from lengths, so a pad token that is also the end token is not mistaken."""
    gpt2.tokenizer.pad_token = " is"
    try:
        samples = ace.Samples.from_prompts(gpt2, ["The key is", "The key is near a cabinet"])
    finally:
        gpt2.tokenizer.pad_token = "<pad>"
    assert samples.attention_mask.sum(1).tolist() == [3, 6]
    assert samples.position.tolist() == [2, 5]


def test_choosing_samples_keeps_what_belongs_to_them():
    samples = ace.Samples.from_tokens(TOKENS, "all", labels=TOKENS, attention_mask=RIGHT)
    chosen = samples[[8, 0]]
    assert chosen.labels.tolist() == [11, 1]
    assert chosen.at(chosen.tokens).tolist() == [11, 1]
    assert len(chosen.tokens) == 2
    assert len(samples[2:4]) == 2
    assert len(samples[torch.tensor([True] + 8 * [False])]) == 1


def test_split_shares_no_sequence():
    tokens = torch.arange(40).reshape(10, 4)
    samples = ace.Samples.from_tokens(tokens, "all")
    first, second = samples.split(0.3, torch.Generator().manual_seed(0))
    assert len(first.tokens) == 3
    assert len(second.tokens) == 7
    assert not set(first.tokens[:, 0].tolist()) & set(second.tokens[:, 0].tolist())


def test_batches_cover_every_sample_once_and_cut_what_is_not_needed():
    samples = ace.Samples.from_tokens(TOKENS, torch.tensor([[1], [0], [2]]))
    batches = list(samples.batches(2))
    assert torch.cat([index for index, _ in batches]).tolist() == [0, 1, 2]
    assert [batch.tokens.shape for _, batch in batches] == [(2, 2), (1, 3)]
    assert batches[0][1].at(batches[0][1].tokens).tolist() == [2, 5]


def test_bad_samples_are_refused(native, gpt2):
    with pytest.raises(ValueError, match="There are no samples"):
        ace.Samples.from_tokens(torch.empty(0, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"Sample 1 \(sequence 0, position 2\) is padding"):
        ace.Samples.from_tokens(TOKENS, torch.tensor([[1, 2], [0, 1], [0, 1]]), attention_mask=RIGHT)
    with pytest.raises(ValueError, match="position 4\\) is outside the 4 positions"):
        ace.Samples.from_tokens(TOKENS, torch.tensor([[0], [4], [0]]))
    with pytest.raises(ValueError, match="2 labels for 3 samples"):
        ace.Samples.from_tokens(TOKENS, labels=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="row of the tokens, 0 to 2"):
        ace.Samples(TOKENS, RIGHT, torch.tensor([3]), torch.tensor([0]))
    with pytest.raises(ValueError, match="There are no prompts"):
        ace.Samples.from_prompts(gpt2, [])
    with pytest.raises(ValueError, match="Prompt 1 has no tokens"):
        ace.Samples.from_prompts(gpt2, ["The key", ""])
    with pytest.raises(ValueError, match="Labels are numbers or booleans"):
        ace.Samples.from_prompts(gpt2, ["The key"], labels=["plural"])
    with pytest.raises(ValueError, match="has no tokenizer"):
        ace.Samples.from_prompts(native, ["The key"])
    with pytest.raises(ValueError, match="no samples in this selection"):
        ace.Samples.from_tokens(TOKENS)[[]]
    with pytest.raises(TypeError, match="attention_mask"):
        ace.Samples.from_tokens(TOKENS, attention_mask=RIGHT.float())


def test_positions_come_in_every_plausible_form():
    each = torch.tensor([1, 3, 0])
    assert ace.Samples.from_tokens(TOKENS, each).at(TOKENS).tolist() == [2, 8, 9]
    assert ace.Samples.from_tokens(TOKENS, [1, 3, 0]).at(TOKENS).tolist() == [2, 8, 9]
    mask = TOKENS % 2 == 0
    chosen = ace.Samples.from_tokens(TOKENS, mask, labels=TOKENS)
    assert chosen.at(TOKENS).tolist() == chosen.labels.tolist() == [2, 4, 6, 8, 10, 12]
    assert len(chosen[0]) == 1


def test_a_single_text_is_no_list_of_prompts(gpt2):
    with pytest.raises(ValueError, match=r"write \['The key'\] for one"):
        ace.Samples.from_prompts(gpt2, "The key")
