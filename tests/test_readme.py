"""What the README shows is true: its Python runs as it stands."""

import re
from pathlib import Path

import torch
from torch import nn

import igeood

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_in_order(classifier, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    images, labels = torch.rand(200, 3, 8, 8), torch.arange(200) % 4
    images += 0.3 * labels[:, None, None, None]
    names = {
        "model": nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        "train_loader": [(images[:100], labels[:100])],
        "held_out_loader": [(images[100:], labels[100:])],
        "ood_loader": [torch.rand(50, 3, 8, 8) * 3],
        "x": images[:3],
        "torch": torch,
        "train_logits": classifier.train.numpy(),
        "train_labels": classifier.labels.numpy(),
        "held_out_logits": classifier.held_out.numpy(),
        "test_logits": classifier.test.numpy(),
        "id_scores": torch.arange(30.0),
        "ood_scores": torch.arange(20.0, 40.0),
    }
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(block, names)  # noqa: S102 (our own README)
    assert igeood.load("guard.safetensors", names["model"]).calibration.tpr == 0.95
    assert igeood.load("logits-guard.safetensors").calibration.tpr == 0.95


def test_every_method_is_in_the_table():
    for name in igeood.METHODS:
        assert f"`{name}`" in README
