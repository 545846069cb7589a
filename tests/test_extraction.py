"""What the method promises, as properties: see method references in `ace_lens.extraction`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ace_lens as ace

sizes = st.fixed_dictionaries(
    {
        "n": st.integers(8, 40),
        "d_model": st.integers(3, 24),
        "n_outputs": st.integers(1, 4),
        "seed": st.integers(0, 2**31),
    }
)


def draw(n, d_model, n_outputs, seed):
    """Well-conditioned activations (with a mean) and Jacobians, float64."""
    generator = torch.Generator().manual_seed(seed)
    activations = torch.randn(n, d_model, generator=generator, dtype=torch.float64)
    jacobians = torch.randn(n, n_outputs, d_model, generator=generator, dtype=torch.float64)
    return activations + 3 * torch.randn(d_model, generator=generator, dtype=torch.float64), jacobians


def extractor(activations, jacobians):
    return ace.CoreExtractor("hook_embed").update(activations, jacobians)


def projector(core):
    return core.basis @ core.basis.T


def supported(core):
    """A rank below which the singular values are apart, so that the subspace is well defined."""
    values = core.singular_values
    gaps = (values[:-1] - values[1:]) / values[0]
    return 1 + int(gaps.argmax()) if len(gaps) and gaps.max() > 1e-4 else len(values)


@given(sizes)
def test_equals_the_direct_svd(size):
    activations, jacobians = draw(**size)
    centred = activations - activations.mean(0)
    left, values, _ = torch.linalg.svd(centred @ jacobians.flatten(0, 1).T, full_matrices=False)
    core = extractor(activations, jacobians).core()
    n = len(core.singular_values)
    torch.testing.assert_close(core.singular_values, values[:n], rtol=1e-10, atol=1e-10 * float(values[0]))
    rank = supported(core)
    basis, _ = torch.linalg.qr(centred.T @ left[:, :rank])
    torch.testing.assert_close(projector(core[:rank]), basis @ basis.T, rtol=0, atol=1e-8)


def test_equals_the_direct_svd_to_ten_digits_on_well_conditioned_data():
    """Singular values apart by construction, so that the subspaces themselves can be held to 1e-10."""
    generator = torch.Generator().manual_seed(0)
    n, d_model, n_outputs = 200, 30, 2
    left, _ = torch.linalg.qr(torch.randn(n, 6, generator=generator, dtype=torch.float64))
    left, _ = torch.linalg.qr(left - left.mean(0))
    right, _ = torch.linalg.qr(torch.randn(d_model, 6, generator=generator, dtype=torch.float64))
    activations = left @ torch.diag(torch.tensor([9.0, 7, 5, 3, 2, 1], dtype=torch.float64)) @ right.T + 1
    jacobians = torch.randn(n, n_outputs, d_model, generator=generator, dtype=torch.float64)
    centred = activations - activations.mean(0)
    u, values, _ = torch.linalg.svd(centred @ jacobians.flatten(0, 1).T, full_matrices=False)
    core = extractor(activations, jacobians).core()
    assert core.rank == 6
    torch.testing.assert_close(core.singular_values, values[:6], rtol=1e-10, atol=0)
    for rank in range(1, 7):
        basis, _ = torch.linalg.qr(centred.T @ u[:, :rank])
        torch.testing.assert_close(projector(core[:rank]), basis @ basis.T, rtol=0, atol=1e-10)


@given(sizes)
def test_squared_singular_values_are_those_of_the_two_gramians(size):
    """C = H^T H / (n - 1) is what is reached, O = J^T J / n what is observed: Hankel singular values."""
    activations, jacobians = draw(**size)
    n = size["n"]
    rows = jacobians.flatten(0, 1)
    product = activations.T.cov() @ (rows.T @ rows / n)
    hankel = torch.linalg.eigvals(product).real.sort(descending=True).values
    values = extractor(activations, jacobians).core().singular_values
    squares = values.square() / ((n - 1) * n)
    torch.testing.assert_close(squares, hankel[: len(values)], rtol=1e-6, atol=1e-9 * float(hankel[0]))


@given(sizes)
def test_singular_values_do_not_change_under_a_change_of_basis(size):
    activations, jacobians = draw(**size)
    generator = torch.Generator().manual_seed(size["seed"] + 1)
    change = torch.randn(size["d_model"], size["d_model"], generator=generator, dtype=torch.float64)
    change += 3 * torch.eye(size["d_model"], dtype=torch.float64)
    condition = float(torch.linalg.cond(change))
    core = extractor(activations, jacobians).core()
    changed = extractor(activations @ change, jacobians @ torch.linalg.inv(change).T).core()
    n = min(len(core.singular_values), len(changed.singular_values))
    torch.testing.assert_close(
        changed.singular_values[:n],
        core.singular_values[:n],
        rtol=1e-9 * condition,
        atol=1e-10 * condition * float(core.singular_values[0]),
    )


@given(sizes)
def test_the_core_rotates_with_the_residual_stream(size):
    activations, jacobians = draw(**size)
    generator = torch.Generator().manual_seed(size["seed"] + 1)
    rotation, _ = torch.linalg.qr(
        torch.randn(size["d_model"], size["d_model"], generator=generator, dtype=torch.float64)
    )
    core = extractor(activations, jacobians).core()
    rotated = extractor(activations @ rotation, jacobians @ rotation).core()
    rank = min(supported(core), rotated.rank)
    expected = rotation.T @ projector(core[:rank]) @ rotation
    torch.testing.assert_close(projector(rotated[:rank]), expected, rtol=0, atol=1e-7)


@given(sizes, st.lists(st.integers(1, 7), min_size=1, max_size=8), st.integers(0, 1000))
def test_any_split_and_order_of_batches_gives_the_same_subspace(size, lengths, shuffle):
    activations, jacobians = draw(**size)
    whole = extractor(activations, jacobians).core()
    order = torch.randperm(len(activations), generator=torch.Generator().manual_seed(shuffle))
    streaming = ace.CoreExtractor("hook_embed")
    start, turn = 0, 0
    while start < len(order):
        batch = order[start : start + lengths[turn % len(lengths)]]
        streaming.update(activations[batch], jacobians[batch])
        start, turn = start + len(batch), turn + 1
    core = streaming.core()
    rank = supported(whole)
    scale = float(whole.singular_values[0])
    torch.testing.assert_close(core.mean, whole.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        core.singular_values[:rank], whole.singular_values[:rank], rtol=1e-10, atol=1e-10 * scale
    )
    torch.testing.assert_close(projector(core[:rank]), projector(whole[:rank]), rtol=0, atol=1e-8)


@given(sizes, st.integers(1, 3))
def test_merging_is_the_same_in_any_order(size, parts):
    activations, jacobians = draw(**size)
    whole = extractor(activations, jacobians).core()
    pieces = list(zip(activations.tensor_split(parts + 1), jacobians.tensor_split(parts + 1), strict=True))
    for order in (pieces, pieces[::-1]):
        merged = ace.CoreExtractor("hook_embed")
        for piece in order:
            merged.merge(extractor(*piece))
        core = merged.core()
        assert core.provenance.n_samples == size["n"]
        scale = float(whole.singular_values[0])
        n = min(len(core.singular_values), len(whole.singular_values))
        torch.testing.assert_close(core.singular_values[:n], whole.singular_values[:n], rtol=1e-9, atol=1e-10 * scale)
        rank = min(supported(whole), core.rank)
        torch.testing.assert_close(projector(core[:rank]), projector(whole[:rank]), rtol=0, atol=1e-8)


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(10, 30))
def test_a_planted_core_is_recovered(seed, rank, d_model):
    """Activity off the core is not read, and what is read off the core is not active: only the core is both."""
    generator = torch.Generator().manual_seed(seed)
    frame, _ = torch.linalg.qr(torch.randn(d_model, d_model, generator=generator, dtype=torch.float64))
    planted, active, read = frame[:, :rank], frame[:, rank : rank + 3], frame[:, rank + 3 : rank + 6]
    n = 60

    def noise(k, *shape):
        return torch.randn(*shape, k, generator=generator, dtype=torch.float64)

    activations = noise(rank, n) @ planted.T + 50 * noise(3, n) @ active.T
    jacobians = noise(rank, n, 2) @ planted.T + 50 * noise(3, n, 2) @ read.T
    core = extractor(activations, jacobians).core(rank=rank)
    # H^T U mixes in what happens to vary along with the core in this sample: the reading is exact in the
    # singular values, and in the subspace once the active directions are uncorrelated with the core.
    centred = activations - activations.mean(0)
    inside, outside = centred @ planted, centred @ active
    outside = outside - inside @ torch.linalg.lstsq(inside, outside).solution
    core = extractor(inside @ planted.T + outside @ active.T, jacobians).core(rank=rank)
    torch.testing.assert_close(projector(core), planted @ planted.T, rtol=0, atol=1e-8)


@given(sizes)
def test_cores_are_orthonormal_and_nested(size):
    activations, jacobians = draw(**size)
    streaming = extractor(activations, jacobians)
    whole = streaming.core()
    gram = whole.basis.T @ whole.basis
    torch.testing.assert_close(gram, torch.eye(whole.rank, dtype=torch.float64), rtol=0, atol=1e-12)
    for rank in range(1, whole.rank + 1):
        torch.testing.assert_close(streaming.core(rank=rank).basis, whole[:rank].basis, rtol=0, atol=1e-9)


@given(sizes, st.floats(0.01, 1))
def test_energy_chooses_the_smallest_rank_that_holds_it(size, energy):
    streaming = extractor(*draw(**size))
    core = streaming.core(energy=energy)
    share = core.energy
    assert share[core.rank - 1] >= energy - 1e-9
    assert core.rank == 1 or share[core.rank - 2] < energy


def test_one_output_orients_the_core_by_the_target():
    activations, jacobians = draw(50, 10, 1, 0)
    jacobians = jacobians.abs()
    core = extractor(activations, jacobians).core(rank=1)
    assert jacobians.mean(0)[0] @ core.basis[:, 0] > 0
    assert torch.equal(extractor(activations, 2 * jacobians).core(rank=1).basis.sign(), core.basis.sign())


def test_no_eigenproblem_of_d_model_size_when_there_are_fewer_samples(monkeypatch):
    shapes = []
    for name in ("svd", "qr"):
        original = getattr(torch.linalg, name)

        def watched(matrix, *args, original=original, **kwargs):
            shapes.append(tuple(matrix.shape))
            return original(matrix, *args, **kwargs)

        monkeypatch.setattr(torch.linalg, name, watched)
    for name in ("eig", "eigh", "eigvals", "eigvalsh"):
        monkeypatch.setattr(torch.linalg, name, None)
    extractor(*draw(20, 400, 1, 0)).core(rank=3)
    assert shapes
    assert all(min(shape) <= 20 for shape in shapes)


def test_one_call_equals_the_parts(native, tokens):
    samples = ace.Samples.from_tokens(tokens, "all")
    target = ace.CentredLogits([3, 5, 8])
    hook_point = "blocks.1.hook_resid_post"
    probed = ace.JacobianProbe(native, target, hook_point)(samples)[hook_point]
    expected = extractor(probed.activations, probed.jacobians).core(rank=2)
    core = ace.extract_core(native, samples, target, hook_point, rank=2, batch_size=5)
    torch.testing.assert_close(core.basis, expected.basis, rtol=0, atol=1e-4)
    assert core.hook_point == hook_point
    assert core.basis.dtype == torch.float64
    assert core.provenance.model_class == "TransformerBridge"
    assert core.provenance.model_name == "native"
    assert core.provenance.target == "CentredLogits([3, 5, 8])"
    assert core.provenance.n_samples == len(samples) == 42
    assert core.provenance.dtype == "float32"
    assert set(core.provenance.versions) == {"ace-lens", "transformer-lens", "torch"}


def test_several_hook_points_in_one_pass(native, tokens):
    samples = ace.Samples.from_tokens(tokens)
    target = ace.CentredLogits([3, 5, 8])
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(3)]
    cores = ace.extract_cores(native, samples, target, names, rank=2)
    assert list(cores) == names
    for name, core in cores.items():
        alone = ace.extract_core(native, samples, target, name, rank=2)
        torch.testing.assert_close(projector(core), projector(alone), rtol=0, atol=1e-4)


def test_an_alias_is_stored_under_its_transformerlens_name(native, tokens):
    core = ace.extract_core(native, ace.Samples.from_tokens(tokens), ace.CentredLogits(), "blocks.1.hook_out", rank=1)
    assert core.hook_point == "blocks.1.hook_resid_post"


def test_bad_input_is_refused(native, tokens):
    target = ace.CentredLogits()
    samples = ace.Samples.from_tokens(tokens)
    with pytest.raises(ValueError, match=r"no hook point 'blocks\.1\.hook_resid_pots'.*blocks\.1\.hook_resid_post"):
        ace.extract_core(native, samples, target, "blocks.1.hook_resid_pots")
    with pytest.raises(ValueError, match="6 samples cannot span a core of rank 6"):
        ace.extract_core(native, samples, target, "blocks.1.hook_resid_post", rank=6)
    same = ace.Samples.from_tokens(tokens[:1].expand(6, -1))
    with pytest.raises(ValueError, match="do not vary along anything that the target reads"):
        ace.extract_core(native, same, target, "blocks.1.hook_resid_post", rank=1)
    streaming = ace.CoreExtractor("hook_embed")
    with pytest.raises(ValueError, match="No samples have been taken in"):
        streaming.core()
    streaming.update(*draw(20, 5, 1, 0))
    with pytest.raises(ValueError, match=r"Jacobians are \[target, d_model\] = \(2, 5\), earlier ones were \(1, 5\)"):
        streaming.update(*draw(20, 5, 2, 0))
    with pytest.raises(ValueError, match="This batch has no samples"):
        streaming.update(torch.empty(0, 5), torch.empty(0, 1, 5))
    with pytest.raises(ValueError, match="rank or an energy, not both"):
        streaming.core(rank=1, energy=0.5)
    with pytest.raises(ValueError, match=r"share in \(0, 1\], not 1\.5"):
        streaming.core(energy=1.5)
    with pytest.raises(ValueError, match="A rank is between 1 and d_model = 5, not 0"):
        streaming.core(rank=0)
    with pytest.raises(ValueError, match="NaN or infinite in the batch that follows sample 20"):
        streaming.update(torch.full((2, 5), torch.nan), torch.ones(2, 1, 5))
    with pytest.raises(ValueError, match="do not merge"):
        streaming.merge(ace.CoreExtractor("hook_pos_embed").update(*draw(20, 5, 1, 0)))
    one = ace.CoreExtractor("hook_embed").update(torch.randn(30, 5), torch.ones(30, 1, 5))
    with pytest.raises(ValueError, match=r"Only 1 directions .* there is no core of rank 2"):
        one.core(rank=2)


def test_the_caller_s_buffers_may_be_used_again():
    activations, jacobians = draw(40, 8, 2, 0)
    expected = extractor(activations, jacobians).core()
    streaming = ace.CoreExtractor("hook_embed")
    buffer_h, buffer_j = torch.empty_like(activations[:20]), torch.empty_like(jacobians[:20])
    for half in (slice(0, 20), slice(20, 40)):
        buffer_h.copy_(activations[half])
        buffer_j.copy_(jacobians[half])
        streaming.update(buffer_h, buffer_j)
    torch.testing.assert_close(streaming.core().singular_values, expected.singular_values)


@pytest.mark.parametrize("name", ["blocks.1.hook_resid_mid", "blocks.1.hook_mlp_out", "blocks.1.attn.hook_z"])
def test_hook_points_beside_the_residual_stream_are_refused(native, tokens, name):
    with pytest.raises(ValueError, match="is not a hook point of the residual stream"):
        ace.extract_core(native, ace.Samples.from_tokens(tokens), ace.CentredLogits(), name)


def test_jacobians_may_be_given_as_a_factor():
    generator = torch.Generator().manual_seed(0)
    activations = torch.randn(30, 8, generator=generator, dtype=torch.float64)
    jacobian = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    repeated = jacobian.repeat(30, 1, 1)
    found = ace.CoreExtractor("h").update_factored(activations, 30**0.5 * jacobian, jacobian).core()
    expected = ace.CoreExtractor("h").update(activations, repeated).core()
    assert torch.allclose(found.singular_values, expected.singular_values)
    assert torch.allclose(found.basis, expected.basis, atol=1e-9)
    parts = ace.CoreExtractor("h").update(activations[:10], repeated[:10])
    parts.update_factored(activations[10:], 20**0.5 * jacobian, jacobian)
    assert torch.allclose(parts.core().singular_values, expected.singular_values)
    with pytest.raises(ValueError, match="NaN or infinite in the batch that follows sample 30"):
        parts.update_factored(activations, torch.full((3, 8), torch.nan), jacobian)
    with pytest.raises(ValueError, match="NaN or infinite in the batch that follows sample 30"):
        parts.update_factored(activations, jacobian, torch.full((3, 8), torch.nan))
    # Its buffers belong to the caller.
    buffer = 30**0.5 * jacobian
    kept = ace.CoreExtractor("h").update_factored(activations, buffer, jacobian)
    buffer.zero_()
    assert torch.allclose(kept.core().singular_values, expected.singular_values)
