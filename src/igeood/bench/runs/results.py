"""Results on disk: JSON lines that survive a kill, and the folder that holds them."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from igeood.errors import InputError
from igeood.version import __version__

Record = dict[str, Any]
FIELDS = frozenset(["schema", "network", "weights", "setting", "method", "validation", "ood", "seed", "data", "tnr"])


class Lines:
    """A file of JSON lines that grows by whole lines; what a killed run left of a line is dropped.

    Parameters
    ----------
    path : path
        The file; it need not be there yet.
    fields : set of str
        What every line has.
    """

    def __init__(self, path: str | os.PathLike[str], fields: frozenset[str] = frozenset()) -> None:
        self.path = Path(path)
        self.records = list(self._read(fields)) if self.path.exists() else []

    def _read(self, fields: frozenset[str]) -> Iterator[Record]:
        content = self.path.read_bytes()
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict) or not record.keys() >= fields:
                problem = f"line {number} is no record of this version"
                raise InputError(problem, place=str(self.path), cure="name another folder")
            yield record

    def find(self, asked: Mapping[str, Any]) -> Record | None:
        """The last record that has all that is asked."""
        plain = json.loads(json.dumps(asked))
        return next((r for r in reversed(self.records) if plain.items() <= r.items()), None)

    def append(self, record: Mapping[str, Any]) -> Record:
        """Add a line; it is on disk whole when this returns."""
        line = json.dumps(record, sort_keys=True).encode() + b"\n"
        with self.path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # what a killed run left
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.records.append(json.loads(line))
        return self.records[-1]


class Results:
    """The folder of a benchmark: `results.jsonl`; beside it tunings, networks, commands, outputs and scores.

    Parameters
    ----------
    folder : path
        Made by the first run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.cells = Lines(self.folder / "results.jsonl", FIELDS)
        self.tunings = Lines(self.folder / "tunings.jsonl")
        self.networks = Lines(self.folder / "networks.jsonl")
        self.commands = Lines(self.folder / "commands.jsonl")

    def note(self, command: list[str]) -> None:
        """Remember a command line that added to the results."""
        if self.commands.find({"command": command}) is None:
            self.commands.append({"command": command, "igeood": __version__})

    @classmethod
    def existing(cls, folder: str | os.PathLike[str]) -> "Results":
        """A folder that a benchmark has filled."""
        if not (Path(folder) / "results.jsonl").is_file():
            cure = f"make it with `igeood bench --out {folder}`"
            raise InputError(f"no results.jsonl in {folder}", argument="results", cure=cure)
        return cls(folder)
