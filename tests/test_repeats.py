"""What rows have in common runs once, and nobody can tell but by the time it takes."""

import pytest
import torch
from conftest import build
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import ace_lens as ace
from ace_lens.downstream import paused_passes
from ace_lens.repeats import beginnings, mlps_spared

LAST = "blocks.2.hook_resid_post"
PAIRS = torch.cartesian_prod(torch.arange(3, 15), torch.arange(3, 15))
N_BEGINNINGS = 12 + 144


@given(arrays.arrays("int64", st.tuples(st.integers(1, 8), st.integers(1, 4)), elements=st.integers(0, 2)))
def test_positions_with_one_beginning_are_of_one_kind(tokens):
    tokens = torch.from_numpy(tokens)
    first, kind = beginnings(tokens)
    of_kind = {}
    for row, number in ((row, number) for row in range(len(tokens)) for number in range(tokens.shape[1])):
        of_kind.setdefault(int(kind[row, number]), set()).add(tuple(tokens[row, : number + 1].tolist()))
    begins = [beginning for (beginning,) in of_kind.values()]
    assert len(set(begins)) == len(begins) == len(first)
    assert sorted(of_kind) == list(range(len(first)))
    assert torch.equal(kind.flatten()[first], torch.arange(len(first)))


@pytest.fixture
def sizes(monkeypatch):
    """How many activations each call of an MLP takes, once a model is watched."""
    seen = []

    def watch(model):
        for kind in {type(block.mlp) for block in model.blocks}:
            forward = kind.forward

            def counted(self, activations, *args, forward=forward, **kwargs):
                seen.append(activations.shape[0] * activations.shape[1])
                return forward(self, activations, *args, **kwargs)

            monkeypatch.setattr(kind, "forward", counted)
        return seen

    return watch


@torch.no_grad()
def test_each_beginning_runs_once(model, sizes):
    expected, seen = model(PAIRS), sizes(model)
    with mlps_spared(model, PAIRS):
        logits = model(PAIRS)
    # Two whole rows beside them tell whether the outputs are right.
    assert seen == [N_BEGINNINGS, 4] * 3
    torch.testing.assert_close(logits, expected)
    seen.clear()
    model(PAIRS)
    assert seen == [2 * len(PAIRS)] * 3


@torch.no_grad()
def test_rows_that_begin_differently_run_as_always(native, tokens, sizes):
    seen = sizes(native)
    with mlps_spared(native, tokens):
        native(tokens)
    assert seen == [tokens.numel()] * 3


@torch.no_grad()
def test_rows_that_are_treated_differently_run_as_always(native, sizes):
    """A hook of the user's that edits one row of many that begin alike, and a mask that hides one beginning."""

    def edit(activation, hook):
        activation = activation.clone()
        activation[5] += 1
        return activation

    native.hook_dict["blocks.1.hook_resid_pre"].add_hook(edit)
    expected, seen = native(PAIRS), sizes(native)
    with mlps_spared(native, PAIRS):
        logits = native(PAIRS)
    assert torch.equal(logits[5], expected[5])
    torch.testing.assert_close(logits, expected)
    assert seen == [N_BEGINNINGS, 4, 2 * len(PAIRS), 2 * len(PAIRS)]
    native.reset_hooks()
    mask = torch.ones_like(PAIRS)
    mask[7, 0] = 0
    expected = native(PAIRS, attention_mask=mask)[:, 1]
    with mlps_spared(native, PAIRS):
        torch.testing.assert_close(native(PAIRS, attention_mask=mask)[:, 1], expected)


@torch.no_grad()
def test_the_user_s_hooks_see_whole_batches(model):
    seen = []
    name = next(name for name in model.hook_dict if name.startswith("blocks.1.mlp."))
    model.hook_dict[name].add_hook(lambda activation, hook: seen.append(activation.shape[:2]))
    handle = model.blocks[2].mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape[:2]))
    with mlps_spared(model, PAIRS):
        model(PAIRS)
    handle.remove()
    assert seen == [PAIRS.shape, PAIRS.shape]


class Mixing(torch.nn.Module):
    """Not an MLP, though it stands in the place of one: each position sees the one before it."""

    def forward(self, activations):
        return activations.cumsum(1)


class Pair(torch.nn.Module):
    def forward(self, activations):
        return 2 * activations, activations


@torch.no_grad()
@pytest.mark.parametrize(
    ("mlp", "output"),
    [(Mixing(), lambda x: x.cumsum(1)), (Pair(), lambda x: (2 * x, x)), (torch.nn.Flatten(), lambda x: x.flatten(1))],
)
def test_what_is_no_mlp_runs_as_always(mlp, output):
    block = torch.nn.Module()
    block.mlp = mlp
    model = torch.nn.Module()
    model.blocks = [block]
    activations = torch.randn(15, 4)[PAIRS]
    with mlps_spared(model, PAIRS):
        found = mlp(activations)
    torch.testing.assert_close(found, output(activations))


def test_whatever_happens_the_model_is_left_as_it_was(native):
    native.hook_dict["blocks.2.hook_resid_post"].add_hook(lambda activation, hook: 1 / 0)
    with pytest.raises(ZeroDivisionError), mlps_spared(native, PAIRS):
        native(PAIRS)
    assert not any("forward" in vars(block.mlp) for block in native.blocks)


def test_derivatives_run_as_always(native, tokens, sizes):
    tokens = tokens[:1].expand(3, -1)
    seen = sizes(native)
    with mlps_spared(native, tokens):
        native(tokens).sum().backward()
    assert seen == [tokens.numel()] * 3


def test_somebody_else_s_forward_stays(native):
    other = native.blocks[0].mlp.forward
    vars(native.blocks[0].mlp)["forward"] = other
    with mlps_spared(native, PAIRS):
        assert vars(native.blocks[0].mlp)["forward"] is other
    assert vars(native.blocks[0].mlp)["forward"] is other


def test_passes_that_stop_behind_the_last_block_spare_mlps(tokenizer, sizes):
    model = build("native", tokenizer)
    plain = model(PAIRS)[:, 1]
    seen = sizes(model)
    (paused,) = paused_passes(model, ace.Samples.from_tokens(PAIRS), LAST, batch_size=len(PAIRS))
    assert seen == [N_BEGINNINGS, 4] * 3
    torch.testing.assert_close(paused.logits, plain)
