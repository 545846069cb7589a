import pytest
import torch
from conftest import N_LAYERS, build

import ace_lens as ace

HOOK_POINT = f"blocks.{N_LAYERS - 1}.hook_resid_post"
TARGET = ace.CentredLogits([3, 5, 8])


@pytest.fixture
def labelled(native, tokens):
    samples = ace.Samples.from_tokens(tokens.repeat(4, 1).flip(1).roll(1, 0), "all")
    with torch.no_grad():
        labels = TARGET(samples.at(native(samples.tokens))).argmax(1)
    samples = ace.Samples(samples.tokens, samples.attention_mask, samples.sequence, samples.position, labels)
    return samples.split(0.5, torch.Generator().manual_seed(0))


def test_a_model_s_own_core_transplants_without_loss(native, labelled):
    """The map is then the identity, so everything stays as it was; other samples' coordinates do harm."""
    fit, judge = labelled
    core = ace.extract_core(native, fit, TARGET, HOOK_POINT, rank=8)
    report = ace.transplant(native, core, native, core, judge, TARGET, fit=fit)
    assert report.score == "accuracy"
    assert report.transplanted.value == pytest.approx(report.baseline.value) == pytest.approx(1)
    assert report.map_r2 == pytest.approx(1, abs=1e-6)
    assert report.shuffled.high < 0.85
    printed = str(report)
    assert "R2 of the map 1.000" in printed
    assert "shuffled pairs" in printed


def test_a_rotated_twin_shares_the_core(tokenizer, native, labelled):
    """The same network in another basis of its core coordinates: only the map differs."""
    fit, judge = labelled
    core = ace.extract_core(native, fit, TARGET, HOOK_POINT, rank=8)
    rotation, _ = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    turned = ace.Core(core.basis @ rotation, core.mean, core.singular_values, core.hook_point, core.provenance)
    report = ace.transplant(build("native", tokenizer), turned, native, core, judge, TARGET, fit=fit)
    assert report.transplanted.value == pytest.approx(report.baseline.value)
    assert report.map_r2 == pytest.approx(1, abs=1e-6)


def test_it_saves_and_loads_back_equal(native, labelled, tmp_path):
    fit, judge = labelled
    core = ace.extract_core(native, fit, TARGET, HOOK_POINT, rank=2)
    report = ace.transplant(native, core, native, core, judge, TARGET, fit=fit, n_draws=2, n_bootstrap=10)
    report.save(tmp_path / "transplant.json")
    assert ace.Transplant.load(tmp_path / "transplant.json") == report


def test_donor_and_receiver_need_the_same_samples(native, labelled):
    fit, judge = labelled
    core = ace.extract_core(native, fit, TARGET, HOOK_POINT, rank=2)
    with pytest.raises(ValueError, match="need the same samples"):
        ace.transplant(native, core, native, core, judge, TARGET, fit=fit, donor_fit=fit, donor_samples=judge[:5])


def test_both_parts_are_needed_in_the_donor_s_tokens(native, labelled):
    fit, judge = labelled
    core = ace.extract_core(native, fit, TARGET, HOOK_POINT, rank=2)
    with pytest.raises(ValueError, match="donor_fit and donor_samples, or neither"):
        ace.transplant(native, core, native, core, judge, TARGET, fit=fit, donor_samples=judge)
