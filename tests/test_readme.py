"""What the README shows is true: its Python runs as it stands."""

import re
from pathlib import Path

import igeood

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_in_order(reader_names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(block, reader_names)  # noqa: S102 (our own README)
    assert igeood.load("guard.safetensors", reader_names["model"]).calibration.tpr == 0.95
    assert igeood.load("logits-guard.safetensors").calibration.tpr == 0.95


def test_every_method_is_in_the_table():
    for name in igeood.METHODS:
        assert f"`{name}`" in README
