import pytest
import torch
from conftest import build, padded, random_core

import ace_lens as ace
from ace_lens import downstream

TARGET = ace.CentredLogits([3, 5, 8])
HOOK_POINTS = [
    "hook_embed",
    "blocks.1.hook_resid_pre",
    "blocks.1.hook_resid_post",
    "blocks.2.hook_resid_post",
]


def naive(model, samples, intervention, hook_point):
    """One full pass a sample, with the intervention put on by hand at its own position."""
    rows = []
    for index in range(len(samples)):
        tokens = samples.tokens[samples.sequence[index]][None]
        position = int(samples.position[index])

        def edit(activation, hook, position=position):
            activation = activation.clone()
            activation[:, position] = intervention.apply(activation[:, position])
            return activation

        with torch.no_grad():
            logits = model.run_with_hooks(tokens, fwd_hooks=[(hook_point, edit)])
        rows.append(TARGET(logits[:, position]))
    return torch.cat(rows)


@pytest.mark.parametrize("hook_point", HOOK_POINTS)
def test_recomputing_downstream_agrees_with_full_passes(kind, hook_point, tokenizer, tokens):
    # transformers computes RMSNorm and softmax in float32 whatever the model's dtype.
    model = build(kind, tokenizer, torch.float32 if kind == "llama" else torch.float64)
    samples = ace.Samples.from_tokens(tokens[:3], torch.tensor([[1, 6], [4, 5], [0, 3]]))
    core = random_core(3, hook_point)
    interventions = {
        "keep": ace.ProjectionAblator(core, "keep"),
        "remove": ace.ProjectionAblator(core[:2], "remove"),
        "flip": ace.SignFlipSteerer(core),
    }

    def edits(activations, index):
        return [(name, each.apply(activations)) for name, each in interventions.items()]

    found = ace.edited_outputs(model, samples, TARGET, hook_point, edits, batch_size=4)
    tolerance = 1e-4 if kind == "llama" else 1e-9
    for name, intervention in interventions.items():
        expected = naive(model, samples, intervention, hook_point)
        torch.testing.assert_close(found.edited[name], expected, rtol=tolerance, atol=tolerance)
    assert not torch.allclose(found.clean, found.edited["keep"], rtol=1e-3)


def test_after_the_last_block_nothing_upstream_runs_again(model, tokens):
    counts = []
    point = model.hook_dict["blocks.0.hook_resid_pre"]
    point.add_hook(lambda activation, hook: counts.append(1))
    core = random_core(3, "blocks.2.hook_resid_post")
    validation = ace.validate(model, core, ace.Samples.from_tokens(tokens), TARGET, ace.KL, ranks=[1, 2, 3])
    assert len(counts) == 1
    assert validation.restarted


def test_a_model_that_restarts_wrongly_is_run_in_full(native, tokens, monkeypatch):
    monkeypatch.setattr(downstream, "_from_last_block", lambda *arguments: torch.zeros(len(tokens), native.cfg.d_vocab))
    core = random_core(3, "blocks.2.hook_resid_post")
    samples = ace.Samples.from_tokens(tokens)
    validation = ace.validate(native, core, samples, TARGET, ace.KL)
    assert not validation.restarted
    assert "every intervention was a full pass" in str(validation)


def test_padding_side_and_batching_change_nothing(model, tokens):
    right, left = padded(tokens)
    core = random_core(3)
    results = []
    for part, batch_size in ((right, 6), (left, 6), (right, 1), (left, 2)):
        samples = ace.Samples.from_tokens(part, attention_mask=(part != 0).long())
        results.append(
            ace.edited_outputs(
                model,
                samples,
                TARGET,
                core.hook_point,
                lambda activations, index: [("flip", ace.SignFlipSteerer(core).apply(activations))],
                batch_size=batch_size,
            )
        )
    for other in results[1:]:
        torch.testing.assert_close(other.clean, results[0].clean, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(other.edited["flip"], results[0].edited["flip"], rtol=1e-4, atol=1e-3)


def labelled(native, tokens):
    """Labels that the model itself gives, so that it is always right."""
    samples = ace.Samples.from_tokens(tokens, "all")
    with torch.no_grad():
        labels = TARGET(samples.at(native(tokens))).argmax(1)
    return ace.Samples(samples.tokens, samples.attention_mask, samples.sequence, samples.position, labels)


def test_the_whole_space_keeps_everything_and_its_removal_leaves_chance(native, tokens):
    samples = labelled(native, tokens)
    core = random_core(32, "blocks.2.hook_resid_post")
    validation = ace.validate(native, core, samples, TARGET, ranks=[1, 32])
    assert validation.score == "accuracy"
    assert validation.baseline.value == 1.0
    assert validation.keep[1].value == pytest.approx(1.0)
    assert validation.remove[1].value <= validation.chance
    assert validation.judged_on == "42 samples in 6 sequences"
    assert validation.r_suf == 32


def test_r_suf_and_r_nec_are_read_off_the_curves():
    def estimates(*values):
        return tuple(ace.Estimate(value, value, value) for value in values)

    validation = ace.Validation(
        score="accuracy",
        higher_is_better=True,
        baseline=ace.Estimate(1.0, 1.0, 1.0),
        chance=0.5,
        ranks=(1, 2, 3, 4),
        keep=estimates(0.6, 0.995, 1.0, 1.0),
        remove=estimates(0.9, 0.8, 0.7, 0.54),
        flip=estimates(0.5, 0.4, 0.1, 0.0),
        chosen_on="20 samples",
        judged_on="10 samples",
        sufficiency_tolerance=0.01,
        necessity_tolerance=0.1,
        restarted=True,
        description="A core",
    )
    assert (validation.r_suf, validation.r_nec, validation.redundancy) == (2, 4, 2)
    assert "sufficient from rank 2; necessary from rank 4" in str(validation)


def test_intervals_come_from_whole_sequences_and_one_seed(native, tokens):
    samples = ace.Samples.from_tokens(tokens, "all", labels=torch.arange(42).reshape(6, 7) % 3)
    core = random_core(2, "blocks.2.hook_resid_post")
    first, again = (ace.validate(native, core, samples, TARGET) for _ in range(2))
    assert first == again
    other = ace.validate(native, core, samples, TARGET, generator=torch.Generator().manual_seed(5))
    assert other.baseline.value == first.baseline.value
    assert other.baseline != first.baseline
    assert first.baseline.low <= first.baseline.value <= first.baseline.high
    # If every sample of a sequence is alike, resampling samples instead would make the interval too narrow.
    alike = ace.Samples.from_tokens(tokens, "all", labels=(torch.arange(6) % 2)[:, None].expand(6, 7))
    constant = ace.Score("share of ones", lambda outputs, labels, clean: labels.double())
    interval = ace.validate(native, core, alike, TARGET, constant, n_bootstrap=2000).baseline
    assert interval.value == 0.5
    assert interval.low == pytest.approx(1 / 6, abs=0.02)
    assert interval.high == pytest.approx(5 / 6, abs=0.02)


def test_scores_against_known_values():
    outputs = torch.tensor([[2.0], [1.0], [-1.0], [0.5]])
    labels = torch.tensor([1, 0, 0, 1])
    assert ace.ROC_AUC.function(outputs, labels, outputs).item() == 0.75
    assert ace.ROC_AUC.function(torch.zeros(4, 1), labels, outputs).item() == 0.5
    assert ace.MEAN_MARGIN.function(outputs, labels, outputs).tolist() == [2, -1, 1, 0.5]
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    classes = torch.tensor([1, 1])
    assert ace.ACCURACY.function(logits, classes, logits).tolist() == [1, 0]
    torch.testing.assert_close(
        ace.CROSS_ENTROPY.function(logits, classes, logits).float(),
        torch.nn.functional.cross_entropy(logits, classes, reduction="none"),
    )
    assert ace.KL.function(logits + 3, classes, logits).abs().max() < 1e-12
    assert ace.KL.function(-logits, classes, logits).min() > 0
    assert ace.ACCURACY.chance(labels) == 0.5
    assert ace.CROSS_ENTROPY.chance(labels) == pytest.approx(0.6931, abs=1e-4)


def test_default_scores_and_missing_labels(native, tokens):
    samples = ace.Samples.from_tokens(tokens, labels=torch.arange(6) % 2)
    core = random_core(2)
    margin = ace.LogitMargin(native, [3], [5])
    assert ace.validate(native, core, samples, margin, n_bootstrap=20).score == "ROC AUC"
    unlabelled = ace.Samples.from_tokens(tokens)
    with pytest.raises(ValueError, match="no default score for these samples"):
        ace.validate(native, core, unlabelled, margin)
    with pytest.raises(ValueError, match="'accuracy' compares outputs with labels, but the samples have none"):
        ace.validate(native, core, unlabelled, TARGET, ace.ACCURACY)
    with pytest.raises(ValueError, match="'ROC AUC' is undefined on these samples"):
        ace.validate(native, core, ace.Samples.from_tokens(tokens, labels=torch.ones(6)), margin, ace.ROC_AUC)
    with pytest.raises(ValueError, match=r"has ranks 1 to 2; it cannot be tried at \[3\]"):
        ace.validate(native, core, samples, margin, ranks=[3])
    with pytest.raises(ValueError, match="cannot be tried at no rank at all"):
        ace.validate(native, core, samples, margin, ranks=[])
    repeated = ace.validate(native, core, samples, margin, ranks=[2, 1, 2], n_bootstrap=20)
    assert repeated.ranks == (1, 2)
    with pytest.raises(ValueError, match="no chance level"):
        ace.validate(native, core, samples, TARGET, ace.KL).r_suf  # noqa: B018


def test_a_curve_over_all_ranks_is_that_of_each_rank_by_itself(native, tokens):
    """Sharing partial sums between ranks changes nothing."""
    native = native.double()
    samples = ace.Samples.from_tokens(tokens, "all", labels=tokens % 3)
    core = random_core(32, "blocks.2.hook_resid_post")
    together = ace.validate(native, core, samples, TARGET, ace.CROSS_ENTROPY, ranks=range(1, 33), n_bootstrap=2)
    for rank in (1, 2, 7, 32):
        alone = ace.validate(native, core[:rank], samples, TARGET, ace.CROSS_ENTROPY, n_bootstrap=2)
        for name in ("keep", "remove", "flip"):
            assert getattr(together, name)[rank - 1].value == pytest.approx(getattr(alone, name)[0].value, abs=1e-9)


def test_side_effects_on_other_tokens_and_on_text(gpt2, tmp_path):
    samples = ace.Samples.from_prompts(gpt2, ["The key", "The keys", "The man", "The men"], labels=[0, 1, 0, 1])
    text = ace.Samples.from_text(gpt2, ["the man sees the old key", "a cabinet"])
    assert len(text) == 6
    assert text.labels.tolist() == text.tokens[0, 1:].tolist() + text.tokens[1, 1:2].tolist()
    margin = ace.LogitMargin(gpt2, [" are"], [" is"])
    core = random_core(4, "blocks.1.hook_resid_post")
    validation = ace.validate(gpt2, core, samples, margin, ranks=[1, 4], text=text, n_bootstrap=20)
    assert set(validation.outside_kl) == {"keep", "remove", "flip"}
    assert all(value >= 0 for values in validation.outside_kl.values() for value in values)
    assert validation.perplexity["none"][0] == pytest.approx(ace.text_perplexity(gpt2, text))
    assert validation.perplexity["flip"][1] != validation.perplexity["none"][0]
    logits = gpt2(text.tokens[:1, :6])[0].detach()
    expected = torch.nn.functional.cross_entropy(logits[:-1], text.tokens[0, 1:6]).exp()
    single = ace.Samples.from_text(gpt2, ["the man sees the old key"])
    assert ace.text_perplexity(gpt2, single) == pytest.approx(float(expected), rel=1e-4)
    assert "KL outside the target" in str(validation)
    assert "perplexity on text: none" in str(validation)
    validation.save(tmp_path / "validation.json")
    assert ace.Validation.load(tmp_path / "validation.json") == validation
    with pytest.raises(ValueError, match=r"make it with Samples\.from_text"):
        ace.text_perplexity(gpt2, ace.Samples.from_prompts(gpt2, ["The key"]))


def test_kl_outside_leaves_the_target_s_own_tokens_out(native, tokens):
    """An edit of the logits of the answers alone has no side effect; one of all tokens has."""
    samples = ace.Samples.from_tokens(tokens)
    reads = ace.CentredLogits([3, 5])
    edits = lambda activations, index: [("scaled", activations * 1.5)]  # noqa: E731
    found = ace.edited_outputs(native, samples, reads, "blocks.1.hook_resid_post", edits)
    logits = native(tokens)[:, -1]
    edited = native.run_with_hooks(
        tokens,
        fwd_hooks=[
            (
                "blocks.1.hook_resid_post",
                lambda activation, hook: torch.cat([activation[:, :-1], 1.5 * activation[:, -1:]], 1),
            )
        ],
    )[:, -1]
    outside = [token for token in range(native.cfg.d_vocab) if token not in (3, 5)]
    before, after = logits[:, outside].log_softmax(1), edited[:, outside].log_softmax(1)
    expected = (before.exp() * (before - after)).sum(1).detach()
    torch.testing.assert_close(found.outside_kl["scaled"], expected, rtol=1e-3, atol=1e-5)
    whole = ace.edited_outputs(native, samples, ace.CentredLogits(), "blocks.1.hook_resid_post", edits)
    assert whole.outside_kl == {}


def test_labels_that_a_score_cannot_read_are_refused(native, tokens):
    core = random_core(2)
    token_ids = ace.Samples.from_tokens(tokens, labels=torch.full((6,), 5))
    for score in (ace.ACCURACY, ace.CROSS_ENTROPY):
        with pytest.raises(ValueError, match=r"labels number the target's outputs, 0 to 2.*token ids, perhaps"):
            ace.validate(native, core, token_ids, TARGET, score)
    signs = ace.Samples.from_tokens(tokens, labels=torch.tensor([1, -1] * 3))
    margin = ace.LogitMargin(native, [3], [5])
    with pytest.raises(ValueError, match="labels are 0 and 1, but there are others"):
        ace.validate(native, core, signs, margin, ace.MEAN_MARGIN)
    with pytest.raises(ValueError, match="compares several outputs, but the target gives one"):
        ace.validate(native, core, signs, margin, ace.KL)


def test_outputs_that_are_not_finite_are_refused(native, tokens):
    samples = ace.Samples.from_tokens(tokens, labels=torch.arange(6) % 2)
    with pytest.raises(ValueError, match="NaN or infinite in batch 0 under the unedited model"):
        ace.validate(native, random_core(2), samples, lambda logits: logits[:, :2] * torch.nan)
    edits = lambda activations, index: [("broken", activations * torch.nan)]  # noqa: E731
    with pytest.raises(ValueError, match="in batch 0 under broken"):
        ace.edited_outputs(native, samples, TARGET, "blocks.2.hook_resid_post", edits)
    twice = lambda activations, index: [("same", activations), ("same", activations)]  # noqa: E731
    with pytest.raises(ValueError, match="Two edits are called 'same'"):
        ace.edited_outputs(native, samples, TARGET, "blocks.2.hook_resid_post", twice)


def test_a_model_at_chance_has_nothing_to_explain(native, tokens):
    samples = ace.Samples.from_tokens(tokens, "all", labels=torch.arange(42).reshape(6, 7) * 5 % 2)
    validation = ace.validate(native, random_core(3), samples, ace.LogitMargin(native, [3], [5]), ranks=[1, 2])
    assert not validation.above_chance
    assert "not better than chance without intervention" in str(validation)
    with pytest.raises(ValueError, match="nothing to explain"):
        validation.r_suf  # noqa: B018


def test_a_user_s_hook_on_resid_pre_comes_before_our_edit(kind, model, tokens):
    """Starting at a layer would fire it again after the edit; last tokens by themselves pass it once."""
    hook_point = "blocks.1.hook_resid_pre"
    model.hook_dict[hook_point].add_hook(lambda activation, hook: torch.zeros_like(activation))
    samples = ace.Samples.from_tokens(tokens)
    edits = lambda activations, index: [("shifted", activations + torch.arange(32.0))]  # noqa: E731
    found = ace.edited_outputs(model, samples, TARGET, hook_point, edits)
    assert found.restarted == (kind in ("gpt2", "llama"))
    assert not torch.allclose(found.edited["shifted"], found.clean, rtol=1e-3)
