"""Sets are fetched whole and load from their official layouts; damaged files are named, bad archives refused."""

import gc
import gzip
import hashlib
import io
import itertools
import tarfile
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from igeood.bench.datasets import DATASETS, EMBEDDED, Download, load
from igeood.bench.datasets.images import Arrays, ImageSet
from igeood.bench.datasets.records import read_cifar, read_idx, read_mat
from igeood.bench.datasets.store import OWN, get, status, unpack
from igeood.errors import InputError

N = 12  # images of a file or folder


def cifar_bytes(n, *, classes=10, seed=0):
    records = np.random.default_rng(seed).integers(0, 256, (n, 3072 + (2 if classes == 100 else 1)), dtype=np.uint8)
    records[:, 1 if classes == 100 else 0] = np.arange(n) % classes
    return records.tobytes()


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_images(folder, names, size=(40, 36)):
    folder.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        pixels = np.random.default_rng(i).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)


def write_mat(path):
    x = np.random.default_rng(3).integers(0, 256, (32, 32, 3, N), dtype=np.uint8)
    savemat(path, {"X": x, "y": (np.arange(N, dtype=np.uint8) % 10 + 1)[:, None]})
    return x


def md5(content):
    return f"md5:{hashlib.md5(content, usedforsecurity=False).hexdigest()}"


def write_split(dataset, split, root):
    for seed, place in enumerate(root / place for place in dataset.layouts[split][0]):
        place.parent.mkdir(parents=True, exist_ok=True)
        if dataset.kind == "cifar":
            place.write_bytes(cifar_bytes(N, classes=dataset.classes, seed=seed))
        elif dataset.kind == "mat":
            write_mat(place)
        else:
            write_images(place / "deep", [f"{i:02}.png" for i in range(N)])


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Every set in its official layout, with twelve images a file or folder; the .mat files count as official."""
    for dataset in DATASETS.values():
        for split in dataset.layouts:
            write_split(dataset, split, tmp_path / "data")
    svhn, content = DATASETS["svhn"], (tmp_path / "data/svhn/test_32x32.mat").read_bytes()
    downloads = tuple(replace(download, checksum=md5(content)) for download in svhn.downloads)
    monkeypatch.setitem(DATASETS, "svhn", replace(svhn, downloads=downloads))
    return tmp_path / "data"


def packed(files, *members, kind="tar.gz"):
    """The bytes of a tar.gz or zip archive of {name: bytes} and TarInfo objects."""
    target = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return target.getvalue()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for member in members:
            archive.addfile(member)
    return target.getvalue()


@pytest.fixture
def web(file_server, tmp_path_factory):
    """A server of a folder's files."""
    folder = tmp_path_factory.mktemp("web")
    with file_server(folder) as address:
        yield SimpleNamespace(url=address, folder=folder)


PAPER = {"cifar-10": 10_000, "cifar-100": 10_000, "svhn": 10_000, "tiny-imagenet": 10_000, "lsun": 10_000}
PAPER |= {"isun": 8_925, "textures": 5_640, "chars74k": 7_705, "places365": 36_500, "gaussian": 10_000}


def test_the_table_has_the_papers_sets_and_counts():
    assert {name: DATASETS[name].counts["test"] for name in PAPER} == PAPER


@pytest.fixture
def digits(tmp_path):
    """The four files of an MNIST-like set."""
    for stem, n in (("train", 7), ("t10k", 4)):
        draw = np.random.default_rng(n)
        (tmp_path / f"{stem}-images-idx3-ubyte").write_bytes(idx_bytes(draw.integers(0, 256, (n, 28, 28), np.uint8)))
        (tmp_path / f"{stem}-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(n, dtype=np.uint8)))
    return tmp_path


def check(images, again):
    """Bytes in the right shape, classes in their range, and the same every time."""
    pixels = images.images()
    assert (pixels.shape, pixels.dtype) == ((len(images), 3, 32, 32), np.uint8)
    assert np.ptp(pixels) > 128  # of all that a byte holds
    if images.labels is not None:
        assert (images.labels.dtype, images.labels.shape) == (np.int64, (len(images),))
        assert 0 <= images.labels.min() <= images.labels.max() < images.classes
    np.testing.assert_array_equal(again.images(), pixels)
    assert again.digest == images.digest


@pytest.mark.parametrize(("name", "split"), [(name, split) for name in DATASETS for split in DATASETS[name].counts])
def test_every_set_loads_from_its_official_layout(root, name, split):
    images, again = (load(name, root=root, split=split, limit=60) for _ in range(2))
    assert (images.labels is None) == (DATASETS[name].classes is None)
    assert len(images) == (60 if name == "gaussian" or (name, split) == ("cifar-10", "train") else 12)
    check(images, again)
    assert load(name, root=root, split=split, limit=2, side=48).images().shape == (2, 3, 48, 48)


@pytest.mark.parametrize("name", [*EMBEDDED, "idx", "folder"])
def test_every_other_set_loads(digits, name):
    write_images(digits / "deep/er", ["c.PNG"])
    write_images(digits, ["b.JPG", "a.bmp"])
    name = name if name in EMBEDDED else f"{name}:{digits}"
    check(load(name, limit=60), load(name, limit=60))


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "gaussian"])
def test_damaged_files_and_missing_sets_are_named(root, name, tmp_path):
    place = root / DATASETS[name].layouts["test"][0][0]
    path = place if place.is_file() else sorted(place.rglob("*.png"))[-1]
    for content in (b"", b"<!doctype html>" + b" " * 5000, path.read_bytes()[: path.stat().st_size // 2 + 1]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=path.name):
            load(name, root=root).images()
    with pytest.raises(InputError, match=str(tmp_path)):
        load(name, root=tmp_path)


def test_the_literatures_copies_are_found_at_any_depth_of_their_folder_and_hidden_files_left_out(tmp_path):
    """As people have them: archives unpack to `Imagenet/test`, `LSUN_resize/LSUN_resize` or the folder alone."""
    places = {"tiny-imagenet-crop": "Imagenet/test", "lsun": "LSUN_resize/LSUN_resize", "isun": "iSUN"}
    for name, place in places.items():
        write_images(tmp_path / place, ["0.png"], size=(32, 32))
        (tmp_path / place / "._0.png").write_bytes(b"not an image")
        pixels = np.asarray(Image.open(tmp_path / place / "0.png")).transpose(2, 0, 1)
        np.testing.assert_array_equal(load(name, root=tmp_path).images(), pixels[None])


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_folders_have_splits_and_labels(digits, suffix):
    for path in list(digits.iterdir()) if suffix else ():
        path.write_bytes(gzip.compress(path.read_bytes()))
        path.rename(f"{path}{suffix}")
    train, test = (load(f"idx:{digits}", split=split) for split in ("train", "test"))
    assert (len(train), train.classes, test.labels.tolist()) == (7, 7, [0, 1, 2, 3])
    alone = load(f"idx:{digits}/t10k-images-idx3-ubyte{suffix}")
    assert alone.labels is None
    np.testing.assert_array_equal(alone.images(), test.images())


def test_images_by_the_nearest_pixel(tmp_path, refused):
    (tmp_path / "sets").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "sets" / "one.png")
    name = f"folder:{tmp_path / 'sets'}"
    smooth, nearest = load(name), load(f"{name}-nearest")
    np.testing.assert_array_equal(nearest.images()[0], pixels[1::2, 1::2].transpose(2, 0, 1))
    assert smooth.digest != nearest.digest
    assert smooth.contents() == nearest.contents()  # what was tuned on is still recognised
    with refused("name"):
        load("gaussian-nearest")


def test_cifar_records_over_several_files_and_damaged_ones(tmp_path):
    contents = [cifar_bytes(3, seed=1), cifar_bytes(2, seed=2)]
    paths = (tmp_path / "a.bin", tmp_path / "b.bin")
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    source, labels = read_cifar(paths, classes=10)
    records = np.frombuffer(b"".join(contents), np.uint8).reshape(5, 3073)
    np.testing.assert_array_equal(labels, records[:, 0])
    np.testing.assert_array_equal(source.read(np.array([4, 0, 3])), records[[4, 0, 3], 1:].reshape(3, 3, 32, 32))
    paths[0].write_bytes(cifar_bytes(40, classes=100))
    assert read_cifar(paths[:1], classes=100)[1].tolist() == list(range(40))  # the fine labels
    content = cifar_bytes(3)
    for damaged in (content[:-1], content[:3073] + b"\x0a" + content[3074:]):  # a class that there is not
        paths[1].write_bytes(damaged)
        with pytest.raises(InputError, match=r"b\.bin"):
            read_cifar(paths[1:], classes=10)


def test_svhn_is_transposed_and_ten_is_zero_and_unverified_files_are_not_opened(tmp_path, monkeypatch):
    x = write_mat(tmp_path / "test.mat")
    images, labels = read_mat(tmp_path / "test.mat", md5((tmp_path / "test.mat").read_bytes()), limit=11)
    assert (images.shape, images.dtype) == ((11, 3, 32, 32), np.uint8)
    np.testing.assert_array_equal(images[7, 2], x[:, :, 2, 7])
    assert labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    monkeypatch.setattr("scipy.io.loadmat", lambda *_, **__: pytest.fail("an unverified file was read"))
    for checksum in (None, f"md5:{'0' * 32}"):
        with pytest.raises(InputError, match=r"test\.mat"):
            read_mat(tmp_path / "test.mat", checksum)


def test_damaged_idx_files_are_refused(tmp_path):
    images = np.arange(2 * 4 * 5, dtype=np.uint8).reshape(2, 4, 5)
    content = idx_bytes(images)
    (tmp_path / "x").write_bytes(content)
    np.testing.assert_array_equal(read_idx(tmp_path / "x", dims=3), images)
    bad = [b"", content[:3] + b"\x01" + content[4:], content[:-1], content[:4] + bytes(12)]
    bad += [content[:4] + b"\xff" * 12 + content[16:], gzip.compress(content)[:-12]]
    for i, changed in enumerate(bad):
        path = tmp_path / ("x.gz" if i == 5 else "x")
        path.write_bytes(changed)
        with pytest.raises(InputError, match=path.name):
            read_idx(path, dims=3)


VALUES = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)
TEN = ImageSet("ten", "Ten", Arrays(VALUES), np.arange(10), np.arange(10) % 3, 3)


def test_batches_subsets_and_limits_are_those_of_the_arrays():
    for size in (1, 3, 99):
        np.testing.assert_array_equal(np.concatenate(list(TEN.batches(size))), VALUES)
    for key in (slice(2, 9, 3), [4, 4, 0], np.array([-1, 1]), np.arange(10) % 2 == 0, []):
        rows = np.arange(10)[key]
        np.testing.assert_array_equal(TEN[key].images(), VALUES[rows])
        np.testing.assert_array_equal(TEN[key].labels, (np.arange(10) % 3)[rows])
    np.testing.assert_array_equal(TEN[2:8][1:3].images(), VALUES[3:5])
    assert TEN.limited(4).rows.tolist() == [0, 3, 6, 9]
    assert TEN.limited(10) is TEN.limited(None) is TEN


def test_digest_changes_with_rows_order_labels_and_content_only():
    changed = VALUES.copy()
    changed[9, 2, 31, 31] ^= 1
    others = [TEN[:5], TEN[::-1], ImageSet("ten", "Ten", Arrays(VALUES), np.arange(10))]
    others.append(ImageSet("ten", "Ten", Arrays(changed), np.arange(10), np.arange(10) % 3, 3))
    assert len({TEN.digest, *(images.digest for images in others)}) == 5
    copy = ImageSet("other", "Other", Arrays(VALUES.copy()), np.arange(10), np.arange(10) % 3, 3)
    assert copy.digest == TEN.digest == TEN[:].digest
    assert len(copy[:6].contents() & TEN[4:].contents()) == 2
    assert TEN.digest.startswith("03464557")
    assert load("gaussian", limit=7).digest.startswith("f53b2d7c")  # as in 0.1
    assert load("demo:digits").digest.startswith("aa537075")


def test_no_two_embedded_sets_share_an_image():
    contents = [load(name).contents() for name in EMBEDDED] + [load("demo:digits", split="train").contents()]
    assert not any(one & other for one, other in itertools.combinations(contents, 2))


# fetching

SMALL = {"cifar-10-batches-bin/data_batch_1.bin": 3, "cifar-10-batches-bin/test_batch.bin": 2}


@pytest.fixture
def serve(web):
    """Puts an archive on the server, and returns a small CIFAR-10 that is fetched from there."""

    def put(foreign=None, name="small.tar.gz", **options):
        files = {place: cifar_bytes(n) for place, n in SMALL.items()}
        content = packed(files | (foreign or {}), kind=name.partition(".")[2])
        (web.folder / name).write_bytes(content)
        layouts = {split: ((place,),) for split, place in zip(("train", "test"), SMALL, strict=True)}
        download = Download(f"{web.url}{name}", **{"checksum": md5(content), **options})
        return replace(DATASETS["cifar-10"], counts={"train": 3, "test": 2}, layouts=layouts, downloads=(download,))

    return put


def names(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_get_completes_what_is_there_and_leaves_other_files(serve, tmp_path, kind):
    root = tmp_path / "root"
    small = serve({"iSUN/a.png": b"x", f"{OWN}/cifar-10.lock": b""}, f"small.{kind}")
    assert status(small, root).state == "missing"
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (folder / "test_batch.bin").write_bytes(cifar_bytes(1))
    (folder / "mine.txt").write_text("mine")
    assert (status(small, root).state, status(small, root).found) == ("partial", 1)
    assert get(small, root)
    assert (names(root), status(small, root).state) == (sorted([*SMALL, f"{folder.name}/mine.txt"]), "ok")
    assert (folder / "mine.txt").read_text() == "mine"
    assert not get(small, root)
    assert get(small, root, force=True)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # pooch leaves the answer to a failed request open
@pytest.mark.parametrize("wrong", ["checksum", "cut", "not found"])
def test_a_download_that_fails_leaves_nothing(serve, tmp_path, web, wrong):
    root = tmp_path / "root"
    small = serve(**({"checksum": f"md5:{'0' * 32}"} if wrong == "checksum" else {}))
    file = web.folder / "small.tar.gz"
    if wrong == "cut":
        file.write_bytes(file.read_bytes()[:100])
    if wrong == "not found":
        file.unlink()
    with pytest.raises(InputError, match=r"small\.tar\.gz"):
        get(small, root)
    assert names(root) == []
    assert not (root / OWN / "cifar-10").exists()
    gc.collect()


def link(kind, target):
    member = tarfile.TarInfo("set/link")
    member.type, member.linkname = kind, target
    return member


BAD = {
    "out.tar.gz": ({"set/a": b"a", "set/../../out": b"x"},),
    "link.tar.gz": ({}, link(tarfile.SYMTYPE, "/etc/passwd")),
    "hard.tar.gz": ({}, link(tarfile.LNKTYPE, "../x")),
    "device.tar.gz": ({}, link(tarfile.CHRTYPE, "")),
    "large.zip": ({"set/a": bytes(900), "set/b": bytes(900)},),
    "large.tar.gz": ({"set/a": bytes(900), "set/b": bytes(900)},),
}


@pytest.mark.parametrize("name", [*BAD, "page.zip", "page.tar.gz", "page.tar"])
def test_bad_archives_are_refused(tmp_path, name, monkeypatch):
    monkeypatch.setattr("igeood.bench.datasets.store.MAX_BYTES", 1000)
    content = packed(*BAD[name], kind=name.partition(".")[2]) if name in BAD else b"<html>not found</html>"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        unpack(tmp_path / name, tmp_path / "into", folders={"set"})
    assert names(tmp_path) == [name]


def test_nothing_of_a_zip_is_written_outside(tmp_path):
    (tmp_path / "out.zip").write_bytes(packed({"set/a": b"a", "set/../../out": b"x", "../set/b": b"x"}, kind="zip"))
    unpack(tmp_path / "out.zip", tmp_path / "into", folders={"set"})
    assert names(tmp_path) == ["into/set/a", "out.zip"]
