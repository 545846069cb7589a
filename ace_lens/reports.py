"""Results as files: every report is a frozen dataclass that saves to JSON and loads back equal."""

from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import Self


class Report:
    """Mixed into a frozen dataclass of plain values, tuples and further such dataclasses."""

    # Infinity and NaN are results too: JSON as Python reads and writes it has words for them.
    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        Path(path).write_bytes(_adapter(type(self)).dump_json(self, indent=1) + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a report that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not such a report.
        """
        try:
            return _adapter(cls).validate_json(Path(path).read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the whole file"
            raise ValueError(f"{path} does not hold a {cls.__name__}: {first['msg']} at {place}.") from error


def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)
