"""The command line: `python -m benchmarks [case ...]`, from the root of the repository."""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import checkpoints, extraction, layers
from benchmarks.case import Case, Outcome

# A further module of cases only has to be added here.
CASES: tuple[Case[Any, Any], ...] = (*extraction.CASES, *checkpoints.CASES, *layers.CASES)

COLUMNS = ("case", "ours (s, median)", "direct (s, median)", "ratio", "range", "reach")
WIDTHS = (20, 16, 18, 8, 16, 18)


def main(arguments: Sequence[str] | None = None, cases: Sequence[Case[Any, Any]] = CASES) -> int:
    """Run cases and print a table of them; returns the exit status, 1 where any of them fails."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        chosen = select(options.names, cases)
        writable(options.out)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(options.threads)
    outcomes = []
    print(line(COLUMNS))
    for case in chosen:
        outcomes.append(case.run(options.repeats))
        # A long case may follow.
        print(row(outcomes[-1]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(report(outcomes), indent=2) + "\n")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def select(names: Sequence[str], cases: Sequence[Case[Any, Any]]) -> list[Case[Any, Any]]:
    """The cases of these names, in the order of the names; all cases for no names.

    Raises:
        ValueError: there is no case of such a name.
    """
    by_name = {case.name: case for case in cases}
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"There is no case named {', '.join(map(repr, unknown))}. Choose from: {', '.join(by_name)}.")
    return [by_name[name] for name in names] or list(cases)


def writable(path: Path | None) -> None:
    """Notice before the cases run, not after, that there is no place for their results.

    Raises:
        ValueError: the path is a folder, or in a folder that does not exist.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"{path} cannot be written. Give --out a file in a folder that exists.")


def row(outcome: Outcome) -> str:
    """An outcome as a line of the table."""
    timing = outcome.timing
    if timing is None:
        return f"{outcome.case:<{WIDTHS[0]}}  results differ: {outcome.disagreement}"
    low, high = timing.range
    reach = "-" if outcome.reach is None else f">= {outcome.reach:g}: {'reached' if outcome.reached else 'missed'}"
    return line(
        (
            outcome.case,
            f"{timing.ours_median:.4f}",
            f"{timing.direct_median:.4f}",
            f"{timing.ratio:.2f}",
            f"{low:.2f} to {high:.2f}",
            reach,
        )
    )


def line(cells: Sequence[str]) -> str:
    """Cells in columns: the name to the left, what follows to the right."""
    name, *numbers = zip(cells, WIDTHS, strict=True)
    return "  ".join([f"{name[0]:<{name[1]}}", *(f"{cell:>{width}}" for cell, width in numbers)])


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The outcomes, and what they were measured with, for JSON."""
    return {
        "machine": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cases": [outcome.as_json() for outcome in outcomes],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times the library beside the plain way of doing the same thing.",
    )
    parser.add_argument("names", nargs="*", metavar="case", help="which cases to run (default: every case)")
    parser.add_argument("--repeats", type=_count, help="timed runs of each way (default: what each case says)")
    parser.add_argument("--threads", type=_count, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
