"""What a benchmark is, and what comes of it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from benchmarks.timing import Timing, alternate

Inputs = TypeVar("Inputs")
Result = TypeVar("Result")


class Disagreement(Exception):
    """The two contestants' results are not equal, so that their times say nothing."""


@dataclass(frozen=True)
class Case(Generic[Inputs, Result]):
    """Our way to a result, and what its time is held against: the direct way to the same, as a rule.

    Arguments:
        name: what the command line calls it.
        inputs: makes what both contestants start from; not timed.
        ours: the library, through its public names.
        direct: a plain implementation of the same thing, or another thing whose time ours is held against.
        repeats: how often each is timed, after one run to warm up.
        check: takes our result and the direct one; raises `Disagreement` where they are not equal. None where they are
            different things.
        reach: how many times faster ours has to be, if any.
    """

    name: str
    inputs: Callable[[], Inputs]
    ours: Callable[[Inputs], Result]
    direct: Callable[[Inputs], Any]
    repeats: int
    check: Callable[[Result, Any], None] | None = None
    reach: float | None = None

    def run(self, repeats: int | None = None) -> "Outcome":
        """Check that the results are equal, where they can be, then time both; `repeats` replaces the case's own."""
        inputs = self.inputs()
        try:
            timing = alternate(
                lambda: self.ours(inputs),
                lambda: self.direct(inputs),
                self.check or (lambda ours, direct: None),
                repeats=self.repeats if repeats is None else repeats,
            )
        except Disagreement as disagreement:
            return Outcome(self.name, self.reach, timing=None, disagreement=str(disagreement))
        return Outcome(self.name, self.reach, timing)


@dataclass(frozen=True)
class Outcome:
    """What came of a case: its times, or how the results disagree."""

    case: str
    reach: float | None
    timing: Timing | None
    disagreement: str | None = None

    @property
    def reached(self) -> bool | None:
        """Whether ours is as much faster as it has to be; None if nothing is asked, or was timed."""
        if self.timing is None or self.reach is None:
            return None
        return self.timing.ratio >= self.reach

    @property
    def passed(self) -> bool:
        """Whether no results differ, and a ratio to reach, if any, is reached."""
        return self.timing is not None and self.reached is not False

    def as_json(self) -> dict[str, Any]:
        """Every repeat in seconds, and what the table says."""
        summary: dict[str, Any] = {}
        if self.timing is not None:
            summary = {name: getattr(self.timing, name) for name in ("ours_median", "direct_median", "ratio", "range")}
        return {**asdict(self), **summary, "reached": self.reached, "passed": self.passed}
