import pytest
import torch

import ace_lens as ace

TARGET = ace.CentredLogits([3, 5, 8])
HOOK_POINTS = ["blocks.2.hook_resid_pre", "blocks.2.hook_resid_post"]


@pytest.fixture
def labelled(native, tokens):
    generator = torch.Generator().manual_seed(4)
    samples = ace.Samples.from_tokens(torch.randint(3, 30, (24, 3), generator=generator), "all")
    with torch.no_grad():
        labels = TARGET(samples.at(native(samples.tokens))).argmax(1)
    samples = ace.Samples(samples.tokens, samples.attention_mask, samples.sequence, samples.position, labels)
    return samples.split(0.6, torch.Generator().manual_seed(0))


def test_choices_and_verdict_are_made_on_different_data(native, labelled, tmp_path):
    samples, held_out = labelled
    core, proof = ace.find_core(native, samples, TARGET, HOOK_POINTS, held_out=held_out, max_rank=2)
    assert set(proof.selection) == set(HOOK_POINTS)
    assert (core.hook_point, core.rank) == (proof.hook_point, proof.rank)
    extracted_on = core.provenance.n_samples
    chosen_on = proof.selection[proof.hook_point].judged_on
    assert extracted_on + int(chosen_on.split()[0]) == len(samples)
    assert proof.verdict.judged_on == f"{len(held_out)} samples in {len(held_out.tokens)} sequences"
    assert proof.controls.judged_on == proof.verdict.judged_on
    assert proof.selection[proof.hook_point].score == "cross-entropy"
    assert proof.verdict.score == "accuracy"
    assert "Chosen among 2 hook points" in str(proof)
    proof.save(tmp_path / "proof.json")
    assert ace.Proof.load(tmp_path / "proof.json") == proof


def test_the_same_generator_finds_the_same_core(native, labelled):
    samples, held_out = labelled
    first, again = (
        ace.find_core(
            native,
            samples,
            TARGET,
            HOOK_POINTS[1:],
            held_out=held_out,
            max_rank=3,
            controls=False,
            generator=torch.Generator().manual_seed(7),
        )
        for _ in range(2)
    )
    assert torch.equal(first[0].basis, again[0].basis)
    assert first[1] == again[1]
    assert first[1].controls is None


def test_no_hook_points_are_refused(native, labelled):
    with pytest.raises(ValueError, match="no hook points to choose from"):
        ace.find_core(native, labelled[0], TARGET, [], held_out=labelled[1])


def test_held_out_sequences_must_be_others(native, labelled):
    samples, _ = labelled
    with pytest.raises(ValueError, match="held-out sequences are among those to choose on"):
        ace.find_core(native, samples, TARGET, HOOK_POINTS, held_out=samples)
