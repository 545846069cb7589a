"""The Jacobian is the exact derivative at each sample's own position, whatever surrounds the call."""

import pytest
import torch
from conftest import build, padded

import ace_lens as ace
from ace_lens.models import attached, evaluating

HOOK_POINTS = [
    "hook_embed",
    "blocks.0.hook_resid_pre",
    "blocks.1.hook_resid_post",
    "blocks.2.hook_resid_post",
]


def central_difference(model, samples, target, hook_point, sample, direction, step=1e-5):
    """The change of a sample's outputs when the activation at its own position moves along `direction`."""
    row, position = samples.sequence[sample], samples.position[sample]
    tokens = samples.tokens[row : row + 1]

    def moved(by):
        def move(activation, hook):
            activation = activation.clone()
            activation[:, position] += by * direction
            return activation

        with torch.no_grad(), attached(model, [(hook_point, move)]):
            return target(model(tokens)[:, position])[0]

    return (moved(step) - moved(-step)) / (2 * step)


@pytest.mark.parametrize("hook_point", HOOK_POINTS)
def test_jacobian_agrees_with_finite_differences_at_several_positions_of_a_sequence(
    kind, hook_point, tokenizer, tokens
):
    if kind == "llama":
        pytest.skip("transformers computes RMSNorm in float32 whatever the model's dtype")
    model = build(kind, tokenizer, torch.float64)
    samples = ace.Samples.from_tokens(tokens[:2], torch.tensor([[1, 4, 6], [0, 2, 6]]))
    target = ace.CentredLogits([3, 5, 8])
    probed = ace.JacobianProbe(model, target, hook_point)(samples)[hook_point]
    assert probed.jacobians.shape == (6, 3, 32)
    generator = torch.Generator().manual_seed(0)
    for sample in range(len(samples)):
        direction = torch.randn(32, generator=generator, dtype=torch.float64)
        expected = central_difference(model, samples, target, hook_point, sample, direction)
        found = probed.jacobians[sample] @ direction
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_gradient_of_summed_outputs_would_be_another_thing(native, tokens):
    """The trap that the probe avoids is real: upstream of attention, samples of a sequence reach each other."""
    native = native.double()
    samples = ace.Samples.from_tokens(tokens[:2], "all")
    hook_point = "blocks.0.hook_resid_pre"
    target = ace.CentredLogits([3, 5])
    exact = ace.JacobianProbe(native, target, hook_point)(samples)[hook_point].jacobians
    capture = ace.CoreHook(hook_point, live=True)
    with native.hooks(fwd_hooks=capture.fwd_hooks()):
        outputs = target(samples.at(native(tokens[:2])))
    residual = capture.activations[hook_point]
    (summed,) = torch.autograd.grad(outputs[:, 0].sum(), residual)
    difference = (samples.at(summed) - exact[:, 0]).norm(dim=1)
    last = samples.position == 6
    assert difference[last].max() < 1e-10
    assert difference[~last].min() > 1e-3 * exact.norm(dim=2).max()


def test_all_hook_points_come_from_one_backward_pass_each_output(native, tokens, monkeypatch):
    calls = []
    original = torch.autograd.grad

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    samples = ace.Samples.from_tokens(tokens)
    together = ace.JacobianProbe(native, ace.CentredLogits([3, 5, 8]), HOOK_POINTS)(samples)
    assert len(calls) == 3
    for hook_point in HOOK_POINTS:
        alone = ace.JacobianProbe(native, ace.CentredLogits([3, 5, 8]), hook_point)(samples)[hook_point]
        torch.testing.assert_close(together[hook_point].jacobians, alone.jacobians)
        torch.testing.assert_close(together[hook_point].activations, alone.activations)


@pytest.mark.parametrize("surrounding", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_works_with_frozen_parameters_inside_no_grad_and_inference_mode(model, tokens, surrounding):
    samples = ace.Samples.from_tokens(tokens)
    probe = ace.JacobianProbe(model, ace.CentredLogits([3, 5]), HOOK_POINTS)
    expected = probe(samples)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with surrounding():
        made_inside = ace.Samples.from_tokens(tokens.clone())
        found = probe(made_inside)
    for hook_point in HOOK_POINTS:
        torch.testing.assert_close(found[hook_point].jacobians, expected[hook_point].jacobians)


def test_parameter_gradients_hooks_mode_and_random_state_are_left_alone(model, tokens):
    model.train()
    next(model.modules()).training = False
    modes = [module.training for module in model.modules()]
    gradient = torch.ones_like(next(iter(model.parameters())))
    next(iter(model.parameters())).grad = gradient.clone()
    fired = []
    point = model.hook_dict["blocks.1.hook_resid_post"]
    point.add_hook(lambda activation, hook: fired.append(hook.name))
    before = len(point.fwd_hooks)
    state = torch.get_rng_state()
    ace.JacobianProbe(model, ace.CentredLogits([3, 5]), HOOK_POINTS)(ace.Samples.from_tokens(tokens))
    assert fired
    assert len(point.fwd_hooks) == before
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(next(iter(model.parameters())).grad, gradient)
    assert all(parameter.grad is None for parameter in list(model.parameters())[1:])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_model_runs_without_dropout(gpt2, tokens):
    """gpt2's embedding dropout lies outside the bridge's own tree of modules."""
    samples = ace.Samples.from_tokens(tokens)
    probe = ace.JacobianProbe(gpt2, ace.CentredLogits([3, 5]), "blocks.1.hook_resid_post")
    expected = probe(samples)["blocks.1.hook_resid_post"]
    gpt2.train()
    found = probe(samples)["blocks.1.hook_resid_post"]
    assert torch.equal(found.jacobians, expected.jacobians)
    assert gpt2.original_model.transformer.drop.training
    with evaluating(gpt2):
        assert not gpt2.original_model.transformer.drop.training


def test_padding_side_and_batching_change_nothing(model, tokens):
    right, left = padded(tokens)
    masks = [(part != 0).long() for part in (right, left)]
    found = []
    for part, mask, batch_size in ((right, masks[0], 6), (left, masks[1], 6), (right, masks[0], 1)):
        samples = ace.Samples.from_tokens(part, attention_mask=mask)
        probe = ace.JacobianProbe(model, ace.CentredLogits([3, 5]), HOOK_POINTS[1:], batch_size=batch_size)
        found.append(probe(samples))
    for hook_point in HOOK_POINTS[1:]:
        for other in found[1:]:
            for part in ("activations", "jacobians", "outputs"):
                expected = getattr(found[0][hook_point], part)
                torch.testing.assert_close(
                    getattr(other[hook_point], part),
                    expected,
                    rtol=1e-4,
                    atol=1e-4 * float(expected.abs().max()),
                )


def test_samples_keep_their_order(native, tokens):
    sequence = torch.tensor([3, 0, 3, 1, 0])
    position = torch.tensor([2, 5, 1, 6, 0])
    samples = ace.Samples(tokens, torch.ones_like(tokens), sequence, position)
    for hook_point in HOOK_POINTS[2:]:
        together = ace.JacobianProbe(native, ace.CentredLogits([3, 5]), hook_point, batch_size=2)(samples)
        for index in range(5):
            alone = ace.JacobianProbe(native, ace.CentredLogits([3, 5]), hook_point)(samples[[index]])
            torch.testing.assert_close(
                together[hook_point].jacobians[index], alone[hook_point].jacobians[0], rtol=1e-4, atol=1e-5
            )


def test_a_target_without_influence_is_refused(native, tokens):
    samples = ace.Samples.from_tokens(tokens)

    def constant(logits):
        return torch.ones(len(logits), 1)

    with pytest.raises(ValueError, match=r"Nothing at blocks\.0\.hook_resid_post influences constant"):
        ace.JacobianProbe(native, constant, "blocks.0.hook_resid_post")(samples)
    with pytest.raises(ValueError, match="the Jacobian is zero"):
        ace.extract_core(native, samples, lambda logits: 0 * logits[:, :1], "blocks.0.hook_resid_post")


def test_values_that_are_not_finite_are_refused_with_their_place(native, tokens):
    samples = ace.Samples.from_tokens(tokens)

    def spoil(activation, hook):
        activation = activation.clone()
        activation[-1] = torch.nan
        return activation

    probe = ace.JacobianProbe(native, ace.CentredLogits([3, 5]), "blocks.1.hook_resid_post", batch_size=4)
    with (
        native.hooks(fwd_hooks=[("blocks.0.hook_resid_post", spoil)]),
        pytest.raises(ValueError, match=r"activation at blocks\.1\.hook_resid_post is NaN or infinite in batch 0"),
    ):
        probe(samples)


def test_a_target_of_another_shape_is_refused(native, tokens):
    with pytest.raises(ValueError, match=r"takes logits \[sample, d_vocab\] to outputs \[sample, target\]"):
        ace.JacobianProbe(native, lambda logits: logits[:, 0], "hook_embed")(ace.Samples.from_tokens(tokens))


def test_an_encoder_is_refused(tokenizer):
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config.architectures = ["BertForMaskedLM"]
    model = TransformerBridge.boot_transformers(
        "google-bert/bert-base-cased", hf_model=BertForMaskedLM(config), tokenizer=tokenizer, device="cpu"
    )
    with pytest.raises(TypeError, match="is an encoder"):
        ace.JacobianProbe(model, ace.CentredLogits([3, 5]), "blocks.0.hook_resid_post")


def test_attention_in_both_directions_is_noticed_where_no_configuration_says_so(tokens):
    """A module of one's own that looks ahead has no configuration to tell; its derivatives do."""
    from transformer_lens.hook_points import HookPoint
    from transformer_lens.HookedRootModule import HookedRootModule

    class LooksAhead(HookedRootModule):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(40, 8)
            self.hook_embed = HookPoint()
            self.setup()

        def forward(self, tokens):
            return self.hook_embed(self.embed(tokens)).mean(1, keepdim=True).expand(-1, tokens.shape[1], -1)

    samples = ace.Samples.from_tokens(tokens, torch.tensor([[2]] * 6))
    samples = ace.Samples(
        samples.tokens,
        samples.attention_mask,
        torch.cat([samples.sequence, torch.tensor([0])]),
        torch.cat([samples.position, torch.tensor([6])]),
    )
    with pytest.raises(ValueError, match="attends in both directions"):
        ace.JacobianProbe(LooksAhead(), ace.CentredLogits(), "hook_embed")(samples)


def test_a_model_in_another_process_is_refused():
    class RemoteBridge:
        def __init__(self):
            self.hook_dict = {"hook_embed": None}

        def __call__(self, tokens):
            return tokens

    with pytest.raises(TypeError, match="RemoteBridge runs its model in another process"):
        ace.JacobianProbe(RemoteBridge(), ace.CentredLogits(), "hook_embed")
