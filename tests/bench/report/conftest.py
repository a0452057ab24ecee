"""Folders of results, made here without any network: scores first, and the figures that follow from them."""

import json
from zlib import crc32

import numpy as np
import pytest
import torch

from igeood import black_box
from igeood.bench.guarded import Guarded, Judged, Picture
from igeood.bench.runs import Results
from igeood.bench.runs.plan import TUNED_ON
from igeood.files import write_record
from igeood.metrics import evaluate

DIGESTS, VALIDATION = {"train": "aa11", "test": "bb22"}, {"validation": "cc33"}
LOGITS = {"msp": 1.0, "odin": 1.4, "energy": 1.7, "igeood-logits": 1.5}  # how far OOD scores are
SPREAD = {**LOGITS, "mahalanobis": 2.5, "igeood": 3.0, "igeood+": 3.5}
SETTINGS = {"black-box": [*LOGITS], "grey-box": ["odin", "igeood-logits"], "white-box-validation": [*SPREAD][4:]}


class Maker:
    """Writes a folder of results, cell by cell."""

    def __init__(self, folder, *, network="resnet-10-16", weights="0123456789abcdef"):
        (folder / "scores").mkdir(parents=True, exist_ok=True)
        self.folder, self.weights = folder, weights
        self.identity = {"network": network, "weights": weights, "in_distribution": "cifar-10"}
        self.identity |= {"mean": [0.5] * 3, "std": [0.25] * 3, "data": DIGESTS}
        about = {"file": "net.safetensors", "classes": 10, "train_images": 500, "test_images": 200, "accuracy": 0.913}
        self._append("networks", {**self.identity, **about, "accuracy_fisher_rao": 0.907, "notes": []})

    def _append(self, name, record):
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def cell(self, setting, method, ood, *, tnr=None, validation="gaussian", n=200):
        """One cell: metrics of made scores, or a TNR that is given."""
        validation = TUNED_ON.get(setting, [validation])[0]
        draw = np.random.default_rng([len(setting), len(method), len(ood)])
        tensors = {"id": torch.from_numpy(draw.normal(0, 1, n))}
        tensors["ood"] = torch.from_numpy(draw.normal(SPREAD[method], 1, n))
        metrics = evaluate(tensors["id"], tensors["ood"])
        columns = self._extras(setting, tensors, draw)
        name = f"{self.weights}-{setting}-{method}-{crc32((ood + validation).encode()):x}.safetensors"
        write_record(self.folder / "scores" / name, {"kind": "scores", "columns": columns}, tensors)
        place = {"setting": setting, "method": method, "validation": validation, "ood": ood, "seed": 0, "schema": 2}
        digests = {**DIGESTS, "ood": f"{crc32(ood.encode()):x}"} | ({} if setting in TUNED_ON else VALIDATION)
        found = {"tnr": metrics.tnr_at_tpr if tnr is None else tnr, "auroc": metrics.auroc, "aupr": metrics.aupr}
        found |= {"id_images": n, "ood_images": n, "scores": name, "igeood": "0.2.0", "torch": "2.9"}
        more = {"limit": n} if setting == "grey-box" else {}
        self._append("results", {**self.identity, **place, **found, **more, "data": digests})
        return self

    def _extras(self, setting, tensors, draw):
        """Images of extreme scores, and the parts of all scores; returns the parts' names."""
        shares = {"output": 0.1, "block1": 0.2, "block2": 0.7} if setting.startswith("white") else {"output": 1.0}
        for side in ("id", "ood"):
            order = tensors[side].argsort(descending=True)
            for which, rows in (("most", order[:8]), ("least", order.flip(0)[:8])):
                tensors[f"{side}_{which}_rows"] = rows.clone()
                tensors[f"{side}_{which}"] = torch.from_numpy(draw.integers(0, 256, (8, 3, 32, 32), dtype=np.uint8))
            tensors[f"{side}_parts"] = (tensors[side][:, None] * torch.tensor([*shares.values()])).float()
        return list(shares)

    def tuning(self, setting, method):
        trials = [{"temperature": float(t), "tnr": 0.5 + 0.1 * i} for i, t in enumerate((1, 10, 100))]
        steps = [{"epsilon": 0.001 * i, "tnr": 0.6 - 0.1 * i} for i in range(3)]
        place = {"setting": setting, "method": method, "validation": "gaussian", "data": {**DIGESTS, **VALIDATION}}
        chosen = {"temperature": 100.0, "epsilon": 0.0, "tuning": {"trials": trials, "steps": steps}}
        self._append("tunings", {**self.identity, **place, **chosen} | ({"limit": 200} if setting[0] == "g" else {}))

    def everything(self):
        """Every setting and method of this module on two OOD sets, tuned."""
        for setting, methods in SETTINGS.items():
            for method in methods:
                for ood in ("svhn", "chars74k"):
                    self.cell(setting, method, ood)
                if setting != "white-box-validation" and method != "msp":
                    self.tuning(setting, method)
        return self

    @property
    def results(self):
        return Results.existing(self.folder)


@pytest.fixture
def maker(tmp_path):
    """An empty folder of results, to be filled."""
    return Maker(tmp_path / "results")


def judged(guard, name, logits, *, is_known, reason="unlike any training image"):
    """A set under a guard, with up to four pictures of what should happen and two of what should not."""
    verdict, pictures = guard.predict(logits), []
    for refused in (True, False):
        for row in np.flatnonzero(verdict.is_ood == refused)[: 2 if refused == is_known else 4]:
            seen = (verdict.label, np.full(len(logits), 0.9), verdict.score, verdict.p_value, verdict.is_ood)
            pictures.append(Picture(int(row), *(values[row].item() for values in seen), reason))
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
def full(guard, tmp_path_factory):
    """Results with everything that a report can show, and a guard with what it judged, as in the demonstration."""
    folder = tmp_path_factory.mktemp("report") / "results"
    made = Maker(folder).everything()
    guard.save(folder / "guard.safetensors")
    sets = [judged(guard, "Digits 0–7", make_logits(200, 9.0, 1), is_known=True)]
    for seed, name in enumerate(("Digits 8, 9", "Capital letters", "Photographs", "Gaussian noise")):
        sets.append(judged(guard, name, make_logits(150, 3.5, 2 + seed), is_known=False))
    Guarded(guard.promise, guard.threshold, 0.987, sets).save(folder)
    return made.results


@pytest.fixture(scope="session")
def verdicts(guard, tmp_path_factory):
    """A file of verdicts whose inputs change after 600; its rows have names."""
    verdict = guard.predict(np.concatenate([make_logits(600, 9.0, 7), make_logits(100, 2.0, 8)]))
    lines = [f"camera-{row},{score!r}\n" for row, score in enumerate(verdict.score.tolist())]
    path = tmp_path_factory.mktemp("verdicts") / "verdicts.csv"
    path.write_text("".join(["id,score\n", *lines]))
    return str(path)
