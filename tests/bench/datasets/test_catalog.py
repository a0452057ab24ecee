from pathlib import Path

import pytest

from igeood.bench.datasets import DATASETS, data_root

NAMES = ["cifar-10", "cifar-100", "svhn", "tiny-imagenet", "lsun", "isun"]
NAMES += ["textures", "chars74k", "places365", "gaussian"]


def test_the_table_has_the_papers_sets_under_their_names():
    assert list(DATASETS) == NAMES
    assert all(dataset.name == name for name, dataset in DATASETS.items())


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_complete(name):
    dataset = DATASETS[name]
    assert "test" in dataset.counts
    assert dataset.title
    assert dataset.licence
    assert (dataset.mean is None) == (dataset.std is None) == (dataset.classes is None)
    if dataset.kind != "noise":
        assert set(dataset.layouts) == set(dataset.counts)
        assert dataset.downloads
        assert dataset.home.startswith("http")
    for download in dataset.downloads:
        assert download.url.startswith(("http://", "https://"))
        assert "?" not in download.file
        assert (download.checksum is None) == (download.published == "not published")
        if download.checksum:
            algorithm, _, digest = download.checksum.partition(":")
            assert len(digest) == {"md5": 32, "sha256": 64}[algorithm]


def test_the_papers_counts():
    counts = {name: DATASETS[name].counts["test"] for name in NAMES}
    assert (counts["isun"], counts["textures"], counts["chars74k"], counts["places365"]) == (8925, 5640, 7705, 36500)
    assert all(
        counts[name] == 10_000 for name in ("cifar-10", "cifar-100", "svhn", "tiny-imagenet", "lsun", "gaussian")
    )


def test_root_is_the_argument_then_the_environment_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("IGEOOD_DATA", str(tmp_path / "env"))
    assert data_root("given") == Path("given")
    assert data_root() == tmp_path / "env"
    monkeypatch.delenv("IGEOOD_DATA")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert data_root() == tmp_path / "xdg" / "igeood"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert data_root() == tmp_path / ".cache" / "igeood"
    monkeypatch.setattr("sys.platform", "darwin")
    assert data_root() == tmp_path / "Library" / "Caches" / "igeood"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert data_root() == tmp_path / "local" / "igeood"
