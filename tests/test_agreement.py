"""The agreement experiment: its workings on a small model, its claims on real weights."""

import itertools
import json

import pytest
import torch
from conftest import build

import ace_lens as ace
from ace_lens.cli import main
from ace_lens.experiments import agreement
from ace_lens.experiments.agreement import AgreementConfig, AgreementResults, run_agreement
from ace_lens.experiments.agreement_answers import answer_sets
from ace_lens.experiments.agreement_prompts import make_prompts, prompt_samples
from ace_lens.experiments.figures import plot_agreement
from ace_lens.models import run

NOUNS = {"key": "keys", "cabinet": "cabinets", "man": "men"}


def write_prompts(path):
    """Twins of every head, attractor and opening that the small tokenizer knows."""
    lines = ["prompt,number"]
    for head, attractor in itertools.permutations(NOUNS, 2):
        for opening, middle in itertools.product(["The", "The old"], ["near the", "to the", "near a", "to the old"]):
            lines.append(f"{opening} {head} {middle} {NOUNS[attractor]},singular")
            lines.append(f"{opening} {NOUNS[head]} {middle} {attractor},plural")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def small_models(tokenizer, monkeypatch):
    """`load_model` gives small models by name."""
    kinds = {"one": "gpt2", "two": "llama"}
    monkeypatch.setattr(ace, "load_model", lambda spec: build(kinds[spec], tokenizer))


def test_two_models_from_the_command_line(small_models, tmp_path, capsys):
    prompts = write_prompts(tmp_path / "prompts.csv")
    arguments = ["--prompts", str(prompts), "--transfer", str(prompts), "--n-continued", "2", "--n-new-tokens", "3"]
    main(["agreement", "--model", "one", "--model", "two", *arguments, "--no-progress", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "random axes reach" in printed
    assert "transplanted into two" in printed
    assert "prompts.csv (96 prompts)" in printed
    results = AgreementResults.load(tmp_path / "out" / "results.json")
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(content) == {"config", "models", "pairs"}
    promised = "name n_layers layer base_auc keep_auc remove_auc flip_auc knob_r2 sweep controls generation"
    assert set(promised.split()) <= set(content["models"][0])
    assert [row["layer"] for row in content["models"][0]["sweep"]] == [0, 1, 2]
    assert set(content["pairs"][0]) >= {"models", "spearman", "interval", "p"}
    assert content["pairs"][0]["models"] == ["one", "two"]
    for model in results.models:
        row = model.sweep[model.layer]
        assert (row.keep, row.remove, row.flip) == (model.keep_auc, model.remove_auc, model.flip_auc)
        core = ace.Core.load(tmp_path / "out" / f"core-{model.name}.safetensors")
        assert core.rank == 1
        assert core.hook_point == f"blocks.{model.layer}.hook_resid_post"
    assert (tmp_path / "out" / "agreement.png").stat().st_size > 20000
    assert len(plot_agreement(results).axes) == 9


def test_one_model_needs_no_pair(small_models, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.csv")
    out = tmp_path / "out"
    config = AgreementConfig(model=("one",), prompts=prompts, out=out, n_continued=1, n_new_tokens=2, progress=False)
    results = run_agreement(config)
    assert AgreementResults.load(out / "results.json") == results
    assert run_agreement(config) == results
    assert results.pairs == []
    core = ace.Core.load(agreement.core_path(out, results.models[0]))
    assert core.provenance.n_samples == 48
    assert "one" in str(results)


def test_an_interruption_costs_one_model(small_models, tmp_path, monkeypatch):
    load = ace.load_model

    def killed(spec):
        if spec == "two":
            raise KeyboardInterrupt
        return load(spec)

    monkeypatch.setattr(ace, "load_model", killed)
    prompts = write_prompts(tmp_path / "prompts.csv")
    with pytest.raises(KeyboardInterrupt):
        run_agreement(
            AgreementConfig(model=("one", "two"), prompts=prompts, out=tmp_path / "out", n_continued=1, progress=False)
        )
    results = AgreementResults.load(tmp_path / "out" / "results.json")
    assert [model.name for model in results.models] == ["one"]
    assert agreement.core_path(tmp_path / "out", results.models[0]).exists()


def test_what_cannot_be_run_is_one_line(small_models, tmp_path):
    with pytest.raises(SystemExit, match=r"ace-lens: .*missing"):
        main(["agreement", "--model", "one", "--prompts", str(tmp_path / "missing.csv")])
    path = tmp_path / "singular.csv"
    path.write_text("prompt,number\nThe key,singular\nThe man,singular\n")
    with pytest.raises(SystemExit, match=r"has prompts of one number only\. Give heads"):
        main(["agreement", "--model", "one", "--prompts", str(path)])
    with pytest.raises(ValueError, match="Name a model: --model gpt2-small"):
        run_agreement(AgreementConfig(model=()))
    with pytest.raises(ValueError, match="two models called one, whose results would be mixed up"):
        run_agreement(AgreementConfig(model=("one", "two", "one")))


def test_the_first_copula_counts():
    assert agreement._number(" is in the lamps that are") is False
    assert agreement._number(", which were") is True
    assert agreement._number(" had this isle, wash and area") is None
    assert agreement._begins_with_copula(" were seen")
    assert not agreement._begins_with_copula(" of it is")
    assert agreement._marked(" is\nwhat  they are.") == "*is* what they *are*."


@pytest.fixture(scope="module")
def real(smollm2, gemma3, tmp_path_factory):
    """Both real models, on fewer prompts than the command takes."""
    models = {"smollm2": smollm2, "gemma3": gemma3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ace, "load_model", lambda spec: models[spec])
        # Controls over so large vocabularies are most of the time; here they only have to be there.
        patch.setattr(agreement, "CONTROL_PROMPTS", 40)
        patch.setattr(agreement, "N_DRAWS", 4)
        config = AgreementConfig(
            model=("smollm2", "gemma3"),
            n_prompts=60,
            n_continued=15,
            n_new_tokens=6,
            out=tmp_path_factory.mktemp("agreement"),
            progress=False,
        )
        return run_agreement(config)


def test_number_is_one_axis_in_real_models(real):
    """On 120 held-out prompts; README's figures are from 400."""
    smollm2, gemma3 = real.models
    assert smollm2.base_auc >= 0.88
    assert gemma3.base_auc >= 0.85
    for model in real.models:
        assert model.layer >= 0.6 * model.n_layers
        assert model.keep_auc >= model.base_auc - 0.08
        assert model.remove_auc <= 0.75
        assert model.flip_auc <= 0.3
        assert model.knob_r2 >= 0.5
        assert model.turned >= 0.7
        assert 0.3 <= model.median_strength <= 1.2
        random = model.controls.row("random")
        assert random.remove.value >= model.base_auc - 0.1
        assert random.flip.value >= model.base_auc - 0.1
        # Through the first half of the depth flipping does not turn the answer round.
        assert min(row.flip for row in model.sweep[: model.n_layers // 2]) > 0.5


def test_flipped_models_write_the_other_number(real):
    for model in real.models:
        assert model.generation.n_right >= 5
        assert model.generation.flip.changed >= 0.4
        assert model.generation.adaptive.changed >= 0.5


def test_two_real_models_share_the_axis(real):
    (pair,) = real.pairs
    assert pair.spearman >= 0.6
    assert pair.interval[0] > 0.4
    assert pair.p <= 0.01
    for transplant in pair.transplants:
        assert transplant.transplanted.value >= transplant.shuffled.value + 0.2


def margins(model, target, samples, batch_size):
    found = torch.empty(len(samples))
    for paused in ace.paused_passes(model, samples, "blocks.10.hook_resid_post", batch_size=batch_size):
        found[paused.index] = target(paused.logits)[:, 0]
    return found


def test_margins_do_not_depend_on_company(smollm2):
    """Batch size, padding side, and what else is in the batch."""
    prompts = make_prompts(10, held_out=True, generator=torch.Generator().manual_seed(0))
    target = answer_sets(smollm2).margin(smollm2)
    samples = prompt_samples(smollm2, prompts)
    expected = torch.cat([margins(smollm2, target, prompt_samples(smollm2, [prompt]), 1) for prompt in prompts])
    assert len(samples.position.unique()) > 2
    for batch_size in (1, 7, 64):
        assert torch.allclose(margins(smollm2, target, samples, batch_size), expected, atol=1e-4)
    turned = torch.arange(len(samples)).flip(0)
    assert torch.allclose(margins(smollm2, target, samples[turned], 7), expected[turned], atol=1e-4)
    width = samples.tokens.shape[1]
    left = [row.roll(width - int(mask.sum())) for row, mask in zip(samples.tokens, samples.attention_mask, strict=True)]
    padded = ace.Samples.from_tokens(torch.stack(left), attention_mask=samples.attention_mask.flip(1))
    assert torch.allclose(margins(smollm2, target, padded, 7), expected, atol=1e-4)
    # Whole passes, past the cache.
    whole = target(padded.at(run(smollm2, padded.tokens, padded.attention_mask)))[:, 0]
    assert torch.allclose(whole, expected, atol=1e-4)
