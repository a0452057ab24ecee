"""Folders of results, made here without any network: scores first, and the figures that follow from them."""

import json

import numpy as np
import pytest
import torch

from igeood import black_box
from igeood.bench.runs import Results
from igeood.files import write_record
from igeood.metrics import evaluate

WEIGHTS = "0123456789abcdef"
LAYERS = ["output", "block1", "block2"]
LOGITS = {"msp": 1.0, "odin": 1.4, "energy": 1.7, "igeood-logits": 1.5}  # how far OOD scores are
SPREAD = {**LOGITS, "mahalanobis": 2.5, "igeood": 3.0, "igeood+": 3.5}
SETTINGS = {"black-box": [*LOGITS], "grey-box": ["odin", "igeood-logits"], "white-box-validation": [*SPREAD][4:]}


class Maker:
    """Writes a folder of results, cell by cell."""

    def __init__(self, folder, *, network="resnet-10-16", weights=WEIGHTS, in_distribution="cifar-10"):
        folder.mkdir(exist_ok=True)
        (folder / "scores").mkdir(exist_ok=True)
        self.folder = folder
        self.identity = {
            "network": network, "weights": weights, "in_distribution": in_distribution,
            "mean": [0.5] * 3, "std": [0.25] * 3,
        }  # fmt: skip
        about = {"file": "net.safetensors", "classes": 10, "train_images": 500, "test_images": 200, "accuracy": 0.913}
        digests = {"train": "aa11", "test": "bb22"}
        line = {**self.identity, **about, "accuracy_fisher_rao": 0.907, "notes": [], "data": digests}
        self._append("networks", line)

    def _append(self, name, record):
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def cell(self, setting, method, ood, *, tnr=None, validation="gaussian", seed=0, n=200):
        """One cell: figures from made scores, or a TNR as it is told."""
        validation = {"white-box": "own", "white-box-fgsm": "fgsm"}.get(setting, validation)
        draw = np.random.default_rng([len(setting), len(method), len(ood), seed])
        tensors = {"id": torch.from_numpy(draw.normal(0, 1, n))}
        tensors["ood"] = torch.from_numpy(draw.normal(SPREAD.get(method, 2.0), 1, n))
        found = evaluate(tensors["id"], tensors["ood"])
        columns = self._extras(setting, tensors, draw)
        name = f"{self.identity['weights']}-{setting}-{method}-{hash_of(ood)}-{hash_of(validation)}-{seed}.safetensors"
        write_record(self.folder / "scores" / name, {"kind": "scores", "columns": columns}, tensors)
        digests = {"train": "aa11", "test": "bb22", "ood": f"{hash_of(ood):x}", "validation": "cc33"}
        if setting in ("white-box", "white-box-fgsm"):
            del digests["validation"]
        more = {"limit": n} if setting == "grey-box" else {}
        self._append(
            "results",
            {
                **self.identity, "setting": setting, "method": method, "validation": validation, "ood": ood,
                "seed": seed, "schema": 2, "data": digests, **more, "file": "net.safetensors", "id_images": n,
                "ood_images": n, "tnr": found.tnr_at_tpr if tnr is None else tnr, "auroc": found.auroc,
                "aupr": found.aupr, "temperature": 1.0, "epsilon": 0.0, "scores": name, "igeood": "0.1.0",
                "torch": "2.9",
            },
        )  # fmt: skip
        return self

    def _extras(self, setting, tensors, draw):
        for side in ("id", "ood"):
            order = tensors[side].argsort(descending=True)
            for which, rows in (("most", order[:8]), ("least", order.flip(0)[:8])):
                tensors[f"{side}_{which}_rows"] = rows.clone()
                images = draw.integers(0, 256, (len(rows), 3, 32, 32), dtype=np.uint8)
                tensors[f"{side}_{which}"] = torch.from_numpy(images)
            shares = torch.tensor([0.1, 0.2, 0.7] if setting.startswith("white-box") else [1.0])
            tensors[f"{side}_parts"] = (tensors[side][:, None] * shares).float()
        return LAYERS if setting.startswith("white-box") else ["output"]

    def tuning(self, setting, method, validation="gaussian"):
        trials = [{"temperature": float(t), "tnr": 0.5 + 0.1 * i} for i, t in enumerate((1, 10, 100))]
        steps = [{"epsilon": 0.001 * i, "tnr": 0.6 - 0.1 * i} for i in range(3)]
        digests = {"train": "aa11", "test": "bb22", "validation": "cc33"}
        more = {"limit": 200} if setting == "grey-box" else {}
        place = {"setting": setting, "method": method, "validation": validation, "ood": "", "seed": 0, "tpr": 0.95}
        chosen = {"temperature": 100.0, "epsilon": 0.0, "tuning": {"temperature": {"trials": trials}, "steps": steps}}
        self._append("tunings", {**self.identity, **place, "data": digests, **more, **chosen})
        return self

    def everything(self, sets=("svhn", "chars74k"), **options):
        """Every setting and method of this module on some OOD sets, tuned."""
        for setting, methods in SETTINGS.items():
            for method in methods:
                for ood in sets:
                    self.cell(setting, method, ood, **options)
                if method in ("odin", "energy", "igeood-logits"):
                    self.tuning(setting, method)
        return self

    @property
    def results(self):
        return Results.existing(self.folder)


def hash_of(text):
    return sum(31**i * ord(c) for i, c in enumerate(text)) % 2**32


@pytest.fixture
def maker(tmp_path):
    """An empty folder of results, to be filled."""
    return Maker(tmp_path / "results")


@pytest.fixture(scope="session")
def another():
    """To make further networks' results."""
    return Maker


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    """Results with everything that a report can show, a calibrated guard included."""
    folder = tmp_path_factory.mktemp("report") / "results"
    made = Maker(folder).everything()
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(300, 10)) + 6 * np.eye(10)[np.arange(300) % 10]
    guard = black_box().fit(logits[:150], np.arange(150) % 10).calibrate(logits[150:])
    guard.save(folder / "guard.safetensors")
    return made.results
