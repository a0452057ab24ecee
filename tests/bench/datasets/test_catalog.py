from pathlib import Path

from igeood.bench.datasets import DATASETS, data_root

PAPER = {"cifar-10": 10_000, "cifar-100": 10_000, "svhn": 10_000, "tiny-imagenet": 10_000, "lsun": 10_000}
PAPER |= {"isun": 8_925, "textures": 5_640, "chars74k": 7_705, "places365": 36_500, "gaussian": 10_000}


def test_the_table_is_complete_and_has_the_papers_sets_and_counts():
    assert {name: DATASETS[name].counts["test"] for name in PAPER} == PAPER
    for name, dataset in DATASETS.items():
        assert all([dataset.name == name, dataset.title, dataset.licence])
        assert (dataset.mean is None) == (dataset.std is None) == (dataset.classes is None)
        assert dataset.kind == "noise" or set(dataset.layouts) == set(dataset.counts)
        assert name == "isun" or all(download.checksum for download in dataset.downloads)  # nobody published iSUN's


def test_root_is_the_argument_then_the_environment_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("IGEOOD_DATA", str(tmp_path / "env"))
    assert (data_root("given"), data_root("~"), data_root()) == (Path("given"), Path.home(), tmp_path / "env")
    monkeypatch.delenv("IGEOOD_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root().name == "igeood"
