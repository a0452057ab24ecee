"""`load`: from a name to an image set."""

import os
from dataclasses import replace
from pathlib import Path, PurePath

import numpy as np

from igeood.bench.datasets.catalog import DATASETS, Dataset, data_root
from igeood.bench.datasets.embedded import load_embedded
from igeood.bench.datasets.images import SIDE, Arrays, Files, ImageSet, Labels, Noise
from igeood.bench.datasets.records import read_cifar, read_idx, read_mat
from igeood.errors import InputError
from igeood.images import image_files

MAX_SIDE = 4096
NEAREST = "-nearest"  # the end of a name of image files that are resized by the nearest pixel


def load(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    split: str = "test",
    limit: int | None = None,
    side: int = SIDE,
) -> ImageSet:
    """Open an image set. Files of images are read later, as they are needed.

    Parameters
    ----------
    name : str
        One of `DATASETS`; or `folder:PATH`, all images below a folder in the order of their paths, without labels or
        splits; or `idx:PATH`, an idx file of images (plain or .gz), or the folder of the four MNIST-like files; or
        `demo:NAME`, one of the small sets of `igeood.bench.datasets.EMBEDDED`.
        With `-nearest` after its name, a set of image files is resized by the nearest pixel, and aliased.
        Images that are not 32 x 32 are resized (shorter side to 32, Pillow's bilinear filter, which does not alias)
        and cropped at the centre; grey ones are repeated over three channels.
    root : path, optional
        Where the named sets are; see `data_root`.
    split : str
        `"test"`, or another that the set has.
    limit : int, optional
        Take only so many images, evenly spaced over the whole set (not its beginning): the same ones every time.
    side : int
        Resize to this many pixels in place of 32; sets that come as arrays are resized from 32 x 32.

    Examples
    --------
    >>> noise = load("gaussian", limit=3)
    >>> noise.images().shape
    (3, 3, 32, 32)
    """
    if not 1 <= side <= MAX_SIDE:
        raise InputError(f"must be 1 to {MAX_SIDE} pixels, got {side!r}", argument="side")
    asked = canonical(name)
    name = smooth_name(name)
    path = Path(name.partition(":")[2])
    if name.startswith("folder:"):
        images = _folder(path, name)
    elif name.startswith("idx:"):
        images = _idx(path, name, split)
    elif name.startswith("demo:"):
        images = load_embedded(name, split)
    else:
        images = load_dataset(find(name), data_root(root), split)
    if asked != name:
        if not isinstance(images.source, Files):
            raise InputError(f"{asked} has no image files", argument="name", cure=f"leave {NEAREST} out")
        note = "resized here, by the nearest pixel: aliased, as in the literature"
        source = replace(images.source, nearest=True)
        images = replace(images, name=asked, title=f"{images.title} (nearest)", source=source, note=note)
    return replace(images, side=side).limited(limit)


def smooth_name(name: str) -> str:
    """The name of the set whose files a name with `-nearest` reads; other names as they are.

    >>> smooth_name("tiny-imagenet-nearest")
    'tiny-imagenet'
    """
    name = canonical(name)
    base = name.removesuffix(NEAREST)
    is_path = name.startswith(("folder:", "idx:")) and Path(name.partition(":")[2]).exists()
    return name if name in DATASETS or is_path else base


def nearest_name(name: str) -> str:
    """The name that reads a set's image files by the nearest pixel; of other sets their own."""
    known = DATASETS.get(name)
    is_files = name.startswith("folder:") or (known is not None and known.kind == "images")
    if is_files and Path(f"{canonical(name).partition(':')[2]}{NEAREST}").exists():
        cure = "rename it, or leave --resize out"
        raise InputError(f"{name}{NEAREST} is a folder of its own", argument="name", cure=cure)
    return f"{canonical(name)}{NEAREST}" if is_files else name


def canonical(name: str) -> str:
    """The one name of an image set, however its path is spelt.

    >>> canonical("folder:/data/red/../blue/")
    'folder:/data/blue'
    """
    kind, colon, path = name.partition(":")
    return f"{kind}:{os.path.abspath(os.path.expanduser(path))}" if colon and kind in ("folder", "idx") else name  # noqa: PTH100, PTH111


def find(name: str) -> Dataset:
    """The table's entry of this name."""
    if name not in DATASETS:
        raise InputError.unknown("name", name, [*DATASETS, "folder:PATH", "idx:PATH"])
    return DATASETS[name]


def load_dataset(dataset: Dataset, root: Path, split: str) -> ImageSet:
    """A set of the table, from its official files below `root`."""
    if split not in dataset.counts:
        raise InputError.unknown("split", split, dataset.counts)
    expected = dataset.counts[split]
    source, labels = _read(dataset, root, split)
    part = "" if len(source) == expected else f"{len(source):,} of {expected:,} images"
    note = "; ".join(filter(None, [part, dataset.note]))
    return ImageSet(dataset.name, dataset.title, source, np.arange(len(source)), labels, dataset.classes, note)


def _read(dataset: Dataset, root: Path, split: str) -> tuple[Files | Arrays, Labels | None]:
    if dataset.kind == "noise":
        return Noise(np.arange(dataset.counts[split])), None
    paths = present(dataset, root, split)
    if not paths:
        places = " or ".join(str(root / layout[0]) for layout in dataset.layouts[split])
        cure = f"run `igeood data get {dataset.name}`, or set IGEOOD_DATA to the folder that has it"
        raise InputError(f"{dataset.name} ({split}) is not there", place=places, cure=cure)
    if dataset.kind == "cifar":
        return read_cifar(paths, classes=dataset.classes or 10)
    if dataset.kind == "mat":
        checksum = next((one.checksum for one in dataset.downloads if PurePath(one.file).name == paths[0].name), None)
        values, labels = read_mat(paths[0], checksum, limit=dataset.counts[split])
        return Arrays(values), labels
    return Files(tuple(file for path in paths for file in image_files(path))), None


def present(dataset: Dataset, root: Path, split: str) -> tuple[Path, ...]:
    """The files or folders of a split that exist: of the first of the known layouts that has any."""
    layouts = (tuple(root / place for place in layout if (root / place).exists()) for layout in dataset.layouts[split])
    return next(filter(None, layouts), ())


def _folder(folder: Path, name: str) -> ImageSet:
    """All images below a folder."""
    paths = tuple(image_files(folder))
    return ImageSet(name, folder.resolve().name, Files(paths), np.arange(len(paths)))


def _idx(path: Path, name: str, split: str) -> ImageSet:
    """One idx file of images, or a folder of the four files of an MNIST-like set."""
    labels = None
    images_file = path
    if path.is_dir():
        stems = {"train": "train", "test": "t10k"}
        if split not in stems:
            raise InputError.unknown("split", split, stems)
        images_file, labels_file = (path / f"{stems[split]}-{part}-ubyte" for part in ("images-idx3", "labels-idx1"))
        labels = read_idx(labels_file, dims=1).astype(np.int64)
    images = read_idx(images_file, dims=3)
    if labels is not None and len(labels) != len(images):
        problem = f"{len(labels):,} labels for {len(images):,} images"
        raise InputError(problem, place=str(labels_file), cure="fetch both files again")
    classes = None if labels is None else int(labels.max()) + 1
    return ImageSet(name, path.resolve().name, Arrays(images), np.arange(len(images)), labels, classes)
