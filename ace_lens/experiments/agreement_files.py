"""Prompts for subject-verb agreement from files that people already have."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ace_lens.experiments.agreement_prompts import AgreementPrompt

_SINGULAR = {"is", "was", "has", "does", "isn't", "wasn't", "hasn't", "doesn't"}
_PLURAL = {"are", "were", "have", "do", "aren't", "weren't", "haven't", "don't"}
_TYPOGRAPHIC_APOSTROPHE = "\N{RIGHT SINGLE QUOTATION MARK}"


@dataclass(frozen=True)
class _Keys:
    """Under which keys a kind of file holds what a prompt is made of; `number` is None where it never says."""

    text: str
    right: str
    wrong: str
    number: str | None
    frame: str


_KINDS = (
    _Keys("one_prefix_prefix", "one_prefix_word_good", "one_prefix_word_bad", number=None, frame="UID"),
    _Keys("clean_prefix", "clean_answer", "patch_answer", number=None, frame="case"),
    _Keys("prompt", "right", "wrong", number="number", frame="frame"),
)


def load_prompts(path: str | Path) -> list[AgreementPrompt]:
    """Read prompts from JSON lines (`.jsonl`, `.json`) or a table with a header (`.csv`), in UTF-8.

    A line holds one of

    - `one_prefix_prefix`, `one_prefix_word_good` and `one_prefix_word_bad`, as in BLiMP; its `UID` is the frame;
    - `clean_prefix`, `clean_answer` and `patch_answer`; its `case`, if there, is the frame, and a patched prefix is
      not read;
    - `prompt` and `number` (singular or plural), or `prompt`, `right` and `wrong`, or all; its `frame` is kept.

    Where no number is given it is read off the verbs: one of the right and the wrong one is singular ("is", "hasn't",
    "goes" beside "go"). The same prompt comes as often as it is there, with several verbs perhaps. Space around a
    prompt is dropped: before the verb it belongs to the verb.

    Arguments:
        path: the file; its suffix says how it is read.

    Raises:
        ValueError: another suffix, no prompts, or a line that cannot be read; file and line are named.
    """
    path = Path(path)
    readers = {".jsonl": _json_rows, ".json": _json_rows, ".csv": _csv_rows}
    if path.suffix not in readers:
        raise ValueError(f"{path} has the suffix {path.suffix!r}. Prompts are read from {', '.join(readers)}.")
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            prompts = [_prompt(row, where) for where, row in readers[path.suffix](file, path)]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8 ({error.reason}). Save it in that encoding.") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    return prompts


def _json_rows(file: TextIO, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects in a file, each with where it stands."""
    for number, line in enumerate(file, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is no JSON ({error}). Each line has to hold one whole object.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} holds a JSON {type(row).__name__}. Each line has to hold one whole object.")
        yield where, row


def _csv_rows(file: TextIO, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a table by its header, each with where it ends."""
    reader = csv.DictReader(file, strict=True)
    try:
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise ValueError(
                    f"{where} has {'more' if None in row else 'fewer'} fields than the header. A prompt with a comma "
                    "in it has to stand in double quotes."
                )
            yield where, row
    except csv.Error as error:
        # The outer reader counts only the rows that it could read.
        raise ValueError(f"{path}, line {reader.reader.line_num} is no CSV ({error}).") from error


def _prompt(row: dict[str, Any], where: str) -> AgreementPrompt:
    keys = next((keys for keys in _KINDS if keys.text in row), None)
    if keys is None:
        known = ", ".join(repr(keys.text) for keys in _KINDS)
        raise ValueError(f"{where} has no prompt: none of {known} is among its keys {list(row)}.")
    frame = row.get(keys.frame)
    right, wrong, stated, read_off = None, None, None, None
    if keys.number is not None and keys.number in row:
        stated = _stated_plural(_entry(row, keys.number, where), where)
    if stated is None or keys.right in row or keys.wrong in row:
        right, wrong = (" " + _entry(row, key, where) for key in (keys.right, keys.wrong))
        read_off = _read_off_plural(right, wrong, where)
        if stated not in (None, read_off):
            raise ValueError(
                f"{where}: the head is {'plural' if stated else 'singular'}, but {right!r} is given as the right verb."
            )
    return AgreementPrompt(
        text=_entry(row, keys.text, where),
        plural=bool(stated or read_off),
        frame=str(frame) if frame else None,
        right=right,
        wrong=wrong,
    )


def _entry(row: dict[str, Any], key: str, where: str) -> str:
    if key not in row:
        raise ValueError(f"{where} has no {key!r} among its keys {list(row)}.")
    if not isinstance(row[key], str) or not row[key].strip():
        raise ValueError(f"{where} has {row[key]!r} under {key!r}, where a text should be.")
    return row[key].strip()


def _stated_plural(number: str, where: str) -> bool:
    if number not in ("singular", "plural"):
        raise ValueError(f"{where} gives the number {number!r}: write singular or plural.")
    return number == "plural"


def _read_off_plural(right: str, wrong: str, where: str) -> bool:
    """Whether the right verb is the plural one of the two."""
    # Of a verb of several words ("looks like") the first shows number.
    first, second = (verb.lower().replace(_TYPOGRAPHIC_APOSTROPHE, "'").split()[0] for verb in (right, wrong))
    if _is_singular(first, second) == _is_singular(second, first):
        raise ValueError(
            f"{where}: from {right!r} and {wrong!r} the number of the head cannot be read. One has to be singular and "
            "the other plural, such as 'is' and 'are', or 'goes' and 'go'."
        )
    return _is_singular(second, first)


def _is_singular(verb: str, other: str) -> bool:
    """Whether a verb is in the third person singular, and the other in the plural."""
    if verb in _SINGULAR:
        return other in _PLURAL
    return verb in (other + "s", other + "es") or (other.endswith("y") and verb == other[:-1] + "ies")
