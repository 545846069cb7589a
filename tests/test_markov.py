"""The experiment from end to end, at a fraction of its size; `ace-lens markov` itself is run in CI."""

import json

import pytest
import torch

import ace_lens as ace
from ace_lens import cli
from ace_lens.experiments import markov


def test_chains_follow_the_transition_matrix():
    chains = markov.sample_chains(2000, torch.Generator().manual_seed(0))
    counts = torch.zeros(4, 4, dtype=torch.float64)
    counts.index_put_((chains[:, :-1].flatten(), chains[:, 1:].flatten()), torch.tensor(1.0).double(), accumulate=True)
    torch.testing.assert_close(counts / counts.sum(1, keepdim=True), markov.transition_matrix(), rtol=0, atol=0.01)
    assert torch.equal(chains, markov.sample_chains(2000, torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """One run of the command with two seeds and a single epoch."""
    out = tmp_path_factory.mktemp("markov")
    patch = pytest.MonkeyPatch()
    patch.setitem(markov.PRESETS, "quick", {"epochs": 2, "learning_rate": 2e-3})
    patch.setattr(markov, "CONTROL_SEQUENCES", 60)
    threads = torch.get_num_threads()
    cli.main(["markov", "--out", str(out), "--seeds", "0", "1", "--no-progress"])
    torch.set_num_threads(threads)
    patch.undo()
    return out


def test_results_have_the_documented_form_and_reach(output):
    results = json.loads((output / "results.json").read_text())
    assert results["preset"] == "quick"
    assert results["truth"]["chance"] == 0.25
    assert results["truth"]["accuracy"] == 0.75
    assert sorted(results["truth"]["eigenvalues"])[0] == pytest.approx([0.5, 0])
    assert [model["seed"] for model in results["models"]] == [0, 1]
    for model in results["models"]:
        assert model["accuracy"] >= 0.745
        assert model["rank"] == 3
        assert abs(model["keep"] - model["accuracy"]) <= 0.005
        assert model["remove"] <= 0.30
        assert model["eigenvalue_error"] <= 0.06
        assert model["r2_over_oracle"] == pytest.approx(model["r2"] / 0.5)
    (pair,) = results["pairs"]
    assert pair["models"] == [0, 1]
    assert abs(pair["weight_cosine"]) < 0.05
    assert pair["overlap"] <= 0.15
    assert min(pair["cca"][:2]) >= 0.97


def test_results_load_back_equal(output, tmp_path):
    results = markov.MarkovResults.load(output / "results.json")
    results.save(tmp_path / "again.json")
    assert markov.MarkovResults.load(tmp_path / "again.json") == results
    assert (tmp_path / "again.json").read_bytes() == (output / "results.json").read_bytes()


def test_each_core_transplants_into_the_other_model(output):
    results = markov.MarkovResults.load(output / "results.json")
    for report in results.pairs[0].transplants:
        assert abs(report.transplanted.value - report.baseline.value) <= 0.02
        assert abs(report.shuffled.value - 0.25) <= 0.02
    for model in results.models:
        random = model.controls.row("random")
        assert abs(random.remove.value - model.controls.baseline.value) < 0.05


def test_cores_and_the_figure_are_written(output):
    for seed in (0, 1):
        core = ace.Core.load(output / f"core-seed{seed}.safetensors")
        assert core.rank == 3
        assert core.hook_point == markov.HOOK_POINT
        assert core.provenance.model_name == "native"
    assert (output / "markov.png").read_bytes().startswith(b"\x89PNG")


def test_help_says_what_there_is(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["markov", "--help"])
    assert stop.value.code == 0
    assert "--preset {quick,paper}" in capsys.readouterr().out


def test_an_unknown_preset_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["markov", "--preset", "slow"])
    assert stop.value.code == 2
    assert "slow" in capsys.readouterr().err


def test_a_core_that_is_too_small_fails_by_itself():
    """A model whose core has two dimensions has no third eigenvalue; the others' results are not lost."""
    states = torch.randn(20, 6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth = torch.tensor([0.75 + 0.25j, 0.75 - 0.25j, 0.5 + 0j])
    fields = markov._dynamics(states[:10], states[10:], truth, torch.Generator())
    assert fields["eigenvalue_error"] == float("inf")
    assert len(fields["eigenvalues"]) == 3
    assert markov._spectrum(fields["eigenvalues"]) == "core too small"
