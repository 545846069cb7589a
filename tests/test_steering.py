"""Steering turns what it says it turns, by no more than is needed, and leaves the rest of the text alone."""

import pytest
import torch
from conftest import N_LAYERS, WITH_TOKENIZER, build, padded, random_core

import ace_lens as ace
from ace_lens.last_token import LastTokenPass

LAYERS = [f"blocks.{layer}.hook_resid_post" for layer in range(N_LAYERS)]
PROMPTS = ["The keys to the cabinet", "The man near the old cabinets", "a key", "The old men"]
TOLERANCE = 4 / 4096


@pytest.fixture(params=WITH_TOKENIZER)
def speaker(request, tokenizer):
    """A model with a tokenizer."""
    return build(request.param, tokenizer)


def margin(model):
    return ace.LogitMargin(model, [3, 5], [8, 9])


def sided(tokens, side):
    right, left = padded(tokens)
    rows = right if side == "right" else left
    return ace.Samples.from_tokens(rows, attention_mask=(rows != 0).long())


def real_rows(samples):
    return [row[mask != 0] for row, mask in zip(samples.tokens, samples.attention_mask, strict=True)]


@torch.no_grad()
def margins_by_full_passes(model, core, samples, strengths):
    """`[strength, sample]`, each prompt by itself, unpadded, flipped at its last token."""
    found = torch.empty(len(strengths), len(samples))
    for row, tokens in enumerate(real_rows(samples)):
        copies = tokens.expand(len(strengths), -1)
        flip = ace.SignFlipSteerer(core, strengths[:, row], positions="last")
        found[:, row] = margin(model)(model.run_with_hooks(copies, fwd_hooks=flip.fwd_hooks())[:, -1])[:, 0]
    return found


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_smallest_flip_is_where_the_margin_changes_sign(model, tokens, side):
    samples = sided(tokens, side)
    for core in ace.extract_cores(model, samples, margin(model), LAYERS, rank=2).values():
        found = ace.smallest_flips(model, core, samples, margin(model))
        grid = torch.linspace(0, 4, 65).unsqueeze(1).expand(-1, len(samples))
        before, *after = margins_by_full_passes(model, core, samples, grid).sign()
        across = torch.stack(after) != before
        none = found.isnan()
        assert torch.equal(none, ~across.any(0))
        assert not none.all()
        ends = torch.stack([found - TOLERANCE, found])[:, ~none]
        just_short, there = margins_by_full_passes(model, core, samples[(~none).nonzero()[:, 0]], ends).sign()
        assert torch.equal(there, -before[~none])
        assert torch.equal(just_short, before[~none])
        assert not (across & (grid[1:] < found)).any()


@pytest.mark.parametrize("beyond", [0.5, 1.0])
def test_a_flip_may_have_to_go_beyond_the_change_of_sign(native, tokens, beyond):
    samples = sided(tokens, "right")
    core = ace.extract_core(native, samples, margin(native), LAYERS[1], rank=2)
    turned = ace.smallest_flips(native, core, samples, margin(native))
    found = ace.smallest_flips(native, core, samples, margin(native), beyond=beyond)
    there = ~found.isnan()
    assert there.any()
    assert (found[there] > turned[there]).all()
    strengths = torch.stack([torch.zeros(6), found - TOLERANCE, found])[:, there]
    before, just_short, after = margins_by_full_passes(native, core, samples[there.nonzero()[:, 0]], strengths)
    assert (after * before.sign() < -beyond * before.abs()).all()
    assert (just_short * before.sign() >= -beyond * before.abs()).all()


def test_smallest_flips_do_not_depend_on_batches(gpt2, tokens):
    samples = sided(tokens, "right")
    core = ace.extract_core(gpt2, samples, margin(gpt2), LAYERS[1], rank=2)
    whole = ace.smallest_flips(gpt2, core, samples, margin(gpt2))
    order = torch.tensor([4, 1, 5, 0, 3, 2])
    again = ace.smallest_flips(gpt2, core, samples[order], margin(gpt2), batch_size=2)
    torch.testing.assert_close(again, whole[order], rtol=0, atol=TOLERANCE, equal_nan=True)


def test_smallest_flips_run_the_prompts_once(gpt2, tokens):
    """All else is single tokens behind the hook point."""
    samples = sided(tokens, "right")
    core = ace.extract_core(gpt2, samples, margin(gpt2), LAYERS[1], rank=2)
    long_passes, replays = [], []
    gpt2.hook_dict["blocks.0.hook_resid_pre"].add_hook(
        lambda activation, hook: long_passes.append(len(activation)) if activation.shape[1] > 1 else None
    )
    gpt2.hook_dict["blocks.2.hook_resid_pre"].add_hook(
        lambda activation, hook: replays.append(len(activation)) if activation.shape[1] == 1 else None
    )
    ace.smallest_flips(gpt2, core, samples, margin(gpt2))
    # Four samples, in full and up to their last tokens, to see whether the cache can be relied on; then all six.
    assert long_passes == [4, 4, 6]
    assert replays.count(4 * 6) == 3 * 4 + 1


@pytest.mark.parametrize("hook_point", LAYERS[1:])
def test_samples_of_one_sequence_are_turned_each_by_itself(native, tokens, hook_point):
    samples = ace.Samples.from_tokens(tokens, "all")
    core = ace.extract_core(native, samples, margin(native), hook_point, rank=2)
    found = ace.smallest_flips(native, core, samples, margin(native))
    alone = ace.smallest_flips(native, core, samples.one_per_row(), margin(native), batch_size=5)
    torch.testing.assert_close(found, alone, rtol=0, atol=TOLERANCE, equal_nan=True)


def test_no_flip_below_the_largest_is_nan(native, tokens):
    samples = ace.Samples.from_tokens(tokens)
    core = ace.extract_core(native, samples, margin(native), LAYERS[1], rank=2)
    found = ace.smallest_flips(native, core, samples, margin(native))
    smaller = ace.smallest_flips(native, core, samples, margin(native), largest=1)
    assert (found > 1).any()
    assert torch.equal(smaller.isnan(), ~(found <= 1))
    torch.testing.assert_close(smaller[found <= 1], found[found <= 1], rtol=0, atol=TOLERANCE)


def test_rounding_at_the_end_of_a_bracket_does_not_mislead(native, tokens):
    """Of all strengths that are tried, the largest one turns the output, and only the first time."""
    calls = []

    def turned_once(logits):
        calls.append(1)
        return torch.full((len(logits), 1), -1.0 if len(calls) == 1 + 16 else 1.0)

    found = ace.smallest_flips(native, random_core(1), ace.Samples.from_tokens(tokens), turned_once)
    assert found.tolist() == [4.0] * 6
    assert len(calls) == 1 + 3 * 16


def test_smallest_flips_say_what_is_wrong(native, tokens):
    samples, core = ace.Samples.from_tokens(tokens), random_core(1)
    with pytest.raises(ValueError, match=r"sign of one output, but CentredLogits\(\[3, 5\]\) has 2. .* a LogitMargin"):
        ace.smallest_flips(native, core, samples, ace.CentredLogits([3, 5]))
    with pytest.raises(ValueError, match=r"NaN or infinite, so they have no sign to turn. Likely causes: overflow"):
        ace.smallest_flips(native, core, samples, lambda logits: logits[:, :1] / 0)
    with pytest.raises(ValueError, match=r"up to the largest, which 0.0 does not lie above"):
        ace.smallest_flips(native, core, samples, margin(native), largest=0.0)
    with pytest.raises(ValueError, match=r"at least 0 of its size to the other side, not -0\.5"):
        ace.smallest_flips(native, core, samples, margin(native), beyond=-0.5)
    with pytest.raises(ValueError, match="width 16"):
        ace.smallest_flips(native, random_core(1, d_model=16), samples, margin(native))


def test_a_strength_for_each_row_is_each_row_by_itself():
    core = random_core(2)
    activation = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(3))
    strengths = torch.tensor([0.5, torch.nan, 0.0, 2.0])
    edited = ace.SignFlipSteerer(core, strengths)(activation)
    for row, strength in enumerate([0.5, 0.0, 0.0, 2.0]):
        assert torch.equal(edited[row], ace.SignFlipSteerer(core, strength)(activation)[row])
    assert torch.equal(edited[1], activation[1])
    torch.testing.assert_close(ace.SignFlipSteerer(core, strengths).apply(activation[:, 2]), edited[:, 2])
    assert torch.equal(
        ace.SignFlipSteerer(core, torch.tensor(2.0))(activation), ace.SignFlipSteerer(core, 2.0)(activation)
    )


def test_setting_coordinates_leaves_them_behind_and_nothing_else_changed():
    core = random_core(3)
    activation = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted = torch.randn(4, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    edited = ace.CoordinateSetter(core, wanted)(activation)
    torch.testing.assert_close(core.coordinates(edited), wanted.unsqueeze(1).expand(4, 5, 3))
    remove = ace.ProjectionAblator(core, "remove")
    torch.testing.assert_close(remove(edited), remove(activation))
    own = core.coordinates(activation[:, -1])
    flipped = ace.CoordinateSetter(core, -own, positions="last")(activation)
    torch.testing.assert_close(flipped, ace.SignFlipSteerer(core, positions="last")(activation))
    assert ace.CoordinateSetter(core, wanted)(activation.half()).dtype == torch.float16


def test_values_that_do_not_fit_the_rows_are_refused(native, tokens):
    core = random_core(2)
    with pytest.raises(ValueError, match=r"3 strengths for a pass of shape \[6, 7, 32\]. Give one for each row"):
        native.run_with_hooks(tokens, fwd_hooks=ace.SignFlipSteerer(core, torch.ones(3)).fwd_hooks())
    with pytest.raises(ValueError, match=r"one for each row \[batch\]; not a tensor of shape \(3, 1\)"):
        ace.SignFlipSteerer(core, torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"of rank 2 are \[batch, 2\], .* not \[3, 1\]. core.coordinates"):
        ace.CoordinateSetter(core, torch.ones(3, 1))
    with pytest.raises(ValueError, match="3 rows of coordinates for a pass of shape"):
        native.run_with_hooks(tokens, fwd_hooks=ace.CoordinateSetter(core, torch.ones(3, 2)).fwd_hooks())
    with pytest.raises(ValueError, match=r"1 strengths for a pass of shape \[32\]"):
        ace.SignFlipSteerer(core, torch.ones(1)).apply(torch.zeros(32))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("strength", [1.0, 0.75])
def test_a_band_turns_every_layer_s_coordinates_at_the_sample_alone(model, tokens, side, strength):
    samples = sided(tokens, side)
    cores = ace.extract_cores(model, samples, margin(model), LAYERS, rank=2)
    with torch.no_grad():
        _, clean = model.run_with_cache(samples.tokens, attention_mask=samples.attention_mask)
        capture = ace.CoreHook(*LAYERS)
        hooks = ace.band_flip(model, cores, strength)(samples)
        model.run_with_hooks(
            samples.tokens, attention_mask=samples.attention_mask, fwd_hooks=[*hooks, *capture.fwd_hooks()]
        )
    others = (samples.attention_mask != 0) & ~samples.position_mask()
    for name, core in cores.items():
        before, after = clean[name], capture.activations[name]
        wanted = (1 - 2 * strength) * core.coordinates(samples.at(before))
        torch.testing.assert_close(core.coordinates(samples.at(after)), wanted, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(after[others], before[others], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_band_serves_passes_of_one_token_too(gpt2, tokens, side):
    samples = sided(tokens, side)
    cores = ace.extract_cores(gpt2, samples, margin(gpt2), LAYERS, rank=2)
    band = ace.band_flip(gpt2, cores)
    with torch.no_grad():
        whole = gpt2.run_with_hooks(
            samples.tokens, attention_mask=samples.attention_mask, fwd_hooks=list(band(samples))
        )
        last = LastTokenPass(gpt2, samples).run(band(samples))
    torch.testing.assert_close(last, samples.at(whole), rtol=1e-4, atol=1e-4)


def test_flips_one_after_the_other_cancel_and_a_band_does_not(gpt2, tokens):
    """Where a block adds nothing, a second flip of the same core takes the first one back in full."""
    for part in (gpt2.original_model.transformer.h[1].attn, gpt2.original_model.transformer.h[1].mlp):
        torch.nn.init.zeros_(part.c_proj.weight)
        torch.nn.init.zeros_(part.c_proj.bias)
    samples = ace.Samples.from_tokens(tokens)
    cores = ace.extract_cores(gpt2, samples, margin(gpt2), LAYERS[:2], rank=2)

    def margins(hooks):
        with torch.no_grad():
            return margin(gpt2)(samples.at(gpt2.run_with_hooks(tokens, fwd_hooks=list(hooks))))

    plain = margins([])
    once = margins(ace.plain_flip(cores[LAYERS[1]])(samples))
    assert (once - plain).abs().mean() > 0.3
    twice = margins([hook for core in cores.values() for hook in ace.plain_flip(core)(samples)])
    torch.testing.assert_close(twice, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(margins(ace.band_flip(gpt2, cores)(samples)), once, rtol=1e-4, atol=1e-4)


def test_a_band_of_other_cores_is_refused(native):
    with pytest.raises(ValueError, match=r"no cores to try. Give one a hook point, as extract_cores does"):
        ace.band_flip(native, {})
    with pytest.raises(ValueError, match=r"given for blocks\.0\.hook_resid_post lives at blocks\.1\.hook_resid_post"):
        ace.band_flip(native, {LAYERS[0]: random_core(1)})


def test_samples_that_share_a_row_are_refused(native, tokens):
    samples = ace.Samples.from_tokens(tokens, "all")
    core = random_core(1)
    for steer in (ace.plain_flip(core), ace.band_flip(native, {core.hook_point: core})):
        with pytest.raises(ValueError, match=r"do not lie one in each row, in order. Give samples.one_per_row\(\)"):
            steer(samples)


def test_a_steer_acts_at_the_sample_and_not_behind_it(native, tokens):
    samples = ace.Samples.from_tokens(tokens, torch.tensor([2, 6, 0, 3, 4, 5]))
    core = random_core(2)
    activation = torch.zeros(6, 7, 32)
    (_, hook), *_ = ace.plain_flip(core)(samples)
    assert torch.equal((hook(activation) != activation).any(-1), samples.position_mask())


def prompt_tokens(model, prompt):
    return ace.Samples.from_prompts(model, [prompt]).tokens


def continued(model, prompt, **options):
    """What the model's own `generate` adds to a prompt."""
    tokens = prompt_tokens(model, prompt)
    out = model.generate(tokens, verbose=False, return_type="tokens", **options)[0].tolist()
    added = out[tokens.shape[1] :]
    return model.tokenizer.decode(added[: added.index(0)] if 0 in added else added)


def test_without_hooks_greedy_text_is_the_model_s_own(speaker):
    found = ace.generate_steered(speaker, PROMPTS, lambda samples: [], max_new_tokens=8)
    assert found == [continued(speaker, prompt, max_new_tokens=8, do_sample=False) for prompt in PROMPTS]
    assert len(set(found)) > 1
    assert ace.generate_steered(speaker, PROMPTS, lambda samples: [], max_new_tokens=8, batch_size=3) == found


def test_a_text_ends_at_the_end_of_text_and_others_go_on(speaker):
    third = prompt_tokens(speaker, PROMPTS[2])[0]
    rows_left = []

    def says(token):
        return 100 * speaker.W_U[:, token]

    def end_the_third(samples):
        """After its first new token; at every other step of every prompt, the word is 7."""
        rows_left.append(len(samples))
        lengths = samples.attention_mask.sum(1)
        ends = (samples.tokens[:, 1] == third[1]) & (lengths == len(third) + 1)
        residual = torch.where(ends[:, None, None], says(0), says(7)).expand(-1, samples.tokens.shape[1], -1)
        return [(LAYERS[-1], lambda activation, hook: residual)]

    word = speaker.tokenizer.decode([7])
    found = ace.generate_steered(speaker, PROMPTS, end_the_third, max_new_tokens=4)
    assert found == [4 * word, 4 * word, word, 4 * word]
    assert rows_left == [4, 4, 3, 3]
    rows_left.clear()
    assert ace.generate_steered(speaker, PROMPTS[2:3], end_the_third, max_new_tokens=4) == [word]
    assert rows_left == [1, 1]


def test_samples_are_drawn_by_the_generator_alone(speaker):
    prompts = 4 * PROMPTS
    rows_left = []

    def look(samples):
        rows_left.append(len(samples))
        return []

    def text(seed, temperature=2.0, batch_size=64):
        options = {"temperature": temperature, "generator": torch.Generator().manual_seed(seed)}
        return ace.generate_steered(speaker, prompts, look, max_new_tokens=12, batch_size=batch_size, **options)

    drawn = text(0)
    # Some texts end before others, which has to change nothing for these.
    assert 0 < rows_left[-1] < len(prompts)
    assert text(0) == drawn
    assert text(0, batch_size=1) == drawn
    assert text(1) != drawn
    greedy = ace.generate_steered(speaker, prompts, look, max_new_tokens=12)
    assert text(0, temperature=1e-4) == greedy
    assert drawn != greedy


def test_tokens_are_drawn_as_often_as_they_are_likely(gpt2):
    prompts = 400 * PROMPTS[2:3]
    drawn = ace.generate_steered(
        gpt2,
        prompts,
        lambda samples: [],
        max_new_tokens=1,
        temperature=2.0,
        generator=torch.Generator().manual_seed(0),
        batch_size=400,
    )
    with torch.no_grad():
        likely = (gpt2(prompt_tokens(gpt2, PROMPTS[2]))[0, -1] / 2).softmax(0)
    for token in likely.topk(3).indices.tolist():
        share, wanted = drawn.count(gpt2.tokenizer.decode([token])) / 400, float(likely[token])
        assert abs(share - wanted) < 4 * (wanted * (1 - wanted) / 400) ** 0.5


def test_a_token_that_cannot_come_is_never_drawn(gpt2, monkeypatch):
    """Not even by a draw of exactly 0, where the first tokens have no probability."""
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.zeros(shape, dtype=torch.float64))
    monkeypatch.setattr(gpt2, "forward", without_the_first_tokens(gpt2.forward))
    (drawn,) = ace.generate_steered(
        gpt2,
        PROMPTS[:1],
        lambda samples: [],
        max_new_tokens=1,
        temperature=1.0,
        generator=torch.Generator(),
    )
    assert drawn == gpt2.tokenizer.decode([7])


def without_the_first_tokens(forward):
    def changed(*args, **options):
        logits = forward(*args, **options)
        logits[..., :7] = -torch.inf
        return logits

    return changed


def test_adaptive_flips_turn_the_margin_at_every_token_and_go_no_further(speaker):
    train = ace.Samples.from_prompts(speaker, PROMPTS)
    core = ace.extract_core(speaker, train, margin(speaker), LAYERS[2], rank=2)
    adaptive = ace.adaptive_flip(speaker, core, margin(speaker))
    seen = []

    def steer(samples):
        outputs = []
        for hooks in ([], adaptive(samples), ace.plain_flip(core)(samples)):
            with torch.no_grad(), speaker.hooks(fwd_hooks=list(hooks)):
                logits = speaker(samples.tokens, attention_mask=samples.attention_mask)
            outputs.append(margin(speaker)(samples.at(logits))[:, 0])
        strengths = ace.smallest_flips(speaker, core, samples, margin(speaker))
        seen.append(torch.stack([*outputs, strengths]))
        return adaptive(samples)

    text = ace.generate_steered(speaker, PROMPTS, steer, max_new_tokens=5)
    clean, steered, flipped, strengths = torch.cat(seen, 1)
    turned = clean.sign() != steered.sign()
    assert torch.equal(turned, ~strengths.isnan())
    assert turned.sum() > 2
    assert steered[turned].abs().max() < 0.02 * flipped.abs().max()
    torch.testing.assert_close(steered[~turned], clean[~turned], rtol=1e-4, atol=1e-4)
    assert text == ace.generate_steered(speaker, PROMPTS, adaptive, max_new_tokens=5)


def test_smallest_flips_serve_the_model_s_own_generate(speaker):
    train = ace.Samples.from_prompts(speaker, PROMPTS)
    core = ace.extract_core(speaker, train, margin(speaker), LAYERS[1], rank=2)
    prompt = ace.Samples.from_prompts(speaker, [PROMPTS[0], PROMPTS[0]])
    strengths = ace.smallest_flips(speaker, core, prompt, margin(speaker)).nan_to_num(3.0) + 1
    strengths[1] = torch.nan
    options = {"max_new_tokens": 5, "do_sample": False, "verbose": False, "return_type": "tokens", "stop_at_eos": False}
    with ace.SignFlipSteerer(core, strengths).attach(speaker):
        steered, left = speaker.generate(prompt.tokens, **options)
    plain = speaker.generate(prompt.tokens, **options)[0]
    assert torch.equal(left, plain)
    assert not torch.equal(steered, plain)


def test_plain_and_band_steer_text(speaker):
    train = ace.Samples.from_prompts(speaker, PROMPTS)
    cores = ace.extract_cores(speaker, train, margin(speaker), LAYERS, rank=2)
    texts = [
        ace.generate_steered(speaker, PROMPTS, steer, max_new_tokens=6)
        for steer in (lambda samples: [], ace.plain_flip(cores[LAYERS[1]], 2.0), ace.band_flip(speaker, cores, 2.0))
    ]
    assert len(set(map(tuple, texts))) == 3
    one_by_one = [
        ace.generate_steered(speaker, [prompt], ace.band_flip(speaker, cores, 2.0), max_new_tokens=6)[0]
        for prompt in PROMPTS
    ]
    assert one_by_one == texts[2]


def test_flips_in_the_model_s_own_generate_sampled_with_and_without_a_cache(speaker):
    tokens = prompt_tokens(speaker, PROMPTS[0]).expand(3, -1)
    seen = []
    point = speaker.hook_dict[LAYERS[2]]
    point.add_hook(lambda activation, hook: seen.append(activation.shape[1]))

    def sampled(cached, steered=True):
        flip = ace.SignFlipSteerer(random_core(8), 3.0)
        torch.manual_seed(0)
        with speaker.hooks(fwd_hooks=flip.fwd_hooks() if steered else []):
            return speaker.generate(
                tokens,
                max_new_tokens=6,
                do_sample=True,
                use_past_kv_cache=cached,
                stop_at_eos=False,
                verbose=False,
            )

    with_cache = sampled(True)
    assert seen == [tokens.shape[1], 1, 1, 1, 1, 1]
    assert torch.equal(with_cache, sampled(False))
    assert not torch.equal(with_cache, sampled(True, steered=False))
    assert len(set(map(tuple, with_cache.tolist()))) == 3
    assert len(point.fwd_hooks) == 1


def test_the_user_s_hooks_act_in_steered_text_and_stay(speaker):
    plain = ace.generate_steered(speaker, PROMPTS, lambda samples: [], max_new_tokens=4)
    core = random_core(2)
    point = speaker.hook_dict[core.hook_point]
    point.add_hook(lambda activation, hook: -3 * activation)
    hooked = ace.generate_steered(speaker, PROMPTS, lambda samples: [], max_new_tokens=4)
    assert hooked != plain
    ace.generate_steered(speaker, PROMPTS, ace.plain_flip(core), max_new_tokens=4)
    assert len(point.fwd_hooks) == 1

    def explode(samples):
        return [(core.hook_point, lambda activation, hook: 1 / 0)]

    with pytest.raises(ZeroDivisionError):
        ace.generate_steered(speaker, PROMPTS, explode, max_new_tokens=4)
    assert len(point.fwd_hooks) == 1
    assert ace.generate_steered(speaker, PROMPTS, lambda samples: [], max_new_tokens=4) == hooked


def test_generation_says_what_is_wrong(gpt2, native):
    def generate(model=gpt2, prompts=PROMPTS, steer=lambda samples: [], max_new_tokens=2, **options):
        return ace.generate_steered(model, prompts, steer, max_new_tokens=max_new_tokens, **options)

    with pytest.raises(ValueError, match="tokens to add, at least one; max_new_tokens is 0"):
        generate(max_new_tokens=0)
    with pytest.raises(ValueError, match="for the likeliest token, or above; not -1"):
        generate(temperature=-1.0)
    with pytest.raises(ValueError, match=r"At temperature 0.7 .* give a generator, such as torch.Generator\(\)"):
        generate(temperature=0.7)
    with pytest.raises(ValueError, match="Prompts are a list of texts"):
        generate(prompts="The keys")
    with pytest.raises(ValueError, match="has no tokenizer"):
        generate(model=native)
    with pytest.raises(ValueError, match=r"steered pass are NaN. Likely causes: overflow in float16"):
        generate(steer=ace.plain_flip(random_core(2), float("nan")))
