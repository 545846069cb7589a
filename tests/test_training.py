"""A training run cannot lose work, and ends in the same bits however often it is interrupted."""

import subprocess
import sys
import time

import pytest
import torch

import ace_lens as ace
from ace_lens.experiments.postnorm import build_postnorm
from ace_lens.experiments.training import IGNORED, Checkpoint, Recipe, accuracy, checkpoints, train

P = 7
RECIPE = Recipe(epochs=12, learning_rate=1e-3, weight_decay=1.0, batch_size=16, seed=0)


def small(seed=0):
    return build_postnorm(n_layers=2, d_model=16, n_heads=2, d_mlp=32, d_vocab=P, n_ctx=2, dropout=0.1, seed=seed)


def task():
    tokens = torch.cartesian_prod(torch.arange(P), torch.arange(P))
    labels = torch.full_like(tokens, IGNORED)
    labels[:, 1] = tokens.sum(1) % P
    return tokens, labels


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture
def finished(tmp_path):
    model = small()
    train(model, *task(), RECIPE, held_out=task(), folder=tmp_path / "whole", save_at=[4, 8])
    return model, tmp_path


def test_the_same_seed_gives_the_same_bits_and_another_does_not(finished):
    model, _ = finished
    again, other = small(), small()
    state = torch.get_rng_state()
    train(again, *task(), RECIPE)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights(again), weights(model))
    train(other, *task(), Recipe(12, 1e-3, 1.0, 16, seed=1))
    assert not torch.equal(weights(other), weights(model))


def test_interrupted_and_resumed_it_ends_in_the_same_bits(finished):
    model, folder = finished

    class Killed(Exception):
        pass

    for killed_after in (5, 6):
        resumed = small()
        calls = []

        def forward(module, arguments, killed_after=killed_after, calls=calls):
            calls.append(1)
            if len(calls) > 4 * killed_after:
                raise Killed

        handle = resumed.register_forward_pre_hook(forward)
        with pytest.raises(Killed):
            train(resumed, *task(), RECIPE, folder=folder / "killed", save_at=[4, 8])
        handle.remove()
    resumed = small()
    train(resumed, *task(), RECIPE, folder=folder / "killed", save_at=[4, 8])
    assert torch.equal(weights(resumed), weights(model))


def test_a_killed_process_leaves_whole_checkpoints_only(tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; import test_training as t; "
        "t.train(t.small(), *t.task(), t.Recipe(100000, 1e-3, 1.0, 16, 0), folder=Path(sys.argv[1]), "
        "save_at=range(100000))"
    )
    here = str(__import__("pathlib").Path(__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), here])
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("epoch-*.safetensors"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    found = checkpoints(tmp_path)
    assert len(found) >= 3
    found[-1].load_model(small())


def test_checkpoints_say_what_they_are(finished):
    model, folder = finished
    found = checkpoints(folder / "whole")
    assert [checkpoint.epoch for checkpoint in found] == [4, 8, 12]
    assert found[0].recipe["weight_decay"] == 1.0
    assert set(found[0].metrics) == {"loss", "train_accuracy", "test_accuracy"}
    loaded = small(seed=5)
    found[-1].load_model(loaded)
    assert torch.equal(weights(loaded), weights(model))
    assert found[-1].metrics["train_accuracy"] == accuracy(model, *task())


def test_a_branch_goes_on_from_a_checkpoint_by_another_recipe(finished):
    _, folder = finished
    at_eight = checkpoints(folder / "whole")[1]
    branch, same = small(), small()
    train(branch, *task(), Recipe(12, 1e-3, 0.0, 16, 0), folder=folder / "branch", branch_from=at_eight)
    train(same, *task(), RECIPE, branch_from=at_eight)
    assert torch.equal(weights(same), weights(finished[0]))
    assert weights(branch).norm() > weights(same).norm()
    assert [checkpoint.epoch for checkpoint in checkpoints(folder / "branch")] == [12]


def test_more_epochs_go_on_and_another_recipe_is_refused(finished):
    _, folder = finished
    longer = Recipe(14, 1e-3, 1.0, 16, 0)
    resumed, whole = small(), small()
    train(resumed, *task(), longer, folder=folder / "whole")
    train(whole, *task(), longer)
    assert torch.equal(weights(resumed), weights(whole))
    with pytest.raises(ValueError, match=r"another recipe \(weight_decay 1\.0 there, 0\.5 here\)"):
        train(small(), *task(), Recipe(12, 1e-3, 0.5, 16, 0), folder=folder / "whole")


def test_a_foreign_file_is_no_checkpoint(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(1)}, tmp_path / "epoch-000001.safetensors")
    with pytest.raises(ValueError, match="is not a checkpoint of a training run"):
        Checkpoint.read(tmp_path / "epoch-000001.safetensors")


@pytest.mark.parametrize("hook_point", ["hook_embed", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"])
def test_the_post_norm_model_takes_every_hook_and_probe(hook_point):
    model = small().double().eval()
    tokens, labels = task()
    samples = ace.Samples.from_tokens(tokens, "last", labels=labels[:, 1])
    target = ace.CentredLogits()
    probed = ace.JacobianProbe(model, target, hook_point)(samples)[hook_point]
    direction = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def moved(by):
        def move(activation, hook):
            activation = activation.clone()
            activation[:, -1] += by * direction
            return activation

        with torch.no_grad():
            return target(model.run_with_hooks(tokens, fwd_hooks=[(hook_point, move)])[:, -1])

    difference = (moved(1e-5) - moved(-1e-5)) / 2e-5
    found = probed.jacobians @ direction
    assert (found - difference).norm() <= 1e-5 * difference.norm()
    core = ace.extract_core(model, samples, target, hook_point, rank=3)
    validation = ace.validate(model, core, samples, target, ranks=[1, 2, 3])
    assert validation.restarted is (hook_point == "blocks.1.hook_resid_post")
    with ace.SignFlipSteerer(core).attach(model):
        model(tokens)


def test_the_post_norm_model_is_causal():
    model = small().eval()
    with torch.no_grad():
        first, second = model(torch.tensor([[1, 2]])), model(torch.tensor([[1, 5]]))
    torch.testing.assert_close(first[:, 0], second[:, 0])
    assert not torch.allclose(first[:, 1], second[:, 1])
