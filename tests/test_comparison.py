import pytest
import torch
from conftest import random_core
from hypothesis import given
from hypothesis import strategies as st

import ace_lens as ace


def test_weight_cosine():
    first = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert ace.weight_cosine(first, {k: 2 * v for k, v in first.items()}) == pytest.approx(1)
    other = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([[0.0]])}
    assert ace.weight_cosine(first, other) == pytest.approx(0)
    with pytest.raises(ValueError, match="have different parameters"):
        ace.weight_cosine(first, {"a": torch.ones(2)})


@given(st.integers(1, 5), st.integers(0, 2**31))
def test_overlap(rank, seed):
    core = random_core(rank, seed=seed)
    rotation, _ = torch.linalg.qr(
        torch.randn(rank, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    )
    turned = ace.Core(core.basis @ rotation, core.mean, core.singular_values, core.hook_point)
    assert ace.overlap(core, turned) == pytest.approx(1)
    whole = random_core(32, seed=seed)
    assert ace.overlap(whole[:3], ace.Core(whole.basis[:, 3:6], whole.mean, whole.singular_values, "x")) < 1e-12


def test_random_subspaces_overlap_by_chance():
    values = [ace.overlap(random_core(3, seed=seed), random_core(3, seed=seed + 100)) for seed in range(60)]
    assert sum(values) / len(values) == pytest.approx(3 / 32, rel=0.15)


@given(st.integers(0, 2**31))
def test_canonical_correlations_see_through_a_linear_map(seed):
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    change = torch.randn(3, 3, generator=generator, dtype=torch.float64) + 3 * torch.eye(3)
    second = first @ change + 5
    found = ace.canonical_correlations(first[:100], second[:100], first[100:], second[100:])
    torch.testing.assert_close(found, torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-8)


def test_canonical_correlations_of_planted_strength_and_of_noise():
    generator = torch.Generator().manual_seed(0)
    shared, first, second = (torch.randn(8000, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    weight = 0.8**0.5
    noisy = [weight * shared + (1 - 0.8) ** 0.5 * part for part in (first, second)]
    found = ace.canonical_correlations(noisy[0][:4000], noisy[1][:4000], noisy[0][4000:], noisy[1][4000:])
    torch.testing.assert_close(found, torch.full((2,), 0.8, dtype=torch.float64), rtol=0, atol=0.03)
    null = ace.canonical_correlations(first[:40], second[:40], first[4000:], second[4000:])
    assert null.abs().max() < 0.1
    with pytest.raises(ValueError, match=r"10 samples are too few .* Give at least 20"):
        ace.canonical_correlations(first[:10], second[:10], first[4000:], second[4000:])
