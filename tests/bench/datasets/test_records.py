import gzip

import numpy as np
import pytest

from igeood.bench.datasets.records import read_cifar, read_idx, read_mat
from igeood.errors import InputError


def test_cifar_records_over_several_files_and_damaged_ones(tmp_path, make):
    contents = [make.cifar(3, seed=1), make.cifar(2, seed=2)]
    paths = (tmp_path / "a.bin", tmp_path / "b.bin")
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    source, labels = read_cifar(paths, classes=10)
    records = np.frombuffer(b"".join(contents), np.uint8).reshape(5, 3073)
    np.testing.assert_array_equal(labels, records[:, 0])
    np.testing.assert_array_equal(source.read(np.array([4, 0, 3])), records[[4, 0, 3], 1:].reshape(3, 3, 32, 32))
    paths[0].write_bytes(make.cifar(40, classes=100))
    assert read_cifar(paths[:1], classes=100)[1].tolist() == list(range(40))  # the fine labels
    content = make.cifar(3)
    for damaged in (content[:-1], content[:3073] + b"\x0a" + content[3074:]):  # a class that there is not
        paths[1].write_bytes(damaged)
        with pytest.raises(InputError, match=r"b\.bin"):
            read_cifar(paths[1:], classes=10)


def test_svhn_is_transposed_and_ten_is_zero_and_unverified_files_are_not_opened(tmp_path, make, monkeypatch):
    x = make.mat(tmp_path / "test.mat")
    images, labels = read_mat(tmp_path / "test.mat", make.md5((tmp_path / "test.mat").read_bytes()), limit=11)
    assert (images.shape, images.dtype) == ((11, 3, 32, 32), np.uint8)
    np.testing.assert_array_equal(images[7, 2], x[:, :, 2, 7])
    assert labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    monkeypatch.setattr("scipy.io.loadmat", lambda *_, **__: pytest.fail("an unverified file was read"))
    for checksum in (None, f"md5:{'0' * 32}"):
        with pytest.raises(InputError, match=r"test\.mat"):
            read_mat(tmp_path / "test.mat", checksum)


def test_damaged_idx_files_are_refused(tmp_path, make):
    images = np.arange(2 * 4 * 5, dtype=np.uint8).reshape(2, 4, 5)
    content = make.idx(images)
    (tmp_path / "x").write_bytes(content)
    np.testing.assert_array_equal(read_idx(tmp_path / "x", dims=3), images)
    bad = [b"", content[:3] + b"\x01" + content[4:], content[:-1], content[:4] + bytes(12)]
    bad += [content[:4] + b"\xff" * 12 + content[16:], gzip.compress(content)[:-12]]
    for i, changed in enumerate(bad):
        path = tmp_path / ("x.gz" if i == 5 else "x")
        path.write_bytes(changed)
        with pytest.raises(InputError, match=path.name):
            read_idx(path, dims=3)
