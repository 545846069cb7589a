"""Two ways of doing the same thing, timed in turns."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Timing:
    """Seconds that each repeat took, `ours[i]` just before `direct[i]`."""

    ours: tuple[float, ...]
    direct: tuple[float, ...]

    @property
    def ours_median(self) -> float:
        """Median seconds of ours."""
        return median(self.ours)

    @property
    def direct_median(self) -> float:
        """Median seconds of the direct way."""
        return median(self.direct)

    @property
    def ratio(self) -> float:
        """How many times longer the direct way takes: the ratio of the medians."""
        return self.direct_median / self.ours_median

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest ratio of a direct repeat to the one of ours just before it."""
        ratios = [direct / ours for ours, direct in zip(self.ours, self.direct, strict=True)]
        return min(ratios), max(ratios)


def alternate(
    ours: Callable[[], Result],
    direct: Callable[[], Any],
    check: Callable[[Result, Any], None],
    *,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time two functions in turns, so that what else the machine does slows both alike.

    Each runs once to warm up, and `check` gets the two results; then ours, direct, ours, direct, ...

    Arguments:
        ours, direct: the two functions.
        check: raises where the results are not equal; nothing is timed then.
        repeats: how often each is timed.
        clock: the time in seconds.

    Raises:
        ValueError: fewer than one repeat.
    """
    if repeats < 1:
        raise ValueError(f"Timing takes at least one repeat, not {repeats}.")
    check(ours(), direct())
    rounds = [(_seconds(ours, clock), _seconds(direct, clock)) for _ in range(repeats)]
    return Timing(ours=tuple(first for first, _ in rounds), direct=tuple(second for _, second in rounds))


def _seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    function()
    return clock() - start
