"""Kept inputs and what to do with them: tests compare the results with the frozen ones."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import igeood
import igeood.bench.methods

FROZEN = Path(__file__).parent
SETS = {"six": 6, "two": 2, "forty": 40, "real": 10}  # number of classes
WIDTHS = {"early": 7, "middle": 12, "late": 20}  # of the made-up layers
LAYERS = (*WIDTHS, "conv1", "trans1", "trans2", "relu")
ROWS = 60  # of each side, that are scored
OPTIONS = ("temperature", "k", "relative", "dimension", "columns")
COLUMNS = ("is_ood", "score", "p_value", "label")
BINARY = {"BOOL": "?", "FP64": "<f8", "INT64": "<i8"}
LENGTH = "inference-header-content-length"


def made_up(n_classes):
    """Arrays of training, in-distribution and OOD rows: elementwise arithmetic on draws, the same bits everywhere."""
    rng = np.random.default_rng(n_classes)
    means = {layer: rng.standard_normal((n_classes, width)) for layer, width in WIDTHS.items()}

    def draw(n):  # forty classes are imbalanced: low numbers are frequent
        return rng.integers(n_classes, size=(2, n)).min(axis=0) if n_classes == 40 else rng.integers(n_classes, size=n)

    def rows(labels, confidence, pull, shift):
        logits = 1.5 * rng.standard_normal((len(labels), n_classes))
        logits[np.arange(len(labels)), labels] += confidence
        noise = {layer: rng.standard_normal((len(labels), width)) for layer, width in WIDTHS.items()}
        return {"logits": logits} | {f"feature.{k}": pull * means[k][labels] + shift + noise[k] for k in WIDTHS}

    train_labels = np.concatenate([np.tile(np.arange(n_classes), 5), draw(900 - 5 * n_classes)])
    train = rows(train_labels, 6.0, 1.0, 0.0) | {"labels": train_labels}
    return {"train": train, "id": rows(draw(300), 5.0, 1.0, 0.0), "ood": rows(draw(400), 2.0, 0.6, 0.5)}


@cache
def arrays(name):
    if name != "real":
        return made_up(SETS[name])
    sides = {"train": {}, "id": {}, "ood": {}, "scores": {}}
    for key, value in load_file(FROZEN / "real_outputs.safetensors").items():
        side, _, column = key.partition("/")
        sides[side][column] = value
    del sides["scores"]
    return sides


@cache
def outputs(name, *, identified=False):
    """`Outputs` by side, with ids or not; "six head" has an input of the head too, in which the logits are linear."""
    name, _, head = name.partition(" ")
    sides = {}
    for side, values in arrays(name).items():
        logits = values["logits"]
        features = {layer: values[f"feature.{layer}"] for layer in LAYERS if f"feature.{layer}" in values}
        if head:
            features["|head"] = np.concatenate([logits.clip(min=0), -logits.clip(max=0)], axis=1)
        ids = [f"{side} {row}" for row in range(len(logits))] if identified else None
        sides[side] = igeood.Outputs(logits, features, values.get("labels"), ids=ids)
    return sides


class Net(nn.Module):
    """A small network of images, never trained: its weights are in `network.safetensors`, in float64."""

    def __init__(self, returns_h=False):
        super().__init__()
        widths = [3, 6, 8, 12]
        for i, (before, after) in enumerate(pairwise(widths), 1):
            self.add_module(f"conv{i}", nn.Conv2d(before, after, 3, padding=1))
            self.add_module(f"norm{i}", nn.BatchNorm2d(after))
            self.add_module(f"relu{i}", nn.ReLU())
        self.head = nn.Linear(widths[-1], 4)
        self.h = nn.Tanh()
        self.returns_h = returns_h

    def features(self, x):
        for i in (1, 2, 3):
            x = getattr(self, f"relu{i}")(getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(x)))
        return x.mean(dim=(2, 3))

    def forward(self, x):
        logits = self.head(self.features(x))
        return {"logits": logits, "h": self.h(logits / 10)} if self.returns_h else logits


@cache
def network(returns_h=False, dtype=torch.float64):
    net = Net(returns_h).double()
    net.load_state_dict({name: torch.from_numpy(w) for name, w in load_file(FROZEN / "network.safetensors").items()})
    return net.to(dtype).eval()


@cache
def images(dtype=torch.float64):
    """Noisy prototypes of four classes by side, as `(x, y)`; OOD images are half another prototype, upside down."""
    rng = np.random.default_rng(4)
    prototypes = rng.random((4, 3, 6, 6)) + rng.standard_normal((4, 3, 1, 1))
    sides = {}
    for side, n in {"train": 240, "id": 120, "test": 30, "ood": 60}.items():
        labels = rng.integers(4, size=n)
        x = prototypes[labels]
        if side == "ood":
            x = 0.5 * x + 0.5 * prototypes[rng.integers(4, size=n)][:, :, ::-1]
        x = x + 0.15 * rng.standard_normal(x.shape) + 0.4 * rng.standard_normal((n, 3, 1, 1))
        sides[side] = torch.from_numpy(x).to(dtype), torch.from_numpy(labels)
    return sides


def model_of(case):
    """The model of a case's guard, if it has one."""
    return network(case["method"] == "deconf-c") if case["set"] == "images" else None


def unfitted(case):
    """A guard by its access, method and options. DeConf-C reads a layer since 0.3."""
    access = "white_box" if case["method"] == "deconf-c" else case["access"]
    return getattr(igeood, access)(model_of(case), method=case["method"], **case["options"])


def scores(case):
    """Scores of the first in-distribution and OOD rows of a set, or of images if the set is "images"."""
    if case["set"] == "images":
        guard = unfitted(case).fit([images()["train"]])
        return {side: np.asarray(guard.score(images()[name][0])) for side, name in (("id", "test"), ("ood", "ood"))}
    sides = outputs(case["set"])
    detector = igeood.detector(case["method"], **case["options"]).fit(sides["train"])
    return {side: np.asarray(detector.score(sides[side][:ROWS])) for side in ("id", "ood")}


def as_probabilities(logits):
    powers = np.exp(logits)
    return powers / powers.sum(axis=1, keepdims=True)


def guard_of(case):
    """A guard that is fitted, tuned if the case says so, and calibrated: after tuning, on the same samples."""
    guard = unfitted(case)
    if case["set"] == "images":
        sides = {side: [batch] for side, batch in images().items()}
    else:
        sides = outputs(case["set"], identified="tune" in case)
        if "probabilities" in case["options"]:
            kept = arrays(case["set"]).items()
            sides = {k: igeood.Outputs(as_probabilities(v["logits"]), labels=v.get("labels")) for k, v in kept}
    guard.fit(sides["train"], classes=case.get("classes"))
    if "tune" in case:
        guard.tune(sides["id"], ood=sides["ood"], **case["tune"])
    elif case["set"] != "images":
        sides = {**sides, "id": sides["id"][:200]}  # others are judged
    return guard.calibrate(sides["id"], **case["calibrate"])


def rows_of(case):
    """Rows to judge, of which some are bad."""
    if case["set"] == "images":
        rows = torch.cat([images()["test"][0], images()["ood"][0][:20]])
        rows[3, 0, 2, 2] = torch.nan
        rows[33] = torch.inf
        return rows
    kept = arrays(case["set"])
    rows = {key: np.concatenate([kept["id"][key][200:230], kept["ood"][key][:30]]) for key in kept["id"]}
    logits = rows.pop("logits")
    if "probabilities" in case["options"]:
        logits = as_probabilities(logits)
        logits[9] *= 2.0  # their sum is 2
    else:
        logits[7, 1:3] = -np.inf  # masked classes: a good row
        logits[8] = -np.inf
    logits[4, 2] = np.nan
    logits[40, 0] = np.inf
    rows["feature.late"][11, 3] = np.nan
    features = {key.removeprefix("feature."): value for key, value in rows.items()}
    return igeood.Outputs(logits, features, on_error="refuse") if case["access"] == "white_box" else logits


def record(case, guard):
    """What a guard is, and what it says of rows, as plain values; an infinite score is None."""
    verdict = guard.predict(rows_of(case), on_error="refuse")
    calibration = guard.calibration
    columns = {name: np.asarray(getattr(verdict, name)).tolist() for name in COLUMNS}
    columns["score"] = [value if np.isfinite(value) else None for value in columns["score"]]
    options = [name for name in OPTIONS if hasattr(guard.detector, name)]
    ending = guard.detector.needs.ending
    return {
        **columns,
        "is_read": np.asarray(verdict.is_read).tolist(),
        "is_method": type(guard.detector) is type(igeood.detector(case["method"])),
        "options": {name: getattr(guard.detector, name) for name in options},
        "layers": [layer.removesuffix(ending) for layer in guard.layers],
        "epsilon": guard.epsilon,
        "n_classes": guard.detector.n_classes_,
        "classes": guard.classes and list(guard.classes),
        "calibration": [len(calibration.scores), calibration.tpr, calibration.guarantee, calibration.confidence],
        "threshold": guard.threshold,
    }


def served_guard(name):
    """The guard that the service is asked about, and its model."""
    if name == "logits":
        sides = outputs("six")
        guard = igeood.black_box(method="igeood-logits").fit(sides["train"], classes=list("abcdef"))
        return guard.calibrate(sides["id"][:200]), None
    sides, net = images(torch.float32), network(dtype=torch.float32)
    return igeood.white_box(net, method="igeood").fit([sides["train"]]).calibrate([sides["id"]]), net


def requests(name):
    """Kept requests by name: method, address, body and headers."""
    kept = json.loads((FROZEN / "requests.json").read_text())[name].items()
    return {key: (*where, body and body.encode("latin-1"), headers) for key, (*where, body, headers) in kept}


def answer(client, method, path, body, headers):
    """Status and values of an answer: without sentences, of reasons whether there is one, binary tensors as lists."""
    json_type = {} if body is None else {"content_type": "application/json"}
    status, content = client.ask(method, path, body, **{**json_type, **headers})
    if isinstance(content, bytes):
        length = int(client.headers[LENGTH])
        content, tail = json.loads(content[:length]), content[length:]
        for tensor in content["outputs"]:
            size = tensor.pop("parameters")["binary_data_size"]
            tensor["data"], tail = np.frombuffer(tail[:size], BINARY[tensor["datatype"]]).tolist(), tail[size:]
    for verdict in content.get("verdicts", []):
        if "reason" in verdict:
            verdict["reason"] = verdict["reason"] is not None
    for tensor in content.get("outputs", []):
        if tensor["name"] == "reason" and "data" in tensor:
            tensor["data"] = [why is not None for why in tensor["data"]]
    return [status, {key: value for key, value in content.items() if key not in ("error", "version")}]


def assert_same(found, expected, tolerance, place=""):
    """Equal JSON, but for the tolerance of floats: relative to the largest of their list, else to themselves."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            assert_same(found[key], value, tolerance, f"{place}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        largest = max((abs(value) for value in expected if isinstance(value, float)), default=0.0)
        for row, (one, value) in enumerate(zip(found, expected, strict=True)):
            if isinstance(value, float):
                assert one == pytest.approx(value, rel=0, abs=tolerance * largest), f"{place}/{row}"
            else:
                assert_same(one, value, tolerance, f"{place}/{row}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=0), place
    else:
        assert found == expected, place
