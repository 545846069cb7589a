"""The modular addition experiment on small moduli: what it refuses, what it writes, and that nothing of it is lost."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from ace_lens.cli import main
from ace_lens.experiments import modular_addition
from ace_lens.experiments.figures import plot_modular_addition
from ace_lens.experiments.modular_addition import (
    PRESETS,
    ModularAdditionConfig,
    ModularAdditionResults,
    addition_pairs,
    build_model,
    run_modular_addition,
    split_pairs,
)


@pytest.mark.parametrize("period", [3, 4, 9, 53])
def test_all_pairs_are_there_once(period):
    pairs, sums = addition_pairs(period)
    assert len(pairs.unique(dim=0)) == period**2
    assert torch.equal(sums, (pairs[:, 0] + pairs[:, 1]) % period)
    assert torch.equal(sums.bincount(), torch.full((period,), period))
    train, held_out = split_pairs(period, 0.5, torch.Generator().manual_seed(0))
    assert len(train) == period**2 // 2
    assert torch.equal(torch.cat([train, held_out]).sort().values, torch.arange(period**2))
    again, _ = split_pairs(period, 0.5, torch.Generator().manual_seed(0))
    other, _ = split_pairs(period, 0.5, torch.Generator().manual_seed(1))
    assert torch.equal(train, again)
    assert not torch.equal(train, other)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match=r"Addition modulo 2 has no cycle to find\. Choose a period of at least 3"):
        addition_pairs(2)
    for fraction, missing in ((0.0, "train on"), (0.01, "train on"), (-1.0, "train on"), (1.0, "hold out")):
        with pytest.raises(ValueError, match=f"leaves no pair to {missing}. Choose a share between 0 and 1"):
            split_pairs(5, fraction, torch.Generator())
    with pytest.raises(ValueError, match=r"there is none at epoch 510: the quick preset keeps one every 50 epochs"):
        ModularAdditionConfig(branch_at=510).resolved()
    with pytest.raises(ValueError, match=r"before the end, and there is none at epoch 100"):
        ModularAdditionConfig(epochs=100, branch_at=100).resolved()
    assert ModularAdditionConfig(epochs=100).resolved().branch_at == 0


def test_checkpoints_are_as_the_paper_has_them():
    stops = PRESETS["paper"].stops(20000)
    assert stops[:3] == [100, 200, 300]
    assert stops[19:22] == [2000, 2500, 3000]
    assert stops[-1] == 20000
    assert PRESETS["quick"].stops(120) == [50, 100, 120]


def config(folder, **options):
    return ModularAdditionConfig(
        **{"out": folder, "period": 5, "epochs": 100, "branch_at": 50, "progress": False, **options}
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("addition")
    return folder, run_modular_addition(config(folder))


def test_the_results_have_the_form_that_was_promised(finished, tmp_path):
    _, results = finished
    results.save(tmp_path / "results.json")
    assert ModularAdditionResults.load(tmp_path / "results.json") == results
    content = json.loads((tmp_path / "results.json").read_text())
    assert set(content) == {"config", "grok_epoch", "trajectory", "branch"}
    assert [point["epoch"] for point in content["trajectory"]] == [50, 100]
    assert [point["epoch"] for point in content["branch"]] == [100]
    promised = "epoch train_accuracy test_accuracy rank r_suf r_nec keep remove eigenvalues unit_circle modes r2"
    assert set(promised.split()) <= set(content["trajectory"][0])
    assert content["config"]["period"] == 5
    assert content["config"]["branch_at"] == 50


def test_the_same_seed_gives_the_same_results_and_another_does_not(finished, tmp_path):
    _, results = finished
    assert run_modular_addition(config(tmp_path / "again")) == results
    other = run_modular_addition(config(tmp_path / "other", seed=1))
    assert other.trajectory != results.trajectory


@pytest.mark.parametrize("normalization", ["none", "pre", "post"])
def test_a_run_killed_three_times_ends_in_the_same_results(normalization, tmp_path, monkeypatch):
    options = {"normalization": normalization, "branch_at": 0}
    whole = run_modular_addition(config(tmp_path / "whole", **options))
    calls = []

    class Killed(Exception):
        pass

    def built(*arguments):
        model = build_model(*arguments)

        def count(module, inputs):
            calls.append(1)
            if len(calls) in (20, 60, 135):
                raise Killed

        model.register_forward_pre_hook(count)
        return model

    with monkeypatch.context() as patch:
        patch.setattr(modular_addition, "build_model", built)
        for _ in range(3):
            with pytest.raises(Killed):
                run_modular_addition(config(tmp_path / "killed", **options))
    assert run_modular_addition(config(tmp_path / "killed", **options)) == whole


def test_more_epochs_go_on_and_another_configuration_is_refused(finished, tmp_path):
    _, results = finished
    run_modular_addition(config(tmp_path, epochs=60))
    assert run_modular_addition(config(tmp_path)) == results
    with pytest.raises(ValueError, match=r"another configuration \(period 5 there, 7 here\)\. Choose another folder"):
        run_modular_addition(config(tmp_path, period=7))
    with pytest.raises(ValueError, match=r"\(weight_decay 1\.0 there, 2\.0 here, seed 0 there, 3 here\)"):
        run_modular_addition(config(tmp_path, weight_decay=2.0, seed=3))


def test_a_table_a_figure_and_a_composite_modulus(tmp_path, capsys):
    arguments = "modular-addition --period 6 --epochs 100 --branch-at 50 --normalization post --no-progress --out"
    main([*arguments.split(), str(tmp_path)])
    printed = capsys.readouterr().out
    assert "Addition modulo 6, normalisation post, weight decay 1, seed 0 (quick preset)." in printed
    assert "Without weight decay from epoch 50 on:" in printed
    assert "takes it to 2/p = 0.333" in printed
    assert (tmp_path / "modular-addition.png").stat().st_size > 20000
    results = ModularAdditionResults.load(tmp_path / "results.json")
    figure = plot_modular_addition(results)
    titles = [axes.get_title(loc="left")[:1] for axes in figure.axes]
    assert {"a", "b", "d", "e"} <= set(titles)


def test_errors_on_the_command_line_are_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"^ace-lens: Addition modulo 2 has no cycle to find"):
        main(["modular-addition", "--period", "2", "--out", str(tmp_path)])


RESULTS = Path(__file__).parents[1] / "tutorials" / "modular-addition"


def test_the_results_in_the_repository_are_what_the_readme_says():
    """The paper's architecture: condensed at grokking, inflated by weight decay, and not without it."""
    assert sum(path.stat().st_size for path in RESULTS.glob("*.json")) < 1_000_000
    results = ModularAdditionResults.load(RESULTS / "post-norm.json")
    assert results.config["normalization"] == "post"
    assert results.trajectory[-1].epoch >= 6000
    points = {point.epoch: point for point in results.trajectory}
    grokked, last = points[results.grok_epoch], results.trajectory[-1]
    assert points[100].unit_circle < 0.2
    assert points[600].rank == 15
    condensed = points[2000]
    assert condensed.rank == condensed.r_nec == 2 * len(condensed.modes) == 14
    assert condensed.unit_circle == 1
    assert last.r_nec >= 2 * grokked.r_nec
    later = [point.r_suf for point in results.trajectory if point.epoch >= results.grok_epoch]
    assert min(later) >= grokked.r_suf / 1.5
    assert max(later) <= 1.5 * grokked.r_suf
    assert max(point.r_nec for point in results.branch) <= 14
    assert {len(point.modes) for point in results.branch} == {7}
    assert max(len(point.modes) for point in results.trajectory if point.epoch > 4000) == 10


def test_the_inflated_core_stays_and_fills_up_no_further():
    short, long = (ModularAdditionResults.load(RESULTS / f"{name}.json") for name in ("post-norm", "post-norm-long"))
    assert long.trajectory[: len(short.trajectory)] == short.trajectory
    later = [point for point in long.trajectory if point.epoch >= 6500]
    assert (later[-1].epoch, later[-1].r_nec) == (20000, 21)
    assert {17, 22} <= {point.r_nec for point in later} <= set(range(17, 23))
    assert {len(point.modes) for point in later} == {8, 9, 10}
    assert min(point.test_accuracy for point in later) > 0.999


def test_without_normalisation_the_core_stays_condensed():
    results = ModularAdditionResults.load(RESULTS / "no-norm.json")
    assert (results.config["normalization"], results.config["seed"]) == ("none", 1)
    assert results.trajectory[-1].epoch >= 4000
    assert results.trajectory[0].unit_circle < 0.2
    for point in results.trajectory:
        if point.epoch >= results.grok_epoch:
            assert point.test_accuracy >= 0.99
            assert point.rank == 2 * len(point.modes) == 6
            assert abs(point.r_suf - point.rank) <= 1
            assert abs(point.r_nec - point.rank) <= 1
            assert point.unit_circle == 1
            assert point.r2 >= 0.95
            assert abs(point.keep - point.test_accuracy) <= 0.005
            assert point.remove <= 2 / 53


def test_layernorm_before_each_part_groks_inflated_and_does_not_stay():
    results = ModularAdditionResults.load(RESULTS / "pre-norm.json")
    assert (results.config["normalization"], results.config["seed"], results.grok_epoch) == ("pre", 0, 600)
    points = {point.epoch: point for point in results.trajectory}
    for epoch in (600, 700):
        assert points[epoch].r_nec == 51
        assert 14 <= points[epoch].r_suf <= 22
        assert points[epoch].unit_circle < 0.3
    lost = [point.test_accuracy < 0.5 for point in results.trajectory if point.epoch >= results.grok_epoch]
    assert sum(before < now for before, now in itertools.pairwise(lost)) >= 5
    assert (points[3500].r_suf, points[3500].r_nec) == (7, 11)
    assert points[3500].test_accuracy > 0.995
    assert points[4000].train_accuracy < 0.05
