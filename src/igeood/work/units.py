"""Units of work: one input file makes one output file, below a folder whose manifest says what they were made with."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from igeood.errors import InputError
from igeood.files import only_one, write_whole
from igeood.tables import find_files
from igeood.terminal import Progress
from igeood.version import __version__
from igeood.work.engines import Units

SCHEMA = 2
MANIFEST = "_manifest.json"  # readers of folders leave names with _ out
KEPT = (".parquet", ".csv")  # endings of inputs whose outputs have the same name
Stamps = dict[str, list[Any]]  # path, size and time of each output's input
Make = Callable[[Units], Iterator[tuple[str, Any]]]


def find_units(
    names: Sequence[str], out: str, ending: str = ".parquet", kept: tuple[str, ...] = KEPT
) -> dict[str, str]:
    """The input file of each output file, whose name below `out` is the input's below its folder."""
    target = Path(out).resolve()
    units: dict[str, str] = {}
    for name in names:
        folder, sources = find_files(name)
        for source in sources:
            if target in source.resolve().parents or (Path(name).is_dir() and folder.resolve() in target.parents):
                raise InputError(f"{source} is read, and {out} with it", argument="out", cure="name another folder")
            unit = source.relative_to(folder).as_posix()
            unit = unit if unit.endswith(kept) else unit + ending
            if units.setdefault(unit, str(source)) != str(source):
                problem = f"{units[unit]} has the same name below {out}"
                raise InputError(problem, cure="give their common folder", place=str(source))
    return units


def do_units(
    units: Mapping[str, str], out: str, recipe: dict[str, Any], make: Make, report: Progress, *, force: bool
) -> dict[str, Any]:
    """Make the output files that are missing, or whose input has changed; with `force` all.

    Parameters
    ----------
    units : mapping of str to str
        See `find_units`.
    out : str
        The folder, of which one process at a time is in charge.
    recipe : dict
        All that decides what the outputs are, in values of JSON. A folder of another recipe is an error.
    make : callable
        Makes outputs from the paths of their inputs and of themselves: an engine with its work.
    report : callable
        Gets what is done.
    force : bool
        Make outputs again that are there, and remove those of another recipe and of inputs that are gone.

    Returns
    -------
    outcomes : dict
        For each unit that was not there, what `work` returned, or the error by which it failed.
    """
    folder = Path(out).absolute()
    with only_one(folder / ".lock", "out"):
        before, old = read_manifest(folder)
        new = {unit: _stamp(Path(source).absolute()) for unit, source in units.items()}
        if not force:
            _check(folder, before, recipe, old, new)
        todo = [unit for unit in new if force or new[unit] != old.get(unit) or not (folder / unit).exists()]
        gone = [unit for unit in old if force and not (before == recipe and Path(old[unit][0]).exists())]
        for unit in [*todo, *gone]:
            (folder / unit).unlink(missing_ok=True)  # before the manifest says otherwise
        stamps = {unit: stamp for unit, stamp in old.items() if unit not in gone} | new
        manifest = {"schema": SCHEMA, "igeood": __version__, "recipe": recipe, "units": stamps}
        write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        outcomes: dict[str, Any] = {}
        for unit, outcome in make({unit: (new[unit][0], str(folder / unit)) for unit in todo}):
            outcomes[unit] = outcome
            report("files", len(outcomes), len(todo))
        return outcomes


def _stamp(source: Path) -> list[Any]:
    return [str(source), source.stat().st_size, source.stat().st_mtime_ns]


def _check(folder: Path, before: dict[str, Any], recipe: dict[str, Any], old: Stamps, new: Stamps) -> None:
    """Raise if the folder was made with another recipe, or a file of it of another input."""
    changed = [name for name in recipe if before and before.get(name) != recipe[name]]
    problems = [f"{folder} was made with another {name}" for name in changed]
    for unit, (source, *_) in new.items():
        if (folder / unit).exists() and old.get(unit, [None])[0] != source:
            problems.append(f"{folder / unit} was not made of {source}")
    if problems:
        raise InputError(problems[0], argument="out", cure="name another folder, or give {force}")


def remove_units(out: str, units: Iterable[str]) -> None:
    """Remove the output files of a folder and its manifest; then the folders, where nothing else is in them."""
    folder = Path(out)
    for name in {*units, MANIFEST}:
        (folder / name).unlink(missing_ok=True)
    for inner in [*sorted(folder.rglob("*/"), reverse=True), folder]:
        with suppress(OSError):
            inner.rmdir()


def read_manifest(folder: Path) -> tuple[dict[str, Any], Stamps]:
    """What the outputs of a folder were made with, and their inputs; nothing for a folder without files."""
    path = folder / MANIFEST
    if not path.exists() and all(file.name.startswith(".") for file in folder.iterdir()):
        return {}, {}
    try:
        manifest = json.loads(path.read_bytes())
        recipe, units = dict(manifest["recipe"]), dict(manifest["units"])
        if manifest["schema"] == SCHEMA and not any({"..", "/"} & {*PurePath(unit).parts} for unit in units):
            return recipe, units
    except (OSError, ValueError, KeyError, TypeError):
        pass
    problem = f"the folder has files, and {path} is missing, damaged or not of this version of igeood"
    raise InputError(problem, argument="out", cure="name another folder")
