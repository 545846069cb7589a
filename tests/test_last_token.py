"""Last tokens by themselves give what full passes give, or are not relied on."""

import pytest
import torch
from conftest import N_LAYERS, build, padded, random_core, sharpened
from transformer_lens.model_bridge import TransformerBridge
from transformers import Gemma2Config, Gemma2ForCausalLM
from transformers.cache_utils import DynamicCache

import ace_lens as ace
from ace_lens import last_token, probe
from ace_lens.downstream import edited_at_each, paused_passes
from ace_lens.last_token import LastTokenPass, replayable, tried_on_few

TARGET = ace.CentredLogits([3, 5, 8])
RESIDUALS = [f"blocks.{layer}.hook_resid_post" for layer in range(N_LAYERS)]
HOOK_POINTS = ["hook_embed", "blocks.0.hook_resid_pre", *RESIDUALS]
WITH_CACHE = ["gpt2", "llama", "gemma2"]


@pytest.fixture(params=WITH_CACHE)
def cached(request, tokenizer):
    return with_cache(request.param, tokenizer)


def with_cache(kind, tokenizer, dtype=torch.float32):
    """Gemma 2 has windows (here shorter than the prompts) in every other layer, soft caps and scaled embeddings."""
    if kind != "gemma2":
        return build(kind, tokenizer, dtype)
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=3,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=0,
    )
    config.architectures = ["Gemma2ForCausalLM"]
    model = TransformerBridge.boot_transformers(
        "google/gemma-2-2b", hf_model=Gemma2ForCausalLM(config), tokenizer=tokenizer, device="cpu"
    )
    return sharpened(model).to(dtype).eval()


def edits_at(hook_point, rank=2):
    core = random_core(rank, hook_point)
    interventions = {
        "keep": ace.ProjectionAblator(core, "keep"),
        "remove": ace.ProjectionAblator(core, "remove"),
        "flip": ace.SignFlipSteerer(core),
    }
    return lambda activations, index: [(name, each.apply(activations)) for name, each in interventions.items()]


EDITS = {name: edits_at(name) for name in HOOK_POINTS}


def found_by_full_passes(model, rows):
    """Outputs by hook point and edit, each prompt by itself and unpadded, edited by a hook at its last token."""
    found = {}
    for name, edit in EDITS.items():
        for index, row in enumerate(rows):

            def put(activation, hook, edit=edit, wanted=None):
                edited = dict(edit(activation[:, -1], None))[wanted]
                return torch.cat([activation[:, :-1], edited[:, None]], 1)

            for wanted in ("keep", "remove", "flip"):
                hooks = [(name, lambda activation, hook, wanted=wanted, put=put: put(activation, hook, wanted=wanted))]
                with torch.no_grad():
                    logits = model.run_with_hooks(row[None], fwd_hooks=hooks)
                found.setdefault((name, wanted), [None] * len(rows))[index] = TARGET(logits[:, -1])[0]
    return {key: torch.stack(outputs) for key, outputs in found.items()}


def prompts_of_many_lengths(tokens):
    return [tokens[row, :length] for row, length in enumerate([3, 7, 5, 1, 6, 7])]


def padded_samples(rows, side):
    pad = torch.nn.utils.rnn.pad_sequence
    padded_rows = pad(rows, batch_first=True, padding_side=side)
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return ace.Samples.from_tokens(padded_rows, attention_mask=mask)


def assert_agree(found, expected, tolerance, order=slice(None), n_rows=None):
    for (name, edit), outputs in expected.items():
        atol = tolerance * float(outputs.abs().max())
        torch.testing.assert_close(found[name].edited[edit][:n_rows], outputs[order], rtol=tolerance, atol=atol)


@pytest.mark.parametrize("kind", WITH_CACHE)
def test_every_layer_agrees_with_full_passes_whatever_the_batch(kind, tokenizer, tokens):
    dtype = torch.float64 if kind == "gpt2" else torch.float32
    model = with_cache(kind, tokenizer, dtype)
    rows = prompts_of_many_lengths(tokens)
    expected = found_by_full_passes(model, rows)
    assert not torch.allclose(expected["hook_embed", "keep"], expected["hook_embed", "flip"], rtol=1e-2)
    tolerance = 1e-9 if kind == "gpt2" else 1e-5
    shuffled = torch.tensor([4, 1, 5, 0, 3, 2])
    for side in ("left", "right"):
        samples = padded_samples(rows, side)
        assert tried_on_few(model, samples) is not None
        for batch_size in (1, 4, 64):
            found = edited_at_each(model, samples, TARGET, EDITS, batch_size=batch_size)
            assert all(each.restarted for each in found.values())
            assert_agree(found, expected, tolerance)
        assert_agree(edited_at_each(model, samples[shuffled], TARGET, EDITS), expected, tolerance, shuffled)
    longer = padded_samples([*rows, tokens.flatten()[:20]], "right")
    found = edited_at_each(model, longer, TARGET, EDITS)
    assert_agree(found, expected, tolerance, n_rows=6)


@pytest.mark.parametrize("kind", WITH_CACHE)
def test_prompts_of_one_token_need_no_cache(kind, tokenizer, tokens):
    model = with_cache(kind, tokenizer)
    rows = list(tokens[:, :1])
    found = edited_at_each(model, padded_samples(rows, "right"), TARGET, EDITS)
    assert all(each.restarted for each in found.values())
    assert_agree(found, found_by_full_passes(model, rows), 1e-5)


def test_one_pass_up_to_the_last_tokens_serves_every_layer_and_intervention(gpt2, tokens):
    samples = ace.Samples.from_tokens(tokens)
    passed = []
    gpt2.hook_dict["blocks.0.hook_resid_pre"].add_hook(lambda activation, hook: passed.append(activation.shape[1]))
    gpt2.hook_dict["blocks.1.hook_resid_pre"].add_hook(lambda activation, hook: passed.append(activation.shape[1]))
    edits = {name: edits_at(name) for name in RESIDUALS}
    edited_at_each(gpt2, samples, TARGET, edits)
    # Two blocks watched: each sees what stands before once when the cache is tried, and once for the samples.
    assert passed.count(6) == 4
    # The whole prompts run only for comparison, on a few samples.
    assert passed.count(7) == 2


class Unrelated(Exception):
    pass


def test_the_user_s_hooks_act_and_stay_and_ours_leave(cached, tokens):
    """A hook on every position, in the middle of what is replayed."""
    point = cached.hook_dict["blocks.1.hook_resid_post"]
    seen = []

    def amplify(activation, hook):
        seen.append(activation.shape)
        return 1.5 * activation

    rows = prompts_of_many_lengths(tokens)
    without = found_by_full_passes(cached, rows)
    point.add_hook(amplify)
    attached_before = len(point.fwd_hooks)
    expected = found_by_full_passes(cached, rows)
    assert not torch.allclose(expected["hook_embed", "flip"], without["hook_embed", "flip"], rtol=1e-2)
    seen.clear()
    found = edited_at_each(cached, padded_samples(rows, "right"), TARGET, EDITS)
    assert seen
    assert_agree(found, expected, 1e-5)

    def fail(activations, index):
        raise Unrelated

    with pytest.raises(Unrelated):
        ace.edited_outputs(cached, padded_samples(rows, "right"), TARGET, RESIDUALS[0], fail)
    last = LastTokenPass(cached, padded_samples(rows, "right"))
    with pytest.raises(Unrelated):
        last.run([(RESIDUALS[0], lambda activation, hook: fail(activation, 0))])
    assert len(point.fwd_hooks) == attached_before
    assert not cached.hook_dict[RESIDUALS[0]].fwd_hooks
    assert all(not block._forward_pre_hooks for block in cached.blocks)


def test_a_cache_that_stays_empty_is_noticed_and_results_are_right(cached, tokens, monkeypatch):
    """As with transformers 5.24 and later."""
    rows = prompts_of_many_lengths(tokens)
    samples = padded_samples(rows, "right")
    expected = found_by_full_passes(cached, rows)
    derivatives = ace.JacobianProbe(cached, TARGET, HOOK_POINTS)(samples)
    monkeypatch.setattr(DynamicCache, "update", lambda self, keys, values, *rest, **options: (keys, values))
    with pytest.warns(UserWarning, match="Prompts run in full .* because .* Results are right, but take longer"):
        found = edited_at_each(cached, samples, TARGET, EDITS)
    assert_agree(found, expected, 1e-4)
    with pytest.warns(UserWarning, match=r"transformers 5.24 or later, .* \(pip install 'transformers<5.24'\)"):
        again = ace.JacobianProbe(cached, TARGET, HOOK_POINTS)(samples)
    for name in HOOK_POINTS:
        assert_equal_probes(again[name], derivatives[name])


def test_a_hook_that_counts_on_whole_prompts_is_noticed(gpt2, tokens):
    def silence_first(activation, hook):
        activation = activation.clone()
        activation[:, 0] = 0
        return activation

    gpt2.hook_dict["blocks.0.hook_resid_post"].add_hook(silence_first)
    rows = list(tokens)
    expected = found_by_full_passes(gpt2, rows)
    with pytest.warns(UserWarning, match="logits are off by up to .* a hook of your own that counts on seeing whole"):
        found = edited_at_each(gpt2, ace.Samples.from_tokens(tokens), TARGET, EDITS)
    assert_agree(found, expected, 1e-5)


def test_a_model_whose_end_is_not_known_passes_last_tokens_whole(gpt2, tokens, monkeypatch):
    """As where logits are scaled: a replay is then wrong, and not used."""
    rows = list(tokens)
    expected = found_by_full_passes(gpt2, rows)
    samples = ace.Samples.from_tokens(tokens)
    tried = tried_on_few(gpt2, samples)
    assert replayable(tried, HOOK_POINTS) == set(HOOK_POINTS) - {"hook_embed"}
    right = last_token.unembed
    monkeypatch.setattr(last_token, "unembed", lambda model, residual: 2 * right(model, residual))
    assert replayable(tried, HOOK_POINTS) == set()
    found = edited_at_each(gpt2, samples, TARGET, EDITS)
    assert all(each.restarted for each in found.values())
    assert_agree(found, expected, 1e-5)


def assert_equal_probes(found, expected, tolerance=1e-4):
    for part in ("activations", "jacobians", "outputs"):
        right = getattr(expected, part)
        atol = tolerance * float(right.abs().max())
        torch.testing.assert_close(getattr(found, part), right, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("kind", WITH_CACHE)
def test_derivatives_from_a_graph_of_one_token_are_those_of_full_passes(kind, tokenizer, tokens, monkeypatch):
    exact = kind == "gpt2"
    model = with_cache(kind, tokenizer, torch.float64 if exact else torch.float32)
    samples = padded_samples(prompts_of_many_lengths(tokens), "right")
    seen = []
    model.hook_dict["blocks.1.hook_resid_post"].add_hook(
        lambda activation, hook: seen.append((activation.requires_grad, activation.shape[1]))
    )
    found = ace.JacobianProbe(model, TARGET, HOOK_POINTS, batch_size=4)(samples)
    assert {length for live, length in seen if live} == {1}
    monkeypatch.setattr(probe, "tried_on_few", lambda model, samples: None)
    expected = ace.JacobianProbe(model, TARGET, HOOK_POINTS, batch_size=4)(samples)
    for name in HOOK_POINTS:
        assert_equal_probes(found[name], expected[name], 1e-9 if exact else 1e-4)


def saved_for_backward(model, length, alone, monkeypatch):
    """Bytes of what the graph of an extraction keeps, over the prompt's positions and otherwise."""
    samples = ace.Samples.from_tokens(torch.randint(3, 30, (5, length), generator=torch.Generator().manual_seed(2)))
    kept = {"over the prompt": 0, "otherwise": 0}

    def keep(tensor):
        over = {length - 1, length} & set(tensor.shape)
        kept["over the prompt" if over else "otherwise"] += tensor.numel() * tensor.element_size()
        return tensor

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with monkeypatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if not alone:
            patch.setattr(probe, "tried_on_few", lambda model, samples: None)
        ace.extract_cores(model, samples, TARGET, HOOK_POINTS)
    return kept


def test_memory_of_extraction_grows_with_the_prompt_only_by_attention_over_it(cached, monkeypatch):
    short, long = (saved_for_backward(cached, length, True, monkeypatch) for length in (11, 23))
    assert short["otherwise"] == long["otherwise"]
    # Keys, values (repeated for groups of heads, in float32) and attention, at most four times each.
    per_position = N_LAYERS * 5 * 4 * (2 * 32 + 4) * 4
    assert long["over the prompt"] - short["over the prompt"] <= 12 * per_position
    whole_short, whole_long = (saved_for_backward(cached, length, False, monkeypatch) for length in (11, 23))
    growth, whole_growth = (
        sum(after.values()) - sum(before.values()) for before, after in ((short, long), (whole_short, whole_long))
    )
    assert whole_growth > 5 * growth


def test_caches_are_left_as_they_were(cached, tokens):
    rows = prompts_of_many_lengths(tokens)
    last = LastTokenPass(cached, padded_samples(rows, "right"))
    assert last.n_cached == last.n_before == 6
    with torch.no_grad():
        capture = ace.CoreHook(*RESIDUALS)
        first = last.run(capture.fwd_hooks())
        activations = capture.activations[RESIDUALS[0]][:, 0]
        for _ in range(2):
            assert torch.equal(last.resume(RESIDUALS[0], activations), last.resume(RESIDUALS[0], activations))
            last.run_with("hook_embed", torch.zeros(6, 32))
            last.resume(RESIDUALS[0], torch.zeros(3, 6, 32))
        assert torch.equal(last.run(), first)
    assert last.n_cached == 6


def test_training_mode_and_inference_mode_change_nothing(gpt2, tokens):
    samples = ace.Samples.from_tokens(tokens)
    expected = edited_at_each(gpt2, samples, TARGET, EDITS)
    gpt2.train()
    with torch.inference_mode():
        found = edited_at_each(gpt2, samples, TARGET, EDITS)
    assert gpt2.training
    for name in HOOK_POINTS:
        torch.testing.assert_close(found[name].edited["flip"], expected[name].edited["flip"])


def test_left_and_right_padding_of_the_given_samples_are_one(gpt2, tokens):
    right, left = padded(tokens)
    found = [
        edited_at_each(gpt2, ace.Samples.from_tokens(part, attention_mask=(part != 0).long()), TARGET, EDITS)
        for part in (right, left)
    ]
    for name in HOOK_POINTS:
        assert torch.equal(found[0][name].edited["keep"], found[1][name].edited["keep"])


def test_only_the_logits_that_are_read_need_be_computed(cached, tokens):
    samples = ace.Samples.from_tokens(tokens)
    whole = edited_at_each(cached, samples, TARGET, EDITS)
    some = edited_at_each(cached, samples, TARGET, EDITS, side_effects=False)
    for name in HOOK_POINTS:
        for edit, outputs in whole[name].edited.items():
            torch.testing.assert_close(some[name].edited[edit], outputs, rtol=1e-4, atol=1e-5)
    (paused,) = paused_passes(cached, samples, RESIDUALS[1], tokens=TARGET.tokens)
    logits = paused.resume(torch.stack([paused.activations] * 2))
    unread = torch.ones(logits.shape[-1], dtype=torch.bool)
    unread[TARGET.tokens] = False
    assert logits[..., unread].isnan().all()
    torch.testing.assert_close(logits[0][:, ~unread], paused.logits[:, ~unread], rtol=1e-4, atol=1e-5)


def test_hooks_of_the_user_on_the_unembedding_still_act(cached, tokens):
    seen = []
    cached.hook_dict["unembed.hook_out"].add_hook(lambda logits, hook: seen.append(len(logits)))
    (paused,) = paused_passes(cached, ace.Samples.from_tokens(tokens), RESIDUALS[1], tokens=TARGET.tokens)
    seen.clear()
    assert paused.resume(paused.activations).isfinite().all()
    assert seen == [6]
