import math

import pytest
import scipy
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


@given(st.integers(0, 2**31), st.floats(1e-6, 1.5))
def test_principal_angles_are_accurate_down_to_small_ones(seed, angle):
    frame = random_core(4, seed=seed)
    q = frame.basis
    turned = torch.stack([q[:, 0] * math.cos(angle) + q[:, 2] * math.sin(angle), q[:, 1]], 1)
    first = ace.Core(q[:, :2], frame.mean, frame.singular_values, "x")
    second = ace.Core(turned, frame.mean, frame.singular_values, "x")
    torch.testing.assert_close(
        ace.principal_angles(first, second), torch.tensor([0, angle], dtype=torch.float64), rtol=1e-6, atol=1e-9
    )


def test_principal_angles_agree_with_scipy():
    first, second = random_core(3, seed=1), random_core(5, seed=2)
    expected = scipy.linalg.subspace_angles(first.basis.numpy(), second.basis.numpy())[::-1]
    torch.testing.assert_close(ace.principal_angles(first, second), torch.as_tensor(expected.copy()))
    with pytest.raises(ValueError, match="widths 32 and 16, which have no directions in common"):
        ace.principal_angles(first, random_core(2, d_model=16))


def test_permutations_tell_a_shared_coordinate_from_none():
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    second = torch.stack([first[:, 0], torch.randn(200, generator=generator, dtype=torch.float64)], 1)
    p = ace.canonical_correlation_p_values(
        first[:100], second[:100], first[100:], second[100:], n_permutations=99, generator=generator
    )
    assert p[0] == pytest.approx(0.01)
    assert p[1] > 0.05


def test_spearman_agrees_with_scipy_and_has_interval_and_p():
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(80, generator=generator, dtype=torch.float64)
    second = first + torch.randn(80, generator=generator, dtype=torch.float64)
    report = ace.spearman(first, second, n_resamples=200, generator=generator)
    assert report.rho.value == pytest.approx(scipy.stats.spearmanr(first, second).statistic)
    assert report.rho.low < report.rho.value < report.rho.high
    assert report.p == pytest.approx(1 / 201)
    assert str(report).startswith("Spearman 0.")
    noise = torch.randn(80, generator=generator, dtype=torch.float64)
    assert ace.spearman(first, noise, n_resamples=200, generator=generator).p > 0.05
    with pytest.raises(ValueError, match="Give at least three"):
        ace.spearman(first[:2], second[:2], generator=generator)


def test_reports_save_and_load_back_equal(tmp_path):
    generator = torch.Generator().manual_seed(0)
    report = ace.spearman(torch.arange(9.0), torch.arange(9.0).flip(0), n_resamples=20, generator=generator)
    report.save(tmp_path / "spearman.json")
    assert ace.RankCorrelation.load(tmp_path / "spearman.json") == report


def test_linear_cka():
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(500, 4, generator=generator, dtype=torch.float64)
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))
    assert ace.linear_cka(first, 3 * first @ rotation + 1) == pytest.approx(1)
    assert ace.linear_cka(first, torch.randn(500, 4, generator=generator, dtype=torch.float64)) < 0.05


def test_a_consensus_is_what_all_models_share():
    """Three models with cores of rank 4, of which two dimensions carry the same signals, mixed differently in each."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(400, 2, generator=generator, dtype=torch.float64)
    cores, coordinates, planted = [], [], []
    for seed in range(3):
        core = random_core(4, seed=seed)
        own = torch.randn(400, 2, generator=generator, dtype=torch.float64)
        rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))
        cores.append(core)
        coordinates.append(torch.cat([shared, own], 1) @ rotation)
        planted.append(core.basis @ rotation[:2].T)
    found = ace.consensus_cores(cores, coordinates, rank=2)
    for core, plane, original in zip(found, planted, cores, strict=True):
        assert core.rank == 2
        assert core.hook_point == original.hook_point
        cosines = torch.linalg.svdvals(core.basis.T @ plane)
        assert cosines.min() > 0.98
    with pytest.raises(ValueError, match="rank 5 does not fit into cores of rank 4"):
        ace.consensus_cores(cores, coordinates, rank=5)
    with pytest.raises(ValueError, match="at least two cores"):
        ace.consensus_cores(cores[:1], coordinates[:1], rank=1)
    with pytest.raises(ValueError, match="different numbers of samples"):
        ace.consensus_cores(cores, [coordinates[0][:5], *coordinates[1:]], rank=1)


def autocorrelated(generator, n_sequences=30, length=31, rho=0.9):
    """Sequences of a slow process, flattened: neighbours resemble each other."""
    states = [torch.randn(n_sequences, 1, generator=generator, dtype=torch.float64)]
    for _ in range(length - 1):
        noise = torch.randn(n_sequences, 1, generator=generator, dtype=torch.float64)
        states.append(rho * states[-1] + (1 - rho**2) ** 0.5 * noise)
    return torch.stack(states, 1).flatten(0, 1)


def test_whole_sequences_are_permuted_where_neighbours_resemble_each_other():
    """Of unrelated slow processes about one in twenty is significant, not one in three."""
    significant = {1: 0, 31: 0}
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        first, second = autocorrelated(generator)[:, 0], autocorrelated(generator)[:, 0]
        for length in significant:
            report = ace.spearman(first, second, sequence_length=length, n_resamples=39, generator=generator)
            significant[length] += report.p <= 0.05
    assert significant[31] <= 6
    assert significant[1] > 10
    with pytest.raises(ValueError, match="930 samples are no whole number of sequences of 7"):
        ace.spearman(first, second, sequence_length=7, generator=generator)


def test_coordinates_that_do_not_vary_are_refused():
    generator = torch.Generator().manual_seed(0)
    varied = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    flat = torch.cat([varied[:, :1], torch.ones(60, 1, dtype=torch.float64)], 1)
    with pytest.raises(ValueError, match="do not vary in all of them"):
        ace.canonical_correlations(varied, flat, varied, varied)
    with pytest.raises(ValueError, match="do not vary in all of them"):
        ace.spearman(torch.ones(60), varied[:, 0], generator=generator)
