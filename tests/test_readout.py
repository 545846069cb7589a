"""The readout behind the last block, against the model's own outputs and derivatives."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import KINDS, N_LAYERS, build
from hypothesis import given
from hypothesis import strategies as st

import ace_lens as ace
from ace_lens.readout import Readout, find_readout

LAST = f"blocks.{N_LAYERS - 1}.hook_resid_post"
ANSWERS = ace.CentredLogits([3, 4, 5, 7])


@pytest.fixture
def samples():
    tokens = torch.randint(3, 30, (40, 5), generator=torch.Generator().manual_seed(1))
    return ace.Samples.from_tokens(tokens, labels=torch.arange(40) % 4)


def paused(model, samples, hook_point=LAST):
    (found,) = ace.paused_passes(model, samples, hook_point, batch_size=100)
    return found


def drawn(norm, n_outputs, d_model, eps, seed):
    """A readout, activations with some offset, and a core with a mean of its own."""
    generator = torch.Generator().manual_seed(seed)
    rows = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((n_outputs, d_model), (n_outputs,))
    )
    weight, bias = rows
    if norm == "layer":
        weight = weight - weight.mean(1, keepdim=True)
    activations = torch.randn(30, d_model, generator=generator, dtype=torch.float64) + 0.5
    basis = torch.linalg.qr(torch.randn(d_model, d_model - 1, generator=generator, dtype=torch.float64)).Q
    core = ace.Core(
        basis=basis,
        mean=activations.mean(0) + 0.1,
        singular_values=torch.arange(d_model - 1, 0, -1).double(),
        hook_point="h",
        provenance=ace.Provenance(),
    )
    return Readout(weight, bias, norm, eps), activations, core


readouts = given(
    st.builds(
        drawn,
        st.sampled_from(["none", "layer", "rms"]),
        st.integers(2, 6),
        st.integers(3, 9),
        st.sampled_from([1e-12, 1e-5, 0.5]),
        st.integers(0, 1000),
    )
)


@readouts
def test_derivatives_are_those_of_autograd(case):
    readout, activations, _ = case
    expected = torch.stack([torch.func.jacrev(lambda h: readout.outputs(h[None])[0])(h) for h in activations])
    torch.testing.assert_close(readout.jacobians(activations), expected)
    factor, mean = readout.jacobian_factor(activations)
    torch.testing.assert_close(mean, expected.mean(0))
    stacked = expected.flatten(0, 1)
    torch.testing.assert_close(factor.T @ factor, stacked.T @ stacked, rtol=1e-9, atol=1e-9)


@readouts
def test_answers_by_rank_are_those_of_the_edited_activations(case):
    readout, activations, core = case
    labels = torch.arange(len(activations)) % len(readout.bias)
    found = readout.right_by_rank(core, activations, labels)
    deviation = activations - core.mean
    for rank in range(1, core.rank + 1):
        projection = deviation @ core.basis[:, :rank] @ core.basis[:, :rank].T
        for name, edited in (("keep", core.mean + projection), ("remove", activations - projection)):
            right = readout.outputs(edited).argmax(1) == labels
            assert found[name][rank - 1].tolist() == right.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_models_readout_is_recovered(tokenizer, samples, kind, dtype):
    model = build(kind, tokenizer, dtype)
    at = paused(model, samples)
    readout = find_readout(model, [at], ANSWERS)
    if kind == "llama" and dtype == torch.float64:
        # transformers computes RMSNorm in float32, which is another function to half the digits of float64.
        assert readout is None
        return
    assert readout.norm == ("rms" if kind == "llama" else "layer")
    assert readout.eps == pytest.approx(1e-6 if kind == "llama" else 1e-5, rel=1e-3)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    torch.testing.assert_close(readout.outputs(at.activations), ANSWERS(at.logits), **tolerance)
    probed = ace.JacobianProbe(model, ANSWERS, LAST)(samples)[LAST]
    torch.testing.assert_close(readout.jacobians(at.activations), probed.jacobians, **tolerance)


def test_many_outputs_are_differentiated_in_parts(tokenizer, samples, monkeypatch):
    model = build("native", tokenizer)
    at = paused(model, samples)
    whole = find_readout(model, [at], ace.CentredLogits())
    monkeypatch.setattr("ace_lens.readout._OUTPUTS_AT_ONCE", 7)
    torch.testing.assert_close(find_readout(model, [at], ace.CentredLogits()).weight, whole.weight)


def test_an_odd_width_is_no_hindrance():
    """The pole then has a mean, which LayerNorm takes off."""
    torch.manual_seed(0)
    activations, weight, bias = torch.randn(50, 7) + 1, torch.randn(4, 7), torch.randn(4)
    for norm, module in (("layer", torch.nn.LayerNorm(7, eps=0.1)), ("rms", torch.nn.RMSNorm(7, eps=0.1))):
        model = SimpleNamespace(hook_dict={"blocks.0.hook_resid_post": None})

        def resume(h, module=module):
            return module(h) @ weight.T + bias

        with torch.no_grad():
            at = ace.PausedPass(
                "blocks.0.hook_resid_post", torch.arange(50), activations, resume(activations), resume, restarted=True
            )
        readout = find_readout(model, [at], ace.CentredLogits())
        assert readout.norm == norm
        assert readout.eps == pytest.approx(0.1, rel=1e-3)


def test_a_small_output_is_held_to_its_own_size(tokenizer, samples):
    """One that is not of the form does not hide behind one that is and is a million times larger."""

    def target(logits):
        return torch.cat([1e6 * (logits[:, :1] - logits[:, 1:2]), (logits[:, 2:5] - logits[:, 5:6]).square()], 1)

    model = build("native", tokenizer)
    assert find_readout(model, [paused(model, samples)], target) is None
    assert find_readout(model, [paused(model, samples)], lambda logits: target(logits)[:, :1]) is not None


def test_every_batch_is_held_against_it(tokenizer, samples):
    model = build("native", tokenizer)
    at = paused(model, samples)
    assert find_readout(model, [at, at], ANSWERS) is not None
    assert find_readout(model, [at, replace(at, logits=at.logits.roll(1, 0))], ANSWERS) is None


def test_other_readouts_are_not_taken_for_one(tokenizer, samples):
    model = build("native", tokenizer)
    at = paused(model, samples)
    assert find_readout(model, [at], lambda logits: logits.log_softmax(1)) is None
    assert find_readout(model, [at], lambda logits: logits[:, :2].detach()) is None
    assert find_readout(model, [paused(model, samples, "blocks.1.hook_resid_post")], ANSWERS) is None
    model.cfg.output_logits_soft_cap = model.original_model.output_logits_soft_cap = 1.0
    assert find_readout(model, [paused(model, samples)], ANSWERS) is None
