from pathlib import Path

from igeood.bench.datasets import DATASETS, data_root

PAPER = {"cifar-10": 10_000, "cifar-100": 10_000, "svhn": 10_000, "tiny-imagenet": 10_000, "lsun": 10_000}
PAPER |= {"isun": 8_925, "textures": 5_640, "chars74k": 7_705, "places365": 36_500, "gaussian": 10_000}


def test_the_table_has_the_papers_sets_and_counts():
    assert {name: DATASETS[name].counts["test"] for name in PAPER} == PAPER


def test_root_is_the_argument_then_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("IGEOOD_DATA", str(tmp_path / "env"))
    assert (data_root("given"), data_root("~"), data_root()) == (Path("given"), Path.home(), tmp_path / "env")
