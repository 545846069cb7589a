"""Other ways of finding a subspace do what they are known for, and stand beside the core in one table."""

import pytest
import torch
from conftest import random_core
from hypothesis import given
from hypothesis import strategies as st

import ace_lens as ace
from ace_lens import controls
from ace_lens.controls import Projection

TARGET = ace.CentredLogits([3, 5, 8])


def draw(seed, n=300, d_model=12):
    """Activations with a planted class signal in one direction and large variance in another."""
    generator = torch.Generator().manual_seed(seed)
    frame, _ = torch.linalg.qr(torch.randn(d_model, d_model, generator=generator, dtype=torch.float64))
    labels = torch.randint(2, (n,), generator=generator)
    activations = torch.randn(n, d_model, generator=generator, dtype=torch.float64)
    activations = activations + 9 * torch.randn(n, 1, generator=generator, dtype=torch.float64) * frame[:, 0]
    return activations + 6 * (labels[:, None] - 0.5) * frame[:, 1] + 2, labels, frame


def angle(basis, direction):
    return float((basis.T @ direction).norm())


@given(st.integers(0, 2**31))
def test_each_finds_what_it_looks_for(seed):
    activations, labels, frame = draw(seed)
    assert angle(controls.principal_components(activations, 1), frame[:, 0]) > 0.95
    assert angle(controls.class_mean_differences(activations, labels, 1), frame[:, 1]) > 0.8
    assert angle(controls.linear_probe(activations, labels, 1), frame[:, 1]) > 0.8
    generator = torch.Generator().manual_seed(seed)
    noisy = frame[:, 2].expand(300, 1, 12) + 0.1 * torch.randn(300, 1, 12, generator=generator, dtype=torch.float64)
    assert angle(controls.leading_gradients(noisy, 1), frame[:, 2]) > 0.95


@given(st.integers(0, 2**31), st.integers(1, 4))
def test_bases_are_orthonormal_and_draws_follow_the_generator(seed, rank):
    activations, _, _ = draw(seed)
    for make in (
        lambda generator: controls.random_subspace(12, rank, generator),
        lambda generator: controls.random_active_subspace(activations, rank, generator),
    ):
        first, again = (make(torch.Generator().manual_seed(seed)) for _ in range(2))
        assert torch.equal(first, again)
        torch.testing.assert_close(first.T @ first, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-10)


def test_active_draws_follow_the_covariance():
    activations, _, frame = draw(0)
    generator = torch.Generator().manual_seed(0)
    draws = [angle(controls.random_active_subspace(activations, 1, generator), frame[:, 0]) for _ in range(50)]
    even = [angle(controls.random_subspace(12, 1, generator), frame[:, 0]) for _ in range(50)]
    assert sum(draws) > 2 * sum(even)


def remove(projection, activations):
    deviation = activations - activations.mean(0)
    return activations - deviation @ projection.reads @ projection.writes.T


@given(st.integers(0, 2**31), st.integers(2, 4))
def test_leace_leaves_no_linear_trace_of_the_labels(seed, n_classes):
    """After it, class means are equal, so that no linear probe beats chance; before it they were not."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(200) % n_classes
    activations = torch.randn(200, 10, generator=generator, dtype=torch.float64)
    activations = activations @ torch.randn(10, 10, generator=generator, dtype=torch.float64)
    activations = activations + torch.nn.functional.one_hot(labels, n_classes).double() @ torch.randn(
        n_classes, 10, generator=generator, dtype=torch.float64
    )
    projection = controls.leace(activations, labels)
    assert projection.rank == n_classes - 1
    torch.testing.assert_close(
        projection.reads.T @ projection.writes, torch.eye(n_classes - 1, dtype=torch.float64), rtol=0, atol=1e-8
    )
    erased = remove(projection, activations)
    means = torch.stack([erased[labels == label].mean(0) for label in range(n_classes)])
    torch.testing.assert_close(means, means[:1].expand_as(means), rtol=0, atol=1e-8)
    before = torch.stack([activations[labels == label].mean(0) for label in range(n_classes)])
    assert (before - before[:1]).abs().max() > 0.1


def test_leace_agrees_with_concept_erasure():
    concept_erasure = pytest.importorskip("concept_erasure", reason="the library of LEACE's authors is not installed")
    activations, labels, _ = draw(3)
    fitter = concept_erasure.LeaceFitter(12, 1, dtype=torch.float64, shrinkage=False)
    eraser = fitter.update(activations, labels.double()).eraser
    torch.testing.assert_close(
        remove(controls.leace(activations, labels, shrinkage=False), activations),
        eraser(activations),
        rtol=1e-6,
        atol=1e-6,
    )


def test_a_trained_subspace_finds_the_only_one_that_matters(native, tokens):
    """After the last block without normalisation the outputs read two directions; training has to find them."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    cfg = TransformerBridgeConfig(
        n_layers=1, d_model=16, n_heads=2, d_head=8, d_mlp=32, d_vocab=37, n_ctx=8, act_fn="relu", seed=0, device="cpu"
    )
    cfg.normalization_type = None
    model = TransformerBridge.boot_native(cfg)
    for parameter in model.parameters():
        parameter.data.mul_(4)
    gradient = torch.ones_like(next(iter(model.parameters())))
    next(iter(model.parameters())).grad = gradient.clone()
    samples = ace.Samples.from_tokens(tokens, "all")
    margin = ace.LogitMargin(model, [3], [5])
    basis = controls.trained_subspace(
        model,
        samples,
        margin,
        "blocks.0.hook_resid_post",
        1,
        generator=torch.Generator().manual_seed(0),
        n_steps=400,
        learning_rate=0.05,
    )
    read = model.W_U[:, 3] - model.W_U[:, 5]
    assert angle(basis, (read / read.norm()).double().detach()) > 0.95
    assert torch.equal(next(iter(model.parameters())).grad, gradient)


@pytest.fixture
def table(native, tokens):
    samples = ace.Samples.from_tokens(tokens, "all", labels=(tokens * 7) % 3)
    fit, judge = samples.split(0.5, torch.Generator().manual_seed(0))
    core = random_core(2, "blocks.2.hook_resid_post")
    return core, judge, ace.compare_with_controls(native, core, judge, TARGET, fit=fit, n_draws=4, n_steps=3)


def test_the_table_holds_every_control(table):
    _, _, compared = table
    assert [row.name for row in compared.rows] == [
        "core",
        "PCA of activations",
        "leading gradients",
        "class mean differences",
        "linear probe",
        "LEACE",
        "trained (DAS)",
        "random",
        "random active",
    ]
    assert all(row.rank == 2 for row in compared.rows)
    assert all(set(row.outside_kl) == {"keep", "remove", "flip"} for row in compared.rows)
    printed = str(compared)
    assert "of random subspaces over 4 draws" in printed
    assert "KL outside: keep, remove, flip" in printed
    with pytest.raises(KeyError, match="No control is called 'magic'"):
        compared.row("magic")


def test_the_core_s_row_is_its_validation(table, native):
    core, judge, compared = table
    validation = ace.validate(native, core, judge, TARGET)
    row = compared.row("core")
    for name in ("keep", "remove", "flip"):
        assert getattr(row, name).value == pytest.approx(getattr(validation, name)[0].value)
        assert row.outside_kl[name] == pytest.approx(validation.outside_kl[name][0], rel=1e-4)
    assert compared.baseline.value == validation.baseline.value


def test_reports_save_and_load_back_equal(table, tmp_path):
    _, _, compared = table
    compared.save(tmp_path / "controls.json")
    assert ace.Controls.load(tmp_path / "controls.json") == compared
    (tmp_path / "other.json").write_text('{"rho": 1}')
    with pytest.raises(ValueError, match=r"other\.json does not hold a Controls: Field required at description"):
        ace.Controls.load(tmp_path / "other.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="Invalid JSON"):
        ace.Controls.load(tmp_path / "broken.json")


def test_figures_are_drawn_at_column_width(table, native, tmp_path):
    core, judge, compared = table
    validation = ace.validate(native, core, judge, TARGET, ranks=[1, 2])
    for name, figure in (
        ("validation", ace.plot_validation(validation, compared)),
        ("controls", ace.plot_controls(compared)),
    ):
        assert figure.get_size_inches()[0] <= 3.5
        figure.savefig(tmp_path / f"{name}.png", dpi=200)
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    other = ace.validate(native, core, judge, TARGET, ace.CROSS_ENTROPY)
    with pytest.raises(ValueError, match="in cross-entropy, the controls in accuracy: they do not fit on one axis"):
        ace.plot_validation(other, compared)


def test_an_orthogonal_projection_reads_what_it_writes():
    basis = random_core(2).basis
    projection = Projection.onto(basis)
    assert projection.rank == 2
    assert torch.equal(projection.reads, projection.writes)


def test_perplexity_on_text_stands_beside_every_control(gpt2):
    prompts = [
        f"{start} {noun}" for start in ("The", "The old", "a", "a old") for noun in ("key", "keys", "man", "men")
    ]
    samples = ace.Samples.from_prompts(gpt2, prompts, labels=[0, 1] * 8)
    fit, judge = samples[list(range(8))], samples[list(range(8, 16))]
    text = ace.Samples.from_text(gpt2, ["the man sees the old key", "a cabinet"])
    margin = ace.LogitMargin(gpt2, [" are"], [" is"])
    core = ace.extract_core(gpt2, fit, margin, "blocks.1.hook_resid_post", rank=1)
    compared = ace.compare_with_controls(
        gpt2, core, judge, margin, fit=fit, text=text, n_draws=1, n_steps=2, n_bootstrap=10
    )
    assert compared.perplexity == pytest.approx(ace.text_perplexity(gpt2, text))
    validation = ace.validate(gpt2, core, judge, margin, text=text, n_bootstrap=10)
    for name in ("keep", "remove", "flip"):
        assert compared.row("core").perplexity[name] == pytest.approx(validation.perplexity[name][0], rel=1e-4)
    assert all(set(row.perplexity) == {"keep", "remove", "flip"} for row in compared.rows)
    assert "perplexity on text" in str(compared)
