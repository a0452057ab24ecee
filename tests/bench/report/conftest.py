"""Results of the small world, with a guard of made logits and what it judged beside them."""

import shutil

import numpy as np
import pytest
import torch

from igeood import black_box
from igeood.bench.guarded import Guarded, Judged, Picture
from igeood.bench.runs import Results


def judged(guard, name, logits, *, is_known):
    """A set under a guard, with up to four pictures each of what is refused and what is kept."""
    verdict, pictures = guard.predict(logits), []
    for refused in (True, False):
        for row in np.flatnonzero(verdict.is_ood == refused)[:4]:
            seen = (verdict.label, np.full(len(logits), 0.9), verdict.score, verdict.p_value, verdict.is_ood)
            pictures.append(Picture(int(row), *(values[row].item() for values in seen), "unlike any training image"))
    images = np.random.default_rng(len(name)).integers(0, 256, (len(pictures), 3, 32, 32), dtype=np.uint8)
    scores = torch.from_numpy(verdict.score).double()
    return Judged(name, name, is_known, float(verdict.is_ood.mean()), scores, torch.from_numpy(images), pictures)


def make_logits(n, margin, seed):
    """Of a classifier with ten classes that is the surer the larger the margin."""
    draw = np.random.default_rng(seed)
    return draw.normal(size=(n, 10)) + draw.uniform(0.6, 1.0, (n, 1)) * margin * np.eye(10)[np.arange(n) % 10]


@pytest.fixture(scope="session")
def guard():
    """A calibrated guard of made logits."""
    logits = make_logits(1300, 9.0, 0)
    return black_box().fit(logits[:150], np.arange(150) % 10).calibrate(logits[150:])


@pytest.fixture(scope="session")
def full(whole, guard, tmp_path_factory):
    """Results with everything that a report can show, and a guard with what it judged, as in the demonstration."""
    folder = tmp_path_factory.mktemp("report") / "results"
    shutil.copytree(whole.folder, folder)
    guard.save(folder / "guard.safetensors")
    sets = [judged(guard, "Digits 0–7", make_logits(200, 9.0, 1), is_known=True)]
    for seed, name in enumerate(("Digits 8, 9", "Photographs")):
        sets.append(judged(guard, name, make_logits(150, 3.5, 2 + seed), is_known=False))
    Guarded(guard.promise, guard.threshold, 0.987, sets).save(folder)
    return Results.existing(folder)


@pytest.fixture(scope="session")
def verdicts(guard, tmp_path_factory):
    """A file of verdicts whose inputs change after 600; its rows have names."""
    verdict = guard.predict(np.concatenate([make_logits(600, 9.0, 7), make_logits(100, 2.0, 8)]))
    lines = [f"camera-{row},{score!r}\n" for row, score in enumerate(verdict.score.tolist())]
    path = tmp_path_factory.mktemp("verdicts") / "verdicts.csv"
    path.write_text("".join(["id,score\n", *lines]))
    return str(path)
