"""The benchmarks at a tiny size, with nothing about real time asserted."""

import json
from dataclasses import replace

import pytest
import torch

import ace_lens as ace
from benchmarks import checkpoints, extraction, layers
from benchmarks.__main__ import CASES, main
from benchmarks.case import Case, Disagreement, Outcome
from benchmarks.timing import Timing, alternate


def same(found, expected):
    if found != expected:
        raise Disagreement(f"{found} is not {expected}.")


def tiny(n_outputs=2, **changes):
    case = extraction.case("tiny", 40, 16, repeats=1, n_outputs=n_outputs)
    return replace(case, **changes)


@pytest.mark.parametrize("size", [(40, 16, 1), (40, 16, 3), (12, 16, 1), (12, 30, 3)])
def test_both_ways_of_extraction_agree(size):
    given = extraction.samples(*size)
    found, expected = extraction.ours(given), extraction.direct(given)
    assert found.basis.shape == expected.basis.shape == (size[1], extraction.RANK)
    assert max(extraction.differences(found, expected)) < extraction.TOLERANCE
    assert tiny().run().passed


def test_the_planted_directions_stand_out():
    """Otherwise the subspaces of the two ways need not agree."""
    given = extraction.samples(200, 192)
    centred = given.activations - given.activations.mean(0)
    values = torch.linalg.svdvals(centred @ given.jacobians.flatten(0, 1).T)
    assert (values[: extraction.RANK] > 1.5 * values[1 : extraction.RANK + 1]).all()


def test_both_ways_of_a_sweep_agree(gpt2):
    """On a small model in place of SmolLM2, with prompts of one length."""
    margin = ace.LogitMargin(gpt2, [3, 4], [5])
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(3)]
    tokens = torch.randint(3, 30, (20, 7), generator=torch.Generator().manual_seed(3))
    samples = ace.Samples.from_tokens(tokens, labels=torch.arange(20) % 2 == 1)
    given = layers.Sweep(gpt2, ace.extract_cores(gpt2, samples, margin, names, rank=1), samples, margin)
    found, expected = layers.ours(given), layers.direct(given)
    assert found.shape == expected.shape == (3, 3)
    layers.check(found, expected)
    with pytest.raises(Disagreement, match=r"ROC AUC by .* one way is wrong"):
        layers.check(found, expected.flip(1))


@pytest.mark.parametrize("normalization", ["none", "post"])
def test_both_ways_to_a_checkpoint_agree(normalization):
    given = checkpoints.checkpoint(normalization, period=7)
    found, expected = checkpoints.ours(given), checkpoints.direct(given)
    assert found.shape == expected.shape == (2, 6)
    assert len(found.unique()) > 3
    checkpoints.check(found, expected)
    with pytest.raises(Disagreement, match="one way is wrong"):
        checkpoints.check(found, expected.flip(0))


def test_a_case_without_a_check_only_times():
    given = replace(tiny(), direct=lambda inputs: "another thing", check=None)
    assert given.run().passed


def test_prompts_of_the_sweep_pair_each_noun_with_another_of_the_other_number():
    texts, plural = layers.prompts(layers.NOUNS[layers.N_TRAIN :])
    assert len(set(texts)) == len(texts) == 64
    assert sum(plural) == 32
    assert texts[:2] == [
        "The boy near the old teachers at the end of the street",
        "The boys near the old teacher at the end of the street",
    ]


def principal_components(given):
    """Wrong: blind to what the target reads."""
    right = extraction.direct(given)
    _, axes = torch.linalg.eigh(given.activations.T.cov())
    return replace(right, basis=axes.flip(1)[:, : extraction.RANK])


def out_of_order(given):
    """Wrong: the same subspace, with its directions in another order."""
    right = extraction.direct(given)
    return replace(right, basis=right.basis.flip(1))


def not_squared(given):
    right = extraction.direct(given)
    return replace(right, eigenvalues=right.eigenvalues.sqrt())


def not_a_number(given):
    right = extraction.direct(given)
    return replace(right, basis=right.basis * torch.nan)


@pytest.mark.parametrize("wrong", [principal_components, out_of_order, not_squared, not_a_number])
def test_a_wrong_contestant_is_noticed_and_not_timed(wrong, capsys):
    outcome = tiny(direct=wrong).run()
    assert outcome.timing is None
    assert not outcome.passed
    assert "one way is wrong" in outcome.disagreement
    assert main(["tiny"], [tiny(direct=wrong)]) == 1
    assert "results differ: projectors by" in capsys.readouterr().out


def test_timing_warms_up_then_alternates_and_reports_medians():
    now, log, checked = [0.0], [], []
    durations = {"ours": iter([100.0, 1, 4, 2]), "direct": iter([100.0, 10, 20, 60])}

    def contestant(name):
        def run():
            log.append(name)
            now[0] += next(durations[name])
            return name

        return run

    def check(*results):
        log.append("check")
        checked.append(results)

    timing = alternate(contestant("ours"), contestant("direct"), check, repeats=3, clock=lambda: now[0])
    assert log == ["ours", "direct", "check", *["ours", "direct"] * 3]
    assert checked == [("ours", "direct")]
    assert timing == Timing(ours=(1, 4, 2), direct=(10, 20, 60))
    assert (timing.ours_median, timing.direct_median, timing.ratio) == (2, 20, 10)
    assert timing.range == (5, 30)


def test_timing_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one repeat, not 0"):
        alternate(lambda: 1, lambda: 1, same, repeats=0)


@pytest.mark.parametrize(("reach", "reached", "passed"), [(None, None, True), (10, True, True), (10.1, False, False)])
def test_a_ratio_to_reach(reach, reached, passed):
    outcome = Outcome("case", reach, Timing(ours=(1.0,), direct=(10.0,)))
    assert (outcome.reached, outcome.passed) == (reached, passed)


def one(**changes):
    return Case("one", inputs=lambda: 1, ours=lambda x: x, direct=lambda x: x, check=same, repeats=2, **changes)


def test_a_missed_ratio_is_the_exit_status(capsys):
    assert main([], [one()]) == 0
    assert main([], [one(reach=1e12)]) == 1
    assert ">= 1e+12: missed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["extracton-576"],
            "There is no case named 'extracton-576'. Choose from: extraction-576, extraction-4096, "
            "checkpoint-none, checkpoint-post, epoch-none, epoch-pre, epoch-post, layers-smollm2.",
        ),
        (["--repeats", "0"], "'0' is not a whole number of at least 1"),
        (
            ["--out", "nowhere/at/all.json"],
            "nowhere/at/all.json cannot be written. Give --out a file in a folder",
        ),
    ],
)
def test_errors_say_what_to_do(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_results_as_json(tmp_path, capsys):
    path = tmp_path / "results.json"
    assert main(["tiny", "--repeats", "3", "--out", str(path)], [one(), tiny()]) == 0
    results = json.loads(path.read_text())
    [found] = results["cases"]
    assert results["threads"] == 2
    assert found["case"] == "tiny"
    assert len(found["timing"]["ours"]) == len(found["timing"]["direct"]) == 3
    assert found["passed"]
    assert found["ratio"] == pytest.approx(found["direct_median"] / found["ours_median"])
    header, line = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "case"
    assert line.startswith("tiny ")
    assert len(line) == len(header)


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)
