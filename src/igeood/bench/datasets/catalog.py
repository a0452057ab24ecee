"""The table of known data sets, and where their files are kept."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

from igeood.bench.datasets.images import extra


@dataclass(frozen=True)
class Download:
    """One file to fetch, and its checksum ("md5:…" or "sha256:…") where somebody published one."""

    url: str
    checksum: str | None = None
    into: str = ""

    @property
    def file(self) -> str:
        """Where the file is put, below the root."""
        return str(PurePosixPath(self.into) / PurePosixPath(urlsplit(self.url).path).name)


@dataclass(frozen=True)
class Dataset:
    """One line of the table.

    Attributes
    ----------
    name, title, licence, home : str
        Its name here and in print; what its owners allow; its web page.
    kind : str
        How it is read: CIFAR's records, a MATLAB file, image files, or made noise.
    counts : mapping from split to number of images
    layouts : mapping from split to the known layouts, the official one first
        Each is the files or folders below the root that make up the split.
    downloads : tuple of Download
    mean, std : three floats each, or None for sets that are only out-of-distribution
    classes : int or None
    note : str
    """

    name: str
    title: str
    licence: str
    home: str
    kind: Literal["cifar", "mat", "images", "noise"]
    counts: Mapping[str, int]
    layouts: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    downloads: tuple[Download, ...] = ()
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    classes: int | None = None
    note: str = ""


_CIFAR = "https://www.cs.toronto.edu/~kriz"
_SVHN = "http://ufldl.stanford.edu/housenumbers"
_CHARS = "http://www.ee.surrey.ac.uk/CVSSP/demos/chars74k"
_TINY = "http://cs231n.stanford.edu/"
_DTD = "https://www.robots.ox.ac.uk/~vgg/data/dtd"
_ODIN, _DROPBOX = "https://github.com/facebookresearch/odin", "https://www.dropbox.com/s"
_ALIASED = "the literature's copy of 32 x 32 pixels: made smaller without smoothing, hence aliased"


# fmt: off
def _foreign(
    name: str, title: str, licence: str, home: str, count: int, folders: tuple[str, ...], url: str,
    checksum: str | None = None, note: str = "",
) -> Dataset:
    """A set of image files that is only out-of-distribution, below the first of the folders that is there."""
    layouts, downloads = {"test": tuple((folder,) for folder in folders)}, (Download(url, checksum),)
    return Dataset(name, title, licence, home, "images", {"test": count}, layouts, downloads, note=note)


_TABLE = (  # checksums: the CIFAR page's; torchvision's of SVHN, Textures and Places365; pytorch-ood's and avalanche's
    Dataset(
        "cifar-10", "CIFAR-10", "not stated on its page", f"{_CIFAR}/cifar.html", "cifar",
        counts={"train": 50_000, "test": 10_000},
        layouts={"train": (tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)),),
                 "test": (("cifar-10-batches-bin/test_batch.bin",),)},
        downloads=(Download(f"{_CIFAR}/cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
        mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010), classes=10,
    ),
    Dataset(
        "cifar-100", "CIFAR-100", "not stated on its page", f"{_CIFAR}/cifar.html", "cifar",
        counts={"train": 50_000, "test": 10_000},
        layouts={"train": (("cifar-100-binary/train.bin",),), "test": (("cifar-100-binary/test.bin",),)},
        downloads=(Download(f"{_CIFAR}/cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),),
        mean=(0.5071, 0.4867, 0.4408), std=(0.2675, 0.2565, 0.2761), classes=100,
    ),
    Dataset(
        "svhn", "SVHN", "non-commercial use only", f"{_SVHN}/", "mat",
        counts={"train": 73_257, "test": 10_000},
        layouts={split: ((f"svhn/{split}_32x32.mat",), (f"{split}_32x32.mat",)) for split in ("train", "test")},
        downloads=(Download(f"{_SVHN}/test_32x32.mat", "md5:eb5a983be6a315427106f1b164d9cef3", "svhn"),
                   Download(f"{_SVHN}/train_32x32.mat", "md5:e26dedcc434d2e4c54c9b2d4a06d8373", "svhn")),
        mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970), classes=10,
        note="test: the first 10,000 of 26,032 images, as in the paper",
    ),
    Dataset(
        "tiny-imagenet", "Tiny-ImageNet", "non-commercial research (ImageNet)", _TINY, "images",
        counts={"train": 100_000, "val": 10_000, "test": 10_000},
        layouts={"train": (("tiny-imagenet-200/train",),), "val": (("tiny-imagenet-200/val/images",),),
                 "test": (("tiny-imagenet-200/test/images",),)},
        downloads=(Download(f"{_TINY}tiny-imagenet-200.zip", "md5:90528d7ca1a48142e341f4ef8d21d0de"),),
        note="resized here, bilinear: unlike the copies in the literature, not aliased",
    ),
    # ODIN's copies; below their folder archives differ in depth (Imagenet/test, LSUN_resize/LSUN_resize)
    _foreign("tiny-imagenet-resized", "Tiny-ImageNet (resized)", "not stated", _ODIN, 10_000, ("Imagenet_resize",),
             f"{_DROPBOX}/kp3my3412u5k9rl/Imagenet_resize.tar.gz?dl=1", "md5:0f9ff11d45babf2eff5fe12281d1ac31",
             _ALIASED),
    _foreign("tiny-imagenet-crop", "Tiny-ImageNet (crop)", "not stated", _ODIN, 10_000, ("Imagenet",),
             f"{_DROPBOX}/avgm2u562itwpkl/Imagenet.tar.gz?dl=1", "md5:7c0827e4246c3718a5ee076e999e52e5"),
    _foreign("lsun", "LSUN (resized)", "not stated", _ODIN, 10_000, ("LSUN_resize",),
             f"{_DROPBOX}/moqh2wh8696c3yl/LSUN_resize.tar.gz?dl=1", "md5:278b7b31c8cb7e804a1465a8ce03a2dc", _ALIASED),
    _foreign("lsun-crop", "LSUN (crop)", "not stated", _ODIN, 10_000, ("LSUN",),
             f"{_DROPBOX}/fhtsw1m3qxlwj6h/LSUN.tar.gz?dl=1", "md5:458a0a0ab8e5f1cb4516d7400568e460"),
    _foreign("isun", "iSUN", "not stated", _ODIN, 8_925, ("iSUN",),
             f"{_DROPBOX}/ssz7qxfqae0cca5/iSUN.tar.gz?dl=1", None, _ALIASED),
    _foreign("textures", "Textures (DTD)", "research purposes", f"{_DTD}/", 5_640, ("dtd/images",),
             f"{_DTD}/download/dtd-r1.0.1.tar.gz", "md5:fff73e5086ae6bdbea199a49dfb8a4c1"),
    _foreign("chars74k", "Chars74K (EnglishImg)", "not stated", f"{_CHARS}/", 7_705, ("English/Img/GoodImg/Bmp",),
             f"{_CHARS}/EnglishImg.tgz", "md5:85d157e0c58f998e1cda8def62bcda0d",
             "the 7,705 good images of the archive"),
    _foreign("places365", "Places365 (validation)", "non-commercial research", "http://places2.csail.mit.edu/", 36_500,
             ("val_256", "places365/val_256"),
             "http://data.csail.mit.edu/places/places365/val_256.tar", "md5:e27b17d8d44f4af9a78502beb927f808"),
    Dataset("gaussian", "Gaussian noise", "made here", "", "noise", counts={"test": 10_000}),
)
# fmt: on
DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in _TABLE}


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of the data sets: the argument, else $IGEOOD_DATA, else `igeood` in the user's cache folder."""
    given = root or os.environ.get("IGEOOD_DATA") or extra("pooch").os_cache("igeood")
    return Path(os.path.expanduser(given))  # noqa: PTH111 (Path.expanduser fails for a user that is not known)
