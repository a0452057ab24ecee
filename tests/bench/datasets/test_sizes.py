"""Images at other sizes than 32 x 32, and classes from sub-folders."""

import numpy as np
import pytest
from PIL import Image

from igeood.bench.datasets import DATASETS, load
from igeood.errors import InputError


@pytest.fixture
def folder(tmp_path):
    for place in ("b/deep", "a", "c"):
        (tmp_path / place).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("b/deep/2.png", "a/1.png", "a/3.png", "c/0.png"):
        Image.fromarray(rng.integers(0, 256, (60, 60, 3), dtype=np.uint8)).save(tmp_path / name)
    return tmp_path


def test_files_are_resized_once_from_the_original(folder):
    found = load(f"folder:{folder}", side=60)
    assert found.images().shape == (4, 3, 60, 60)
    pixels = np.asarray(Image.open(folder / "a/1.png")).transpose(2, 0, 1)
    assert np.array_equal(found.images()[0], pixels)
    assert next(iter(found[1:].batches(2))).shape == (2, 3, 60, 60)
    assert len({load(f"folder:{folder}", side=side).digest() for side in (32, 60, 61)}) == 3
    assert load(f"folder:{folder}").digest() == load(f"folder:{folder}", side=32).digest()


@pytest.mark.parametrize("name", DATASETS)
def test_every_set_comes_in_any_size(root, name):
    small = load(name, root=root, limit=2)
    large = load(name, root=root, limit=2, side=48)
    assert small.images().shape == (len(small), 3, 32, 32)
    assert large.images().shape == (len(small), 3, 48, 48)
    assert large.images().std() > 0


def test_sub_folders_are_classes_by_name(folder):
    found = load(f"folder:{folder}", labelled=True)
    assert found.labels.tolist() == [0, 0, 1, 2]
    assert found.classes == 3
    assert [path.name for path in found.source.paths] == ["1.png", "3.png", "2.png", "0.png"]
    assert load(f"folder:{folder}").labels is None


def test_folders_that_are_no_classes(folder):
    (folder / ".cache").mkdir()
    assert load(f"folder:{folder}", labelled=True).classes == 3
    (folder / "empty").mkdir()
    with pytest.raises(InputError, match="empty: no image files in it"):
        load(f"folder:{folder}", labelled=True)
    with pytest.raises(InputError, match=r"1\.png: lies beside the classes"):
        load(f"folder:{folder}/a", labelled=True)
    with pytest.raises(InputError, match="at least two; found 1"):
        load(f"folder:{folder}/b", labelled=True)


@pytest.mark.parametrize("side", [0, -1, 5000, 32.0, True, "32"])
def test_sizes_that_are_none(folder, side):
    with pytest.raises(InputError, match="side: must be 1 to 4096 pixels"):
        load(f"folder:{folder}", side=side)
