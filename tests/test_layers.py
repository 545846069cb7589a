from dataclasses import replace

import pytest
import torch
from conftest import N_LAYERS, random_core

import ace_lens as ace
from ace_lens.validation import intervention

HOOK_POINTS = [f"blocks.{layer}.hook_resid_post" for layer in range(N_LAYERS)]


@pytest.fixture
def samples(tokens):
    return ace.Samples.from_tokens(tokens, labels=torch.arange(6) % 2)


def test_a_sweep_is_a_validation_at_every_layer(model, samples, tmp_path):
    margin = ace.LogitMargin(model, [3, 4], [5])
    cores = ace.extract_cores(model, samples, margin, HOOK_POINTS, rank=1)
    sweep = ace.sweep_layers(model, cores, samples, margin, n_bootstrap=50)
    assert sweep.hook_points == tuple(HOOK_POINTS)
    assert sweep.ranks == (1,) * N_LAYERS
    for index, core in enumerate(cores.values()):
        alone = ace.validate(model, core, samples, margin, n_bootstrap=50)
        assert (sweep.baseline, sweep.score, sweep.chance) == (alone.baseline, alone.score, alone.chance)
        for name in ("keep", "remove", "flip"):
            assert getattr(sweep, name)[index] == getattr(alone, name)[0]
    sweep.save(tmp_path / "sweep.json")
    assert ace.LayerSweep.load(tmp_path / "sweep.json") == sweep
    lines = str(sweep).splitlines()
    assert lines[1] == "chosen on 6 samples; judged on 6 samples in 6 sequences"
    assert lines[2] == "ROC AUC, chance 0.500 (95% intervals)"
    assert lines[3].split() == ["hook", "point", "rank", "none", "keep", "remove", "flip"]
    assert lines[4].startswith("blocks.0.hook_resid_post     1  ")
    assert f"{sweep.flip[0]:.3f}" in lines[4]


def test_every_fold_is_judged_with_cores_of_the_others(model, samples):
    margin = ace.LogitMargin(model, [3, 4], [5])
    folds = [0, 0, 1, 2, 1, 2]
    cores, sweep = ace.crossfit_layers(model, samples, margin, HOOK_POINTS, folds, n_bootstrap=20)
    whole = ace.extract_cores(model, samples, margin, HOOK_POINTS, rank=1)
    assert list(cores) == HOOK_POINTS
    outputs = {name: torch.empty(6, 1) for name in ("keep", "remove", "flip")}
    for fold in range(3):
        inside = torch.tensor([index for index in range(6) if folds[index] == fold])
        outside = torch.tensor([index for index in range(6) if folds[index] != fold])
        core = ace.extract_core(model, samples[outside], margin, HOOK_POINTS[1], rank=1)
        core = replace(core, mean=whole[HOOK_POINTS[1]].mean)
        for name, edited in outputs.items():
            edit = intervention(core, name).apply
            result = ace.edited_outputs(
                model,
                samples[inside],
                margin,
                HOOK_POINTS[1],
                lambda activations, index, edit=edit: [("x", edit(activations))],
            )
            edited[inside] = result.edited["x"]
    for name, edited in outputs.items():
        expected = ace.ROC_AUC.function(edited, samples.labels, edited)
        assert getattr(sweep, name)[1].value == pytest.approx(float(expected))
    for name in HOOK_POINTS:
        assert cores[name].provenance.n_samples == 6
        torch.testing.assert_close(cores[name].basis, whole[name].basis)
        torch.testing.assert_close(cores[name].mean, whole[name].mean)
    assert "chosen on cores of the other 2 of 3 folds; judged on 6 samples in 6 sequences, fold by fold" in str(sweep)


def test_folds_that_do_not_serve_are_refused(model, samples, tokens):
    margin = ace.LogitMargin(model, [3], [5])
    with pytest.raises(ValueError, match=r"6 samples have one fold each, but the folds are \[2\]"):
        ace.crossfit_layers(model, samples, margin, HOOK_POINTS, [0, 1])
    with pytest.raises(ValueError, match=r"There is one fold only, .* Give two folds or more"):
        ace.crossfit_layers(model, samples, margin, HOOK_POINTS, [3] * 6)
    several = ace.Samples.from_tokens(tokens, "all")
    for split in (several, several.one_per_row()):
        labelled = replace(split, labels=torch.arange(len(split)) % 2)
        with pytest.raises(ValueError, match="A sequence stands in two folds"):
            ace.crossfit_layers(model, labelled, margin, HOOK_POINTS, torch.arange(len(split)) % 2)
    with pytest.raises(ValueError, match="against labels, but the samples have none"):
        ace.crossfit_layers(model, several, margin, HOOK_POINTS, several.sequence)
    with pytest.raises(ValueError, match="There are no hook points to try"):
        ace.crossfit_layers(model, samples, margin, [], [0, 0, 0, 1, 1, 1])


def test_cores_that_do_not_fit_are_refused(model, samples):
    margin = ace.LogitMargin(model, [3], [5])
    with pytest.raises(ValueError, match="There are no cores to try"):
        ace.sweep_layers(model, {}, samples, margin)
    with pytest.raises(ValueError, match=r"given for blocks\.0\.hook_resid_post lives at blocks\.1\.hook_resid_post"):
        ace.sweep_layers(model, {HOOK_POINTS[0]: random_core(1, HOOK_POINTS[1])}, samples, margin)
    with pytest.raises(ValueError, match="has width 32"):
        ace.sweep_layers(model, {HOOK_POINTS[0]: random_core(1, HOOK_POINTS[0], d_model=16)}, samples, margin)


def test_auc_of_resamples_is_that_of_scoring_each():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randint(5, (30, 1), generator=generator).float()
    labels = torch.randint(2, (30,), generator=generator)
    counts = torch.randint(3, (8, 30), generator=generator)
    counts[0] = labels  # draws of one label only have no AUC
    found = ace.ROC_AUC.resampled(outputs, labels, counts)
    assert found[0].isnan()
    for drawn, auc in zip(counts[1:], found[1:], strict=True):
        index = torch.arange(30).repeat_interleave(drawn)
        chosen, plural = outputs[index, 0], labels[index].bool()
        pairs = chosen[plural, None] - chosen[~plural]
        expected = (pairs > 0).double().mean() + 0.5 * (pairs == 0).double().mean()
        assert auc == pytest.approx(float(expected), abs=1e-12)
        assert ace.ROC_AUC.function(outputs[index], labels[index], outputs[index]) == pytest.approx(float(auc))
