"""Benchmarks can be run: `make bench` has every script of its list, and the page has them all."""

import importlib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import igeood
from igeood.model.batch import as_batch
from igeood.model.reader import reader_for

ROOT = Path(__file__).parent.parent


def load(name):
    """What a file of benchmarks/ defines."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py")))


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_a_script_can_be_imported(path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    runpy.run_path(str(path))


def test_all_scripts_are_run_and_shown(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    listed = re.search(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert sorted(listed) == sorted(load("page").SCRIPTS)
    shown = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for name in listed:
        source = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
        title = re.search(r'main\("(.*?)", cases\)', source)[1]
        assert f"## {title}\n" in shown


def test_the_house_is_measured_as_it_is_written():
    size = load("size")
    text = '"""Module."""\n\na, b, c = 1, 2, 3  # packed\nd, e = 1, 2\n\n\ndef f():\n    """Doc."""\n    return d\n'
    assert size.code_lines(text) == 4
    assert len(size.packed_assignments(text)) == 1
    assert size.unformatted("x = (1,\n2)  # fmt: " + "skip\n") == [2]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def test_kept_outputs_are_compared_as_the_network_itself(benchmark, tmp_path):
    subjects = benchmark("subjects")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x, labels = torch.randn(700, 6), np.arange(700) % 3
    images, test = x[:500].numpy(), {"test_images": x[500:].numpy(), "test_labels": labels[500:]}
    task = SimpleNamespace(classes=3, images=images, labels=labels[:500], **test)
    sets = {"shifted": images[:100] + 1, "large": 5 * images[:100]}
    near, far = ({name: sets[name]} for name in sets)
    subjects.observe(subjects.Subject(model, task, near, far, torch.from_numpy)).save(tmp_path / "kept.safetensors")
    kept = subjects.Observed.load(tmp_path / "kept.safetensors")
    assert kept.accuracy == pytest.approx((model(x[500:]).argmax(dim=1).numpy() == labels[500:]).mean())
    methods = ["mahalanobis", "vim", "energy", "knn"]
    replayed = benchmark("comparison").compared(kept, methods)
    train, ood = (x[:500], torch.from_numpy(labels[:500])), {name: torch.from_numpy(sets[name]) for name in sets}
    direct = igeood.compare(model, train, x[500:], ood, methods=methods)
    for method in methods:
        assert replayed.tnr[method] == pytest.approx(direct.tnr[method], abs=0.02)
        assert replayed.auroc[method] == pytest.approx(direct.auroc[method], abs=0.01)


def test_the_page_fills_in_every_figure(benchmark):
    rates = {"evidence": (0.5, 1.0), "evidence (logits)": (0.2, 0.3), "gen": (0.3, 0.1), "mahalanobis": (0.9, 0.4)}
    methods = {}
    for name, (near, far) in rates.items():
        figures = {"": (near + far) / 2, " a": near, " b": far}
        both = {f"{metric}{ood}": rate for metric in ("tnr", "auroc") for ood, rate in figures.items()}
        methods[name] = {**both, "microseconds": 1.0}
    counts = dict.fromkeys(("train", "held out", "a", "b"), 10)
    about = {"classes": 3, "accuracy": 0.9, "forward": 10.0, "left_out": {}, "counts": counts}
    result = {"methods": methods, "near": ["a"], "far": ["b"], "real": True, **about}
    pages = benchmark("comparison_page")
    results = {pages.WHOLE: {**result, "few rows": {"vim": {"1": None, "5": 0.25}}}, pages.FAULTS: result}
    text = pages.page((ROOT / "benchmarks" / "comparison.md").read_text(encoding="utf-8"), results)
    assert "<!--" not in text
    assert "| `vim` | – | 25.0 |" in text
    assert "| `mahalanobis` | 65.0 / 65.0 | 90.0 / 90.0 | 40.0 / 40.0 | 65.0 / 65.0 |" in text
    assert '"net","b",far,10,mahalanobis,0.4000,0.4000,1.0' in pages.every_figure({"net": result}).splitlines()
    every = pages.Figures({"net": result})
    assert np.mean(list(every.ranks().values())) == (len(rates) + 1) / 2
    assert every.best_other("evidence", every.groups["near sets"]) == "mahalanobis"
    assert set(pages.Figures({"net": result}, pages.reads_logits_alone).methods) == {"evidence (logits)", "gen"}


SIZES = (0.01, 0.1, 0.3)
smallest_size = load("robustness/adversary").smallest_size  # scores are no defence against somebody who knows them


@pytest.mark.parametrize("method", ["msp", "energy", "igeood-logits", "igeood"])
@pytest.mark.parametrize("raising", [False, True])
def test_verdicts_turn_as_the_attack_grows(model, data, method, raising):
    """Refused inputs are walked under the threshold, and kept ones pushed over it."""
    make = igeood.white_box if method == "igeood" else igeood.black_box
    guard = make(model, method=method).fit(data.train).calibrate(data.held_out)
    dark = 0.5 * torch.rand(100, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    reader = reader_for(model, as_batch(dark), guard.detector.needs)
    x = data.test[:100] if raising else dark
    score = lambda z: guard.detector.score(reader(as_batch(z)))  # noqa: E731
    sizes = smallest_size(score, x, guard.threshold, SIZES, raising=raising)
    left = [float((sizes > size).double().mean()) for size in (0.0, *SIZES)]
    assert left[0] == float((guard.predict(x).is_ood != raising).double().mean())
    assert left == sorted(left, reverse=True)
    assert left[0] > 0.5 > left[-1]  # three tenths of the range turn most of what none turns


def test_sizes_are_in_pixel_units_whatever_the_normalisation():
    std, mean = torch.tensor([0.2, 0.5]), torch.tensor([0.4, 0.1])
    pixels = torch.tensor([[0.5, 0.5]])
    ends = {"std": std, "low": (0 - mean) / std, "high": (1 - mean) / std}
    score = lambda z: (z * std + mean).sum(dim=1)  # noqa: E731 (1 in pixels; needs a step of 0.06 in both)
    found = smallest_size(score, (pixels - mean) / std, 0.88, (0.05, 0.07), **ends)
    assert found.tolist() == pytest.approx([0.07])
