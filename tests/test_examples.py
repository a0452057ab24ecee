"""Every example runs as it stands, offline, and prints what its README says it does."""

import re
import runpy
from pathlib import Path

import pytest

from igeood.model.reader import random_state_kept

FOLDER = Path(__file__).parent.parent / "examples"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted(FOLDER.glob("*.py"))
NEEDS = {"hugging_face_text": "transformers", "image_folder": "PIL"}
KEY = {  # a line that each must print: what it shows has happened
    "hugging_face_text": r"white box: \d\.\d% of known topics refused, (100|[89]\d)\.\d% of the foreign one",
    "image_folder": r"  foreign/[89]/\d+\.png p=0\.0\d+, taken for a [0-7]; sample \d+: score .* = ",
    "sklearn_logits": r"  digits 8, 9 +[6-9]\d\.\d% refused",
    "torchvision_like": r"loaded guard agrees: True",
}


def shape(text):
    """Lines without their numbers, and without what depends on numbers: signs, and which layer comes first."""
    return [re.sub(r"\d[\d.]*", "#", line.split(": score")[0]) for line in text.splitlines()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch, capsys):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with random_state_kept():
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr()
    assert [line for line in printed.err.splitlines() if not line.startswith("calibrate: left out")] == []
    assert re.search(f"^{KEY[path.stem]}", printed.out, re.M), printed.out
    shown = re.search(rf"`{path.name}`.*?```text\n(.*?)```", README, re.S)
    assert shape(printed.out) == shape(shown[1]), printed.out
    assert list(tmp_path.iterdir()) == []


def test_each_is_listed():
    assert {path.stem for path in EXAMPLES} == set(KEY)
