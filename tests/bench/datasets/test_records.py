import gzip
import re
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.io import savemat

from igeood.bench.datasets.records import read_cifar, read_idx, read_mat
from igeood.errors import InputError

sharing = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@contextmanager
def or_refused(path):
    """It works, or the error names the file."""
    try:
        yield
    except InputError as error:
        if not str(error).startswith(f"{path}: "):
            raise


def test_cifar_10_records_over_several_files(tmp_path, cifar):
    contents = [cifar(3, seed=1), cifar(2, seed=2)]
    paths = (tmp_path / "a.bin", tmp_path / "b.bin")
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    source, labels = read_cifar(paths, classes=10)
    records = np.frombuffer(b"".join(contents), np.uint8).reshape(5, 3073)
    np.testing.assert_array_equal(labels, records[:, 0])
    np.testing.assert_array_equal(source.read(np.array([4, 0, 3])), records[[4, 0, 3], 1:].reshape(3, 3, 32, 32))
    assert len(source) == 5
    assert labels.dtype == np.int64


def test_cifar_100_takes_the_fine_label(tmp_path, cifar):
    path = tmp_path / "test.bin"
    path.write_bytes(cifar(40, classes=100))
    source, labels = read_cifar((path,), classes=100)
    assert labels.tolist() == list(range(40))
    assert source.read(np.arange(40)).shape == (40, 3, 32, 32)


@pytest.mark.parametrize("cut", [1, 3072, 3073 * 2 - 5])
def test_a_truncated_batch_is_an_error(tmp_path, cifar, cut):
    path = tmp_path / "test_batch.bin"
    path.write_bytes(cifar(2)[:-cut])
    with pytest.raises(InputError, match=rf"{re.escape(str(path))}: .*3073-byte records: truncated; fetch"):
        read_cifar((path,), classes=10)


def test_a_file_that_shrinks_after_opening_is_an_error_too(tmp_path, cifar):
    path = tmp_path / "test_batch.bin"
    path.write_bytes(cifar(2))
    source, _ = read_cifar((path,), classes=10)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="truncated"):
        source.read(np.array([1]))
    path.write_bytes(cifar(1))
    with pytest.raises(InputError, match="changed"):
        source.read(np.array([1]))
    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        source.read(np.array([1]))


def test_labels_out_of_range_are_named(tmp_path, cifar):
    path = tmp_path / "test_batch.bin"
    content = bytearray(cifar(3))
    content[3073] = 10
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"test_batch\.bin: record 1 has label 10, expected 0 to 9.*fetch"):
        read_cifar((path,), classes=10)


@sharing
@given(content=st.binary(max_size=200), repeat=st.integers(0, 200), classes=st.sampled_from([10, 100]))
def test_any_bytes_are_read_or_refused_cifar(tmp_path, content, repeat, classes):
    path = tmp_path / "any.bin"
    path.write_bytes(content * repeat)
    with or_refused(path):
        source, labels = read_cifar((path,), classes=classes)
        assert len(source) == len(labels) == len(source.read(np.arange(len(source))))


def svhn(path, n=12, **replaced):
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, n), dtype=np.uint8)
    y = (np.arange(n, dtype=np.uint8) % 10 + 1)[:, None]
    savemat(path, {"X": x, "y": y} | replaced, do_compression=True)
    return x, y


def test_svhn_is_transposed_and_ten_is_zero(tmp_path):
    x, _ = svhn(tmp_path / "test.mat")
    images, labels = read_mat(tmp_path / "test.mat", limit=11)
    assert images.shape == (11, 3, 32, 32)
    np.testing.assert_array_equal(images[7, 2], x[:, :, 2, 7])
    assert labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


@pytest.mark.parametrize(
    "replaced",
    [
        {"X": np.zeros((32, 32, 12), np.uint8)},
        {"X": np.zeros((32, 32, 3, 12))},
        {"y": np.ones((3, 1), np.uint8)},
        {"y": np.full((12, 1), 11, np.uint8)},
        {"y": np.zeros((12, 1), np.uint8)},
        {"y": np.array([["a"]] * 12)},
    ],
)
def test_other_mat_files_are_refused(tmp_path, replaced):
    svhn(tmp_path / "test.mat", **replaced)
    with pytest.raises(InputError, match=r"test\.mat: .*fetch the set again"):
        read_mat(tmp_path / "test.mat", limit=None)


@sharing
@given(cut=st.integers(0, 30_000), at=st.integers(0, 30_000), flip=st.integers(0, 255))
def test_a_damaged_mat_file_is_read_or_refused(tmp_path, cut, at, flip):
    path = tmp_path / "test.mat"
    svhn(path, 9)
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= flip
    path.write_bytes(content[: len(content) - cut if cut < len(content) else None])
    with or_refused(path):
        images, labels = read_mat(path, limit=None)
        assert len(images) == len(labels)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_plain_and_gzipped(tmp_path, idx, suffix):
    values = np.random.default_rng(0).integers(0, 256, (3, 5, 4), dtype=np.uint8)
    path = tmp_path / f"images{suffix}"
    path.write_bytes(gzip.compress(idx(values)) if suffix else idx(values))
    np.testing.assert_array_equal(read_idx(path, dims=3), values)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b[:-1], "another size"),
        (lambda b: b + b"x", "another size"),
        (lambda b: b[:9], "starts with 00000803"),
        (lambda _: b"", "starts with nothing"),
        (lambda b: b"\x00\x00\x0d\x03" + b[4:], "starts with 00000d03, expected 00000803"),
        (lambda b: b[:4] + b"\xff" * 12 + b[16:], "another size"),
        (lambda b: b[:4] + b"\x00" * 4 + b[8:], "no data"),
    ],
)
def test_wrong_idx_files_are_named(tmp_path, idx, suffix, change, said):
    path = tmp_path / f"images{suffix}"
    content = change(idx(np.zeros((3, 5, 4), np.uint8)))
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(InputError, match=rf"^{re.escape(str(path))}: .*{said}.*(fetch|give)"):
        read_idx(path, dims=3)


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:14] + b"\xff\xff" + b[16:], lambda _: b"plain"])
def test_a_damaged_gzip_is_an_error(tmp_path, idx, damage):
    path = tmp_path / "images.gz"
    path.write_bytes(damage(gzip.compress(idx(np.zeros((3, 5, 4), np.uint8)))))
    with pytest.raises(InputError, match=r"images\.gz: (truncated|its header|starts)"):
        read_idx(path, dims=3)


@sharing
@given(content=st.binary(max_size=80), compressed=st.booleans(), start=st.booleans())
def test_any_bytes_are_read_or_refused_idx(tmp_path, content, compressed, start):
    content = bytes([0, 0, 8, 3]) + content if start else content
    path = tmp_path / ("any.gz" if compressed else "any")
    path.write_bytes(content)
    with or_refused(path):
        assert read_idx(path, dims=3).ndim == 3


@sharing
@given(at=st.integers(0, 200), value=st.integers(0, 255), cut=st.integers(0, 40), compressed=st.booleans())
def test_mutated_idx_files_are_read_or_refused(tmp_path, idx, at, value, cut, compressed):
    whole = idx(np.arange(60, dtype=np.uint8).reshape(3, 5, 4))
    content = bytearray(gzip.compress(whole) if compressed else whole)
    content[at % len(content)] = value
    path = tmp_path / ("any.gz" if compressed else "any")
    path.write_bytes(content[: len(content) - cut])
    with or_refused(path):
        assert read_idx(path, dims=3).ndim == 3
