import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ace_lens as ace
from ace_lens.experiments.markov import transition_matrix


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
