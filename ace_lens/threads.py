"""One thread for what is small: several wait for each other there longer than they work."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Where two threads break even on 2 cores, for LAPACK's QR as for sums and maxima over a matrix.
_WORTH_THREADS = 2**19


@contextmanager
def threads_for(n_numbers: int) -> Iterator[None]:
    """Within, torch takes one thread if its operations are on few numbers; else as many as it has."""
    n_threads = torch.get_num_threads()
    if n_numbers < _WORTH_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
