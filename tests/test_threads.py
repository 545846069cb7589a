"""Small work takes one thread, and the caller's number of threads stays what it was."""

import pytest
import torch

from ace_lens.threads import threads_for


@pytest.fixture(autouse=True)
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("n_numbers", "n_threads"), [(0, 1), (2809 * 128, 1), (16384 * 128, 2)])
def test_only_small_work_takes_one_thread(n_numbers, n_threads):
    with threads_for(n_numbers):
        assert torch.get_num_threads() == n_threads
    assert torch.get_num_threads() == 2


def test_the_number_of_threads_comes_back_after_an_error():
    with pytest.raises(ValueError, match="no convergence"), threads_for(0):
        raise ValueError("no convergence")
    assert torch.get_num_threads() == 2
