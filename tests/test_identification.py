import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ace_lens as ace
from ace_lens.experiments.markov import transition_matrix
from ace_lens.identification import whitened_r2


def linear_system(rank, seed, n_sequences=20, length=8, noise=0.0):
    """Sequences of z_{t+1} = A z_t + b with a contracting A of known eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    frame = torch.randn(rank, rank, generator=generator, dtype=torch.float64) + 3 * torch.eye(rank)
    values = torch.rand(rank, generator=generator, dtype=torch.float64) * 1.6 - 0.8
    matrix = frame @ torch.diag(values) @ torch.linalg.inv(frame)
    offset = torch.randn(rank, generator=generator, dtype=torch.float64)
    states = [torch.randn(n_sequences, rank, generator=generator, dtype=torch.float64)]
    for _ in range(length - 1):
        shock = noise * torch.randn(n_sequences, rank, generator=generator, dtype=torch.float64)
        states.append(states[-1] @ matrix.T + offset + shock)
    return torch.stack(states, 1), values


@given(st.integers(1, 6), st.integers(0, 2**31))
def test_a_linear_system_is_recovered(rank, seed):
    states, values = linear_system(rank, seed)
    operator = ace.fit_operator(states[:15], states[15:])
    _, errors = ace.match_eigenvalues(operator.eigenvalues, values.to(torch.complex128))
    assert errors.max() < 1e-6
    assert operator.r2 == pytest.approx(1, abs=1e-6)


def test_no_transition_is_taken_across_a_join():
    """Sequences that hold still, at different places: the only transitions that move are those across joins."""
    states = torch.randn(30, 1, 2, dtype=torch.float64).expand(-1, 4, -1)
    operator = ace.fit_operator(states[:20], states[20:])
    torch.testing.assert_close(operator.matrix, torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-9)


@given(st.integers(0, 2**31))
def test_r2_does_not_depend_on_the_basis(seed):
    states, _ = linear_system(3, seed, n_sequences=60, noise=0.5)
    generator = torch.Generator().manual_seed(seed)
    change = torch.randn(3, 3, generator=generator, dtype=torch.float64) + 3 * torch.eye(3)
    plain = ace.fit_operator(states[:30], states[30:])
    changed = ace.fit_operator(states[:30] @ change, states[30:] @ change)
    assert changed.r2 == pytest.approx(plain.r2, abs=1e-6)
    assert plain.r2 < 1


def test_matching_beats_sorting():
    reference = torch.tensor([1 + 0j, 0.9 + 0.5j, 0.9 - 0.5j])
    found = torch.tensor([0.95 - 0.5j, 0.2 + 0j, 1.01 + 0j, 0.92 + 0.5j])
    matched, errors = ace.match_eigenvalues(found, reference)
    assert matched.tolist() == found[[2, 3, 0]].tolist()
    torch.testing.assert_close(errors, torch.tensor([0.01, 0.02, 0.05], dtype=torch.float64), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="1 eigenvalues cannot be matched to 3"):
        ace.match_eigenvalues(found[:1], reference)


def test_oracle_of_the_ring():
    assert ace.oracle_r2(transition_matrix()) == pytest.approx(0.5)
    assert ace.oracle_r2(torch.full((4, 4), 0.25)) == pytest.approx(0)
    assert ace.oracle_r2(torch.eye(3)[[1, 2, 0]]) == pytest.approx(1)


def test_the_oracle_is_the_ceiling_of_a_core_that_holds_the_state():
    """One-hot states less a direction: the whitened R^2 of the fit is the oracle's."""
    from ace_lens.experiments.markov import sample_chains

    chains = sample_chains(3000, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    states = torch.nn.functional.one_hot(chains, 4).double() @ mixing
    operator = ace.fit_operator(states[:1500], states[1500:])
    assert operator.r2 == pytest.approx(0.5, abs=0.01)
    truth = torch.linalg.eigvals(transition_matrix())
    _, errors = ace.match_eigenvalues(operator.eigenvalues, truth[(truth - 1).abs() > 1e-6])
    assert errors.max() < 0.02


def test_too_little_to_fit_is_refused():
    with pytest.raises(ValueError, match="3 transitions cannot determine an operator on 3 dimensions"):
        ace.fit_operator(torch.randn(3, 2, 3), torch.randn(3, 2, 3))


def test_the_affine_fit_finds_the_offset_and_the_centred_one_does_not_look_for_it():
    states, _ = linear_system(2, 3)
    affine = ace.fit_operator(states[:15], states[15:])
    before, after = states[15:, :-1].flatten(0, 1), states[15:, 1:].flatten(0, 1)
    torch.testing.assert_close(before @ affine.matrix.T + affine.offset, after, rtol=0, atol=1e-8)
    centred = ace.fit_operator(states[:15], states[15:], affine=False)
    assert not centred.offset.any()
    assert centred.r2 < affine.r2


def test_ridge_shrinks_and_a_cut_leaves_out_directions():
    states, values = linear_system(3, 5, n_sequences=60, noise=0.1)
    plain = ace.fit_operator(states[:30], states[30:])
    shrunk = ace.fit_operator(states[:30], states[30:], ridge=10.0)
    assert shrunk.matrix.norm() < 0.5 * plain.matrix.norm()
    faint = torch.cat([states, 1e-9 * torch.randn(60, 8, 1, generator=torch.Generator().manual_seed(0)).double()], 2)
    cut = ace.fit_operator(faint[:30], faint[30:], cut=1e-3)
    assert len(cut.eigenvalues) == 3
    _, errors = ace.match_eigenvalues(cut.eigenvalues, plain.eigenvalues)
    assert errors.max() < 1e-6
    assert cut.matrix.shape == (4, 4)
    assert len(values) == 3


def test_bootstrap_intervals_cover_the_truth_at_about_their_rate():
    """95% intervals of real eigenvalues, over independent noisy systems of one operator."""
    matrix = torch.tensor([[0.9, 0.0], [0.2, 0.5]], dtype=torch.float64)
    covered, trials = 0, 60
    for trial in range(trials):
        generator = torch.Generator().manual_seed(trial)
        states = [torch.randn(120, 2, generator=generator, dtype=torch.float64)]
        for _ in range(7):
            states.append(states[-1] @ matrix.T + torch.randn(120, 2, generator=generator, dtype=torch.float64))
        trajectories = torch.stack(states, 1)
        low, high = ace.eigenvalue_intervals(trajectories, n_resamples=100, generator=generator)
        covered += int(low.real[0] <= 0.9 <= high.real[0]) + int(low.real[1] <= 0.5 <= high.real[1])
        assert (low.imag.abs() < 1e-9).all()
    # 120 intervals: the rate of hits has a standard error of 2%.
    assert 0.88 <= covered / (2 * trials) <= 1.0


def test_the_spectrum_has_a_null():
    states, values = linear_system(2, 8, n_sequences=40, noise=0.3)
    generator = torch.Generator().manual_seed(0)
    reference = values.to(torch.complex128)
    p = ace.spectrum_p_value(states, reference, n_permutations=99, generator=generator)
    assert p == pytest.approx(0.01)
    nothing = torch.randn(40, 8, 2, generator=generator, dtype=torch.float64)
    p = ace.spectrum_p_value(nothing, reference, n_permutations=99, generator=generator)
    assert p > 0.05


@given(st.integers(5, 31), st.integers(0, 2**31))
def test_a_clock_is_read_as_rotations(period, seed):
    """Class means on circles of known frequencies step by roots of unity of those frequencies."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = (torch.randperm((period - 1) // 2, generator=generator)[:2] + 1).tolist()
    classes = torch.arange(period).repeat(4)
    angles = 2 * math.pi * classes[:, None] * torch.tensor(frequencies) / period
    circles = torch.cat([angles.cos(), angles.sin()], 1).double()
    mixing = torch.randn(circles.shape[1], 7, generator=generator, dtype=torch.float64)
    operator = ace.fit_cycle(circles @ mixing + 3, classes, period)
    assert len(operator.eigenvalues) == 2 * len(frequencies)
    assert operator.unit_circle_share(period) == 1
    assert operator.modes(period) == sorted(frequencies)
    # Four dimensions hold any five points: there a step left out cannot be told from the others.
    assert math.isnan(operator.r2) if period == 5 else operator.r2 == pytest.approx(1, abs=1e-6)


def test_a_shuffled_clock_is_not():
    period = 23
    generator = torch.Generator().manual_seed(0)
    coordinates = torch.randn(period, 8, generator=generator, dtype=torch.float64)
    operator = ace.fit_cycle(coordinates, torch.arange(period), period)
    assert operator.unit_circle_share(period) < 0.3
    assert operator.r2 < 0.2
    with pytest.raises(ValueError, match=r"Every class from 0 to 22 needs samples.*missing: \[0\]"):
        ace.fit_cycle(coordinates[1:], torch.arange(1, period), period)
    with pytest.raises(ValueError, match="highest class: 22"):
        ace.fit_cycle(coordinates, torch.arange(period), 20)


def test_steps_left_out_are_predicted_as_by_refitting():
    period, generator = 17, torch.Generator().manual_seed(0)
    angles = 2 * math.pi * torch.arange(period)[:, None] * torch.tensor([2, 5]) / period
    means = torch.cat([angles.cos(), angles.sin()], 1).double()
    means = means + 0.3 * torch.randn(period, 4, generator=generator, dtype=torch.float64)
    means = means - means.mean(0)
    following = means.roll(-1, 0)
    residuals = []
    for left_out in range(period):
        others = torch.arange(period) != left_out
        known = torch.cat([means, torch.ones(period, 1, dtype=torch.float64)], 1)
        fitted = torch.linalg.lstsq(known[others], following[others]).solution
        residuals.append(following[left_out] - known[left_out] @ fitted)
    expected = whitened_r2(torch.stack(residuals), following)
    assert ace.fit_cycle(means, torch.arange(period), period).r2 == pytest.approx(expected, abs=1e-9)
    assert 0 < expected < 1


def test_enough_dimensions_step_through_anything():
    period, generator = 11, torch.Generator().manual_seed(0)
    noise = torch.randn(period, 20, generator=generator, dtype=torch.float64)
    operator = ace.fit_cycle(noise, torch.arange(period), period)
    assert operator.unit_circle_share(period) == 1
    assert math.isnan(operator.r2)


@given(st.integers(3, 40), st.integers(0, 2**31))
def test_fourier_power_is_where_the_frequencies_are(period, seed):
    generator = torch.Generator().manual_seed(seed)
    frequency = int(torch.randint(1, period // 2 + 1, (), generator=generator))
    wave = (2 * math.pi * frequency * torch.arange(period) / period + 0.5).cos().double()
    power = ace.fourier_power(wave[:, None] * torch.randn(1, 6, generator=generator, dtype=torch.float64) + 2)
    assert power.shape == (period // 2 + 1,)
    assert power[frequency] == pytest.approx(1)
    noise = torch.randn(period, 6, generator=generator, dtype=torch.float64)
    power = ace.fourier_power(noise)
    assert power.sum() == pytest.approx(1)
    # Parseval: all frequencies together hold all that varies.
    varies = (noise - noise.mean(0)).square().sum() * period
    spectrum = torch.fft.fft(noise - noise.mean(0), dim=0).abs().square()
    assert spectrum.sum() == pytest.approx(float(varies))
    assert power[1] == pytest.approx(float((spectrum[1] + spectrum[-1]).sum() / varies))
