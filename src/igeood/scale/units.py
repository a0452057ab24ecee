"""Units of work: one input file makes one output file, below a folder whose manifest says what they were made with."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path, PurePath
from typing import Any

from igeood.errors import InputError
from igeood.files import only_one, write_whole
from igeood.parts import find_sources, folder_of
from igeood.scale.engines import Engine, run
from igeood.terminal import Progress
from igeood.version import __version__

SCHEMA = 2
Units = dict[str, list[Any]]  # path, size and time of each output's input
MANIFEST = "_manifest.json"  # readers of folders leave names with _ out
KEPT = (".parquet", ".csv", ".jsonl")  # endings of inputs whose outputs have the same name


def find_units(
    names: Sequence[str], out: str, ending: str = ".parquet", kept: tuple[str, ...] = KEPT
) -> dict[str, str]:
    """The input file of each output file, whose name below `out` is the input's below its folder."""
    target, units = Path(os.path.realpath(out)), dict[str, str]()
    for name in names:
        if name == "-" or Path(name).is_fifo():
            raise InputError(f"{name}: a pipe has no file's name; name files, or give one file as --out")
        if Path(name).is_dir() and Path(os.path.realpath(name)) in target.parents:
            raise InputError(f"out: {out} is in {name}, which is read; name a folder elsewhere")
        for source in map(Path, find_sources(name)):  # type: ignore[arg-type]
            if target in Path(os.path.realpath(source)).parents:
                raise InputError(f"out: {source} is in {out}, and is read; name another folder")
            unit = source.relative_to(folder_of(name)).as_posix()
            unit = unit if unit.endswith(kept) else unit + ending
            if units.setdefault(unit, str(source)) != str(source):
                raise InputError(f"{source}: {units[unit]} has the same name below {out}; give their common folder")
    return units


def do_units(
    units: Mapping[str, str], out: str, recipe: dict[str, Any], engine: AbstractContextManager[Engine],
    call: tuple[Any, ...], report: Progress, *, force: bool,
) -> dict[str, Any]:  # fmt: skip
    """Make the output files that are missing, or whose input has changed; with `force` all.

    Parameters
    ----------
    units : mapping of str to str
        See `find_units`.
    out : str
        The folder, of which one process at a time is in charge.
    recipe : dict
        All that decides what the outputs are, in values of JSON. A folder of another recipe is an error.
    engine : context manager of Engine
        Where they are made.
    call : tuple
        A function and its first arguments; the paths of the input and of the output follow.
    report : callable
        Gets what is done.
    force : bool
        Remove what is there of a manifest first.

    Returns
    -------
    outcomes : dict
        For each unit that was not there, what the function returned, or as text why it failed.
    """
    folder = Path(out)
    with only_one(folder / ".lock", "out"):
        old, is_same = _noted(folder, recipe, force)
        places = {unit: os.path.abspath(source) for unit, source in units.items()}  # noqa: PTH100
        files = {unit: Path(place).stat() for unit, place in places.items()}
        new: Units = {unit: [places[unit], file.st_size, file.st_mtime_ns] for unit, file in files.items()}
        if not force:
            _check_ours(folder, old, new)
        is_there = {unit: not force and new[unit] == old.get(unit) and (folder / unit).exists() for unit in new}
        given = {
            u: (*call[1:], places[u], str(folder.absolute() / u)) for u, is_done in is_there.items() if not is_done
        }
        with engine if given else nullcontext() as started:
            gone = [unit for unit in old if force and not (is_same and Path(old[unit][0]).exists())]
            for unit in [*given, *gone]:
                (folder / unit).unlink(missing_ok=True)  # before the manifest says otherwise
            kept = {unit: old[unit] for unit in old if unit not in gone}
            noted = {"schema": SCHEMA, "igeood": __version__, "recipe": recipe, "units": {**kept, **new}}
            write_whole(folder / MANIFEST, json.dumps(noted, indent=1).encode())
            outcomes = run(started, call[0], given, report) if started else {}
    for unit, outcome in outcomes.items():
        outcomes[unit] = outcome.removeprefix(f"{places[unit]}: ") if isinstance(outcome, str) else outcome
    return outcomes


def remove_units(out: str, units: Iterable[str]) -> None:
    """Remove the output files of a folder and its manifest; then the folders, where nothing else is in them."""
    folder = Path(out)
    units = {*units, *read_manifest(folder)[1]}
    for name in (*units, MANIFEST):
        (folder / name).unlink(missing_ok=True)
    for inner in sorted({parent for name in units for parent in (folder / name).parents}, reverse=True):
        if inner == folder or folder in inner.parents:
            with suppress(OSError):
                inner.rmdir()


def _check_ours(folder: Path, old: Units, new: Units) -> None:
    """Raise if an output of another input, or a file of somebody else, would be replaced."""
    for unit, (place, *_) in new.items():
        cure = "name another folder, or give --force"
        if unit in old and old[unit][0] != place:
            raise InputError(f"out: {folder / unit} was made of {old[unit][0]}, not of {place}; {cure}")
        if unit not in old and (folder / unit).exists():
            raise InputError(f"out: {folder / unit} is there, and the manifest does not have it; {cure}")


def read_manifest(folder: Path) -> tuple[dict[str, Any], Units]:
    """What the outputs of a folder were made with, and their inputs."""
    path = folder / MANIFEST
    try:
        noted = json.loads(path.read_bytes())
        recipe, units = dict(noted["recipe"]), dict(noted["units"])
        is_sound = noted["schema"] == SCHEMA and all(len(about) == 3 for about in units.values())
        is_sound &= not any(".." in PurePath(unit).parts or PurePath(unit).root for unit in units)
    except (ValueError, KeyError, TypeError):
        is_sound = False
    if not is_sound:
        raise InputError(f"out: {path} is damaged, or not of this version of igeood; name another folder")
    return recipe, units


def _noted(folder: Path, recipe: dict[str, Any], force: bool) -> tuple[Units, bool]:
    """The inputs of a folder's manifest by output, none where it is empty; and whether its recipe is this one.

    Another recipe needs `force`.
    """
    if not (folder / MANIFEST).exists():
        if any(not file.name.startswith(".") for file in folder.iterdir()):
            raise InputError(f"out: {folder} has files, and no {MANIFEST} of igeood's; name another folder")
        return {}, True
    before, units = read_manifest(folder)
    for name in () if force else recipe:
        if (was := before.get(name)) != (now := recipe[name]):
            problem = f"{folder} was made with another {name} ({was!s:.40}, this one is {now!s:.40})"
            raise InputError(f"out: {problem}; name another folder, or give --force")
    return units, before == recipe
