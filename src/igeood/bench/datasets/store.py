"""Data sets on disk: fetch them, say what is there, and check it.

Below the root, `.igeood/` holds each set's manifest (every unpacked file with its size and SHA-256), its lock, and what
is being unpacked.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from igeood.bench.datasets.catalog import Dataset, Download
from igeood.bench.datasets.download import Progress, beside, checksum_differs, fetch, file_digest, writing
from igeood.bench.datasets.loading import load_dataset, present
from igeood.bench.datasets.unpack import ARCHIVES, Entry, unpack
from igeood.errors import InputError
from igeood.files import only_one, write_whole

OWN = ".igeood"
FETCHED = "fetched"  # folder of marks, one for each archive that this run has fetched itself
State = Literal["ok", "partial", "missing", "damaged"]


@dataclass(frozen=True)
class Status:
    """What is there of a set: `found` of `expected` images, and in words what is wrong."""

    name: str
    state: State
    found: int
    expected: int
    detail: str = ""


def status(dataset: Dataset, root: Path, *, deep: bool = False, decode: bool = False) -> Status:
    """Count what is there.

    Parameters
    ----------
    dataset : Dataset
    root : Path
        The folder of the data sets.
    deep : bool
        Also read the array files, and compare every file with the manifest if `get` left one.
    decode : bool
        Also decode every image.
    """
    expected = sum(dataset.counts.values())
    counts: dict[str, int] = {}
    try:
        for split in dataset.counts:
            counts[split] = _count(dataset, root, split, deep=deep, decode=decode)
        note = _compare(dataset, root) if deep and any(counts.values()) else ""
    except InputError as error:
        return Status(dataset.name, "damaged", sum(counts.values()), expected, str(error))
    found = sum(counts.values())
    short = [f"{split} {n:,} of {dataset.counts[split]:,}" for split, n in counts.items() if n < dataset.counts[split]]
    state: State = "ok" if not short else "partial" if found else "missing"
    return Status(dataset.name, state, found, expected, "; ".join(filter(None, [*short, note])) if found else "")


def begun(dataset: Dataset, root: Path) -> bool:
    """Whether anything of a set's test images is there, be it half a download."""
    if dataset.kind == "noise":
        return True
    places = [place for layout in dataset.layouts["test"] for place in layout]
    places += [f"{download.file}.part" for download in dataset.downloads]
    return any((root / place).exists() for place in places)


def _count(dataset: Dataset, root: Path, split: str, *, deep: bool, decode: bool) -> int:
    """The number of images of a split that are there."""
    expected = dataset.counts[split]
    if dataset.kind == "noise":
        return expected
    if not any((root / place).exists() for layout in dataset.layouts[split] for place in layout):
        return 0
    if dataset.kind == "mat" and not deep:
        return expected
    images = load_dataset(dataset, root=root, split=split)
    if len(images) > expected:
        where = present(dataset, root, split)[0]
        raise InputError(f"{where}: {len(images):,} images, expected {expected:,}; remove what does not belong there")
    for _ in images.batches() if decode else ():
        pass
    return len(images)


def _compare(dataset: Dataset, root: Path) -> str:
    """Compare the files with the manifest; a note if there is none."""
    manifest = root / OWN / f"{dataset.name}.json"
    if dataset.kind == "noise":
        return ""
    if not manifest.exists():
        return "no manifest: counted only"
    try:
        files: dict[str, Entry] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        entries = [(root / name, int(entry["size"]), entry["sha256"]) for name, entry in files.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise InputError(f"{manifest}: damaged; run `igeood data get --force {dataset.name}`") from None
    for path, size, digest in entries:
        if not os.path.isfile(path):  # noqa: PTH113 (which raises where a name is too long)
            wrong = "is gone"
        elif path.stat().st_size != size:
            wrong = f"has {path.stat().st_size:,} bytes, expected {size:,}"
        else:
            wrong = "" if file_digest(path) == digest else "has other contents than when it was fetched"
        if wrong:
            raise InputError(f"{path}: {wrong}; run `igeood data get --force {dataset.name}`")
    return ""


def get(dataset: Dataset, root: Path, *, force: bool = False, progress: Progress | None = None) -> bool:
    """Download a set and unpack it below `root`; False if it was there already, whole, or needs no files.

    Nothing half-written gets a set's name: archives are unpacked aside, and moved into place when they are whole. Files
    that do not belong to the set are left alone.
    """
    aside = root / OWN / f"unpack-{dataset.name}"  # ours alone, as we hold the set's lock; there until all is done

    def done() -> bool:
        return not (force or aside.exists()) and status(dataset, root).state == "ok"

    if dataset.kind == "noise" or done():  # the root may be read-only
        return False
    if not dataset.downloads:
        raise InputError(f"{dataset.name}: must be fetched by hand: see {dataset.home}, and unpack it in {root}")
    with writing(root), only_one(root / OWN / f"{dataset.name}.lock", dataset.name):
        if done():  # by another process, meanwhile
            return False
        try:
            _get_all(dataset, root, aside, force=force, progress=progress)
            for download in dataset.downloads:
                if (aside / FETCHED / download.file).exists():  # an archive that the user put there stays
                    (root / download.file).unlink(missing_ok=True)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        now = status(dataset, root)
    if now.state != "ok":
        what = now.detail or f"{now.found:,} of {now.expected:,} images"
        raise InputError(f"{root}: {dataset.name} is {now.state} after download ({what}); see {dataset.home}")
    return True


def _get_all(dataset: Dataset, root: Path, aside: Path, *, force: bool, progress: Progress | None) -> None:
    """Fetch a set's files, unpack them, and note in the manifest what is there."""
    found = status(dataset, root, deep=aside.exists())
    if not force and (found.state, found.detail) == ("ok", ""):  # a run was killed that had but to tidy up
        return
    aside.mkdir(exist_ok=True)
    files: dict[str, Entry] = {}
    for download in dataset.downloads:
        files |= _get(dataset, download, root, aside, force=force, progress=progress)
    manifest = json.dumps({"name": dataset.name, "files": files}, indent=1)
    write_whole(root / OWN / f"{dataset.name}.json", manifest.encode())


def _get(
    dataset: Dataset, download: Download, root: Path, aside: Path, *, force: bool, progress: Progress | None
) -> dict[str, Entry]:
    """Fetch one file and unpack it; the files that are there now. An archive stays, with a mark aside if it is ours."""
    path, archive = root / download.file, download.file.endswith(ARCHIVES)
    if force or not _whole(path, download):
        if archive:
            (aside / FETCHED / download.file).mkdir(parents=True, exist_ok=True)
        fetch(download.url, path, size=download.size, checksum=download.checksum, progress=progress)
    for left in beside(path):  # by a run that was killed
        left.unlink(missing_ok=True)
    if not archive:
        return {download.file: {"size": path.stat().st_size, "sha256": file_digest(path)}}
    unpacked = aside / "files"
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir()
    own = {place.split("/")[0] for layouts in dataset.layouts.values() for layout in layouts for place in layout}
    files = unpack(path, unpacked, folders=own)
    _move(unpacked, root)
    return files


def _whole(path: Path, download: Download) -> bool:
    """Whether the file is there already: put there by hand, or by a run that failed later."""
    there = path.is_file() and download.size in {None, path.stat().st_size}
    return there and not checksum_differs(path, download.checksum)


def _move(source: Path, target: Path) -> None:
    """Rename what is in one folder into another: whole folders where they are new, else file by file."""
    for entry in list(source.iterdir()):
        place = target / entry.name
        if entry.is_dir() and place.is_dir():
            _move(entry, place)
        else:
            entry.replace(place)
