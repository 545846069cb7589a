"""Hook functions do what they say, on every kind of model, and leave no trace."""

import pytest
import torch
from conftest import WITH_TOKENIZER, random_core
from hypothesis import given
from hypothesis import strategies as st

import ace_lens as ace
from ace_lens.positions import PositionSelector

HOOK_POINT = "blocks.1.hook_resid_post"


def residual(seed=100, dtype=torch.float64, shape=(3, 5, 32)):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


cases = st.tuples(st.integers(1, 6), st.integers(0, 2**31), st.booleans())


@given(cases)
def test_projection_is_idempotent_and_symmetric(case):
    rank, seed, centred = case
    core = random_core(rank, seed=seed)
    for mode in ("keep", "remove"):
        ablator = ace.ProjectionAblator(core, mode, centred=centred)
        once = ablator(residual(seed))
        torch.testing.assert_close(ablator(once), once)
        mean = core.mean if centred else torch.zeros_like(core.mean)
        shifted = ablator.apply(mean + torch.eye(32, dtype=torch.float64)) - mean
        torch.testing.assert_close(shifted, shifted.T, rtol=0, atol=1e-12)


@given(cases)
def test_keep_and_remove_add_up_to_the_identity_about_the_mean(case):
    rank, seed, centred = case
    core = random_core(rank, seed=seed)
    activation = residual(seed)
    kept, removed = (ace.ProjectionAblator(core, mode, centred=centred)(activation) for mode in ("keep", "remove"))
    mean = core.mean if centred else 0
    torch.testing.assert_close((kept - mean) + (removed - mean), activation - mean)


@given(cases)
def test_flip_is_an_involution_that_keeps_the_distance_to_the_mean(case):
    rank, seed, centred = case
    core = random_core(rank, seed=seed)
    activation = residual(seed)
    flip = ace.SignFlipSteerer(core, centred=centred)
    flipped = flip(activation)
    torch.testing.assert_close(flip(flipped), activation)
    mean = core.mean if centred else torch.zeros_like(core.mean)
    torch.testing.assert_close((flipped - mean).norm(dim=-1), (activation - mean).norm(dim=-1))
    if centred:
        torch.testing.assert_close(core.coordinates(flipped), -core.coordinates(activation))


def test_flip_strength_scales_the_step():
    core = random_core(2)
    activation = residual()
    half = ace.SignFlipSteerer(core, 0.5)(activation)
    torch.testing.assert_close(half, ace.ProjectionAblator(core, "remove")(activation))
    assert torch.equal(ace.SignFlipSteerer(core, 0.0)(activation), activation)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_activation_comes_back_in_its_own_dtype_and_shape_and_is_not_edited_in_place(dtype):
    core = random_core(2)
    activation = residual(dtype=dtype)
    before = activation.clone()
    for edit in (ace.ProjectionAblator(core, "keep"), ace.SignFlipSteerer(core)):
        edited = edit(activation)
        assert edited.dtype == dtype
        assert edited.shape == activation.shape
        exact = edit(activation.double())
        torch.testing.assert_close(
            edited.double(), exact, rtol=0, atol=8 * float(exact.abs().max()) * torch.finfo(dtype).eps
        )
    assert torch.equal(activation, before)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("all", [0, 1, 2, 3, 4]),
        ("last", [4]),
        ([0, 2], [0, 2]),
        ([-2], [3]),
        (slice(1, 3), [1, 2]),
        (slice(-2, None), [3, 4]),
    ],
)
def test_only_the_chosen_positions_are_edited(positions, expected):
    activation = residual()
    edited = ace.ProjectionAblator(random_core(2), "remove", positions=positions)(activation)
    changed = (edited != activation).any(-1)
    assert changed.any(0).nonzero()[:, 0].tolist() == expected
    assert changed[:, expected].all()


def test_last_position_under_padding_on_either_side():
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    edited = ace.SignFlipSteerer(random_core(2), positions="last", attention_mask=mask)(residual())
    changed = (edited != residual()).any(-1)
    assert changed.nonzero().tolist() == [[0, 2], [1, 4], [2, 4]]


def test_a_mask_of_positions_serves_each_row():
    chosen = torch.tensor([[1, 0, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    edited = ace.SignFlipSteerer(random_core(2), positions=chosen)(residual())
    assert torch.equal((edited != residual()).any(-1), chosen)


def test_positions_keep_counting_while_a_cache_feeds_them_one_by_one():
    prompt, step = torch.zeros(1, 4, 2), torch.zeros(1, 1, 2)
    chosen = PositionSelector(slice(3, 6))
    assert chosen.mask(prompt).tolist() == [[False, False, False, True]]
    assert [chosen.mask(step).item() for _ in range(3)] == [True, True, False]
    assert chosen.mask(prompt).tolist() == [[False, False, False, True]]
    last = PositionSelector("last")
    last.mask(prompt)
    assert last.mask(step).all()
    from_the_end = PositionSelector([-1])
    assert from_the_end.mask(prompt).tolist() == [[False, False, False, True]]
    assert not from_the_end.mask(step).any()


def test_a_prompt_of_one_token_after_another_prompt_is_a_prompt(native):
    steerer = ace.SignFlipSteerer(random_core(2), positions=[0])
    fresh = native.run_with_hooks(torch.tensor([[5]]), fwd_hooks=steerer.fwd_hooks())
    native.run_with_hooks(torch.tensor([[3, 4, 5]]), fwd_hooks=steerer.fwd_hooks())
    again = native.run_with_hooks(torch.tensor([[5]]), fwd_hooks=steerer.fwd_hooks())
    assert torch.equal(fresh, again)
    with steerer.attach(native):
        assert torch.equal(native(torch.tensor([[5]])), fresh)


def test_bad_positions_are_refused():
    core = random_core(2)
    with pytest.raises(ValueError, match="not 'first'"):
        ace.SignFlipSteerer(core, positions="first")
    with pytest.raises(ValueError, match="not -1"):
        ace.SignFlipSteerer(core, positions=-1)
    with pytest.raises(ValueError, match="boolean mask"):
        ace.SignFlipSteerer(core, positions=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="Position 5 is outside the 5 positions"):
        ace.SignFlipSteerer(core, positions=[5])(residual())
    with pytest.raises(ValueError, match="mask of positions is for a batch of 2, but this pass has a batch of 3"):
        ace.SignFlipSteerer(core, positions=torch.ones(2, 5, dtype=torch.bool))(residual())
    with pytest.raises(ValueError, match='"keep" or "remove", not \'flip\''):
        ace.ProjectionAblator(core, "flip")


def test_another_width_or_hook_point_is_refused(native, tokens):
    with pytest.raises(ValueError, match="width 32, but this one has width 16"):
        ace.SignFlipSteerer(random_core(2))(residual(shape=(1, 2, 16)))
    wrong = [("blocks.0.hook_resid_post", ace.SignFlipSteerer(random_core(2)))]
    with pytest.raises(
        ValueError, match=r"extracted at blocks\.1\.hook_resid_post, but the hook was put on blocks\.0\.hook_resid_post"
    ):
        native.run_with_hooks(tokens, fwd_hooks=wrong)


def test_by_hand_and_by_list_and_attached_are_the_same(model, tokens):
    core = random_core(2)
    ablator = ace.ProjectionAblator(core, "remove")
    by_hand = model.run_with_hooks(tokens, fwd_hooks=[(core.hook_point, ablator)])
    by_list = model.run_with_hooks(tokens, fwd_hooks=ablator.fwd_hooks())
    with ablator.attach(model):
        attached = model(tokens)
    assert torch.equal(by_hand, by_list)
    assert torch.equal(by_hand, attached)
    assert not torch.allclose(by_hand, model(tokens))


def test_a_bridge_s_own_name_for_the_hook_point_serves_too(native, tokens):
    flip = ace.SignFlipSteerer(random_core(2))
    by_alias = native.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_out", flip)])
    assert torch.equal(by_alias, native.run_with_hooks(tokens, fwd_hooks=flip.fwd_hooks()))


def test_the_edit_reaches_the_rest_of_the_model(model, tokens):
    """With everything removed but the mean, the logits are those of the mean at every position."""
    core = random_core(32)
    seen = ace.CoreHook("blocks.2.hook_resid_pre")
    with ace.ProjectionAblator(core, "remove").attach(model), model.hooks(fwd_hooks=seen.fwd_hooks()):
        model(tokens)
    passed = seen.activations["blocks.2.hook_resid_pre"]
    torch.testing.assert_close(passed, core.mean.float().expand_as(passed), rtol=0, atol=1e-4)


def test_core_hook_captures_what_run_with_cache_does(model, tokens):
    capture = ace.CoreHook("hook_embed", HOOK_POINT)
    with model.hooks(fwd_hooks=capture.fwd_hooks()):
        model(tokens)
    _, cache = model.run_with_cache(tokens)
    for name in ("hook_embed", HOOK_POINT):
        torch.testing.assert_close(capture.activations[name], cache[name])
        assert not capture.activations[name].requires_grad


def test_core_hook_at_chosen_positions_by_hand(model, tokens):
    capture = ace.CoreHook(positions="last")
    with model.hooks(fwd_hooks=[(HOOK_POINT, capture)]):
        model(tokens)
    _, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(capture.activations[HOOK_POINT], cache[HOOK_POINT][:, -1])


def test_core_hook_live_takes_derivatives_of_frozen_models(model, tokens):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    capture = ace.CoreHook(HOOK_POINT, live=True)
    with model.hooks(fwd_hooks=capture.fwd_hooks()):
        logits = model(tokens)
    (gradient,) = torch.autograd.grad(logits[:, -1, 3].sum(), capture.activations[HOOK_POINT])
    assert gradient.abs().sum() > 0


def test_a_hook_that_never_fired_is_an_error(native, tokens):
    attachment = ace.SignFlipSteerer(random_core(2)).attach(native)
    with pytest.raises(RuntimeError, match=r"No activation passed blocks\.1\.hook_resid_post, so"), attachment:
        pass
    with pytest.raises(RuntimeError, match="No activation has passed hook_embed"):
        ace.CoreHook("hook_embed").activations  # noqa: B018
    with pytest.raises(RuntimeError, match="No activation has passed any hook point"):
        ace.CoreHook().activations  # noqa: B018


def test_hooks_go_when_a_pass_raises_and_the_user_s_own_stay(model, tokens):
    seen = []
    before = model(tokens)
    point = model.hook_dict["blocks.2.hook_resid_post"]
    point.add_hook(lambda activation, hook: seen.append(1))

    def explode(activation, hook):
        raise KeyError("mid-pass")

    flip = ace.SignFlipSteerer(random_core(2))
    with pytest.raises(KeyError, match="mid-pass"), flip.attach(model):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.2.hook_resid_pre", explode)])
    with pytest.raises(KeyError, match="mid-pass"), model.hooks(fwd_hooks=flip.fwd_hooks()):
        model.run_with_hooks(tokens, fwd_hooks=[("blocks.2.hook_resid_pre", explode)])
    assert len(point.fwd_hooks) == 1
    assert not model.hook_dict[HOOK_POINT].fwd_hooks
    seen.clear()
    torch.testing.assert_close(model(tokens), before)
    assert seen == [1]


def test_hooks_nest_with_the_user_s_in_either_order(model, tokens):
    flip = ace.SignFlipSteerer(random_core(2))
    seen = []

    def look(activation, hook):
        seen.append(activation.detach().clone())

    with model.hooks(fwd_hooks=[(HOOK_POINT, look)]), flip.attach(model):
        inside = model(tokens)
    with flip.attach(model), model.hooks(fwd_hooks=[(HOOK_POINT, look)]):
        outside = model(tokens)
    assert torch.equal(inside, outside)
    # Hooks fire in the order in which they were put on.
    torch.testing.assert_close(flip(seen[0]), seen[1])


@pytest.mark.parametrize("kind", WITH_TOKENIZER)
@pytest.mark.parametrize("positions", ["all", slice(4, None), [0, 2]])
def test_generate_with_and_without_a_cache_is_the_same(model, kind, positions):
    prompt = torch.tensor([[1, 5, 6, 7, 9], [1, 8, 5, 4, 3]])
    kept = {"max_new_tokens": 6, "do_sample": False, "verbose": False, "stop_at_eos": False}
    plain = model.generate(prompt, **kept)
    results = []
    for cached in (True, False):
        steerer = ace.SignFlipSteerer(random_core(8), 3.0, positions=positions)
        with model.hooks(fwd_hooks=steerer.fwd_hooks()):
            results.append(model.generate(prompt, use_past_kv_cache=cached, **kept))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], plain)
    assert torch.equal(model.generate(prompt, **kept), plain)


@pytest.mark.parametrize("kind", WITH_TOKENIZER)
def test_generate_from_text_in_three_lines(model, kind):
    core = random_core(4)
    with model.hooks(fwd_hooks=ace.SignFlipSteerer(core, 3.0, positions="last").fwd_hooks()):
        text = model.generate("The keys to the cabinet", max_new_tokens=4, do_sample=False, verbose=False)
    assert text.removeprefix("<bos>").startswith("The keys to the cabinet")


def test_the_same_hook_serves_inference_mode_and_a_graph(native, tokens):
    flip = ace.SignFlipSteerer(random_core(2))
    with torch.inference_mode():
        native.run_with_hooks(tokens, fwd_hooks=flip.fwd_hooks())
    native.run_with_hooks(tokens, fwd_hooks=flip.fwd_hooks()).sum().backward()


def test_one_position_after_a_prompt_of_one_position_is_refused_where_it_matters(native):
    ablator = ace.ProjectionAblator(random_core(2), "remove", positions=[0])
    by_hand = [(HOOK_POINT, ablator)]
    native.run_with_hooks(torch.tensor([[5]]), fwd_hooks=by_hand)
    with pytest.raises(ValueError, match="may be the next step of a generation, or another prompt"):
        native.run_with_hooks(torch.tensor([[6]]), fwd_hooks=by_hand)
    everywhere = [(HOOK_POINT, ace.ProjectionAblator(random_core(2), "remove"))]
    first = native.run_with_hooks(torch.tensor([[5]]), fwd_hooks=everywhere)
    assert torch.equal(native.run_with_hooks(torch.tensor([[5]]), fwd_hooks=everywhere), first)
