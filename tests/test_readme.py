"""What the README shows is true: its Python runs as it stands."""

import re
from pathlib import Path

import torch

import igeood

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_in_order(classifier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {
        "train_logits": classifier.train.numpy(),
        "train_labels": classifier.labels.numpy(),
        "held_out_logits": classifier.held_out.numpy(),
        "test_logits": classifier.test.numpy(),
        "id_scores": torch.arange(30.0),
        "ood_scores": torch.arange(20.0, 40.0),
        "logits": classifier.test,
        "centroids": torch.eye(10).log(),
    }
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, names)  # noqa: S102 (our own README)
    assert igeood.load("guard.safetensors").calibration.tpr == 0.95


def test_every_method_is_in_the_table():
    for name in igeood.METHODS:
        assert f"`{name}`" in README
