"""Kept inputs and what to do with them: tests compare the results with the frozen ones, `freeze.py` has written those.

Only public names are used, so that every later version can run the cases.
"""

import importlib
import json
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import nn

import igeood

FROZEN = Path(__file__).parent
SETS = {"six": 6, "two": 2, "forty": 40, "real": 10}  # number of classes
WIDTHS = {"early": 7, "middle": 12, "late": 20}  # of the made-up layers
LAYERS = (*WIDTHS, "conv1", "trans1", "trans2", "relu")
ROWS = 60  # of each side, that are scored
OPTIONS = ("temperature", "k", "relative", "dimension", "columns")
COLUMNS = ("is_ood", "score", "p_value", "label")
BINARY = {"BOOL": "?", "FP64": "<f8", "INT64": "<i8"}
LENGTH = "inference-header-content-length"


def laboratory():
    """Import the laboratory's methods, which register themselves; in 0.2 the core has them."""
    with suppress(ModuleNotFoundError):
        importlib.import_module("igeood.bench.methods")


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
    kept = load_file(FROZEN / "real_outputs.safetensors")
    return {
        side: {key.split("/", 1)[1]: value for key, value in kept.items() if key.startswith(f"{side}/")}
        for side in ("train", "id", "ood")
    }


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
    """Noisy prototypes of four classes by side, as `(x, y)`; OOD images are half another prototype, upside down.

    Each class and each image has a colour of its own: features that are nearly parallel are neighbours in an order that
    depends on the processor, for `knn` ranks them in float32.
    """
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
    access = "white_box" if igeood.METHODS[case["method"]].needs_layers else case["access"]
    return getattr(igeood, access)(model_of(case), method=case["method"], **case["options"])


def plain(values):
    """A contiguous NumPy array: of a strided one safetensors would write other values."""
    return np.ascontiguousarray(torch.as_tensor(values).numpy())


def scores(case):
    """Scores of the first in-distribution and OOD rows of a set, or of images if the set is "images"."""
    laboratory()
    if case["set"] == "images":
        guard = unfitted(case).fit([images()["train"]])
        return {side: plain(guard.score(images()[name][0])) for side, name in (("id", "test"), ("ood", "ood"))}
    sides = outputs(case["set"])
    detector = igeood.detector(case["method"], **case["options"]).fit(sides["train"])
    return {side: plain(detector.score(sides[side][:ROWS])) for side in ("id", "ood")}


def refusing(logits, features):
    """`Outputs` that may have bad rows."""
    try:
        return igeood.Outputs(logits, features, on_error="refuse")
    except TypeError:  # as 0.2 has it
        return igeood.Outputs(logits, features, refused={})


def as_probabilities(logits):
    powers = np.exp(logits)
    return powers / powers.sum(axis=1, keepdims=True)


def guard_of(case):
    """A guard that is fitted, tuned if the case says so, and calibrated: after tuning, on the same samples."""
    laboratory()
    guard = unfitted(case)
    if case["set"] == "images":
        sides = {side: [batch] for side, batch in images().items()}
    else:
        sides = outputs(case["set"], identified="tune" in case)
        if "probabilities" in case["options"]:
            kept = arrays(case["set"])
            sides = {side: igeood.Outputs(as_probabilities(kept[side]["logits"])) for side in ("id", "ood")}
            sides["train"] = igeood.Outputs(as_probabilities(kept["train"]["logits"]), labels=kept["train"]["labels"])
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
    return refusing(logits, features) if case["access"] == "white_box" else logits


def record(case, guard):
    """What a guard is, and what it says of rows, as plain values; an infinite score is None."""
    verdict = guard.predict(rows_of(case), on_error="refuse")
    calibration = guard.calibration
    columns = {name: np.asarray(getattr(verdict, name)).tolist() for name in COLUMNS}
    columns["score"] = [value if np.isfinite(value) else None for value in columns["score"]]
    reason = [None] * len(verdict) if verdict.reason is None else verdict.reason
    options = [name for name in OPTIONS if hasattr(guard.detector, name)]
    ending = guard.detector.needs.ending
    return {
        **columns,
        "is_read": [why is None for why in reason],
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
    """The guard that the service is asked about, its model, and an input's name with some rows."""
    if name == "logits":
        sides, values = outputs("six"), arrays("six")
        guard = igeood.black_box(method="igeood-logits").fit(sides["train"], classes=list("abcdef"))
        rows = np.concatenate([values["id"]["logits"][200:206], values["ood"]["logits"][:6]])
        return guard.calibrate(sides["id"][:200]), None, "logits", rows
    sides, net = images(torch.float32), network(dtype=torch.float32)
    guard = igeood.white_box(net, method="igeood").fit([sides["train"]]).calibrate([sides["id"]])
    return guard, net, "x", torch.cat([sides["test"][0][:4], sides["ood"][0][:4]]).numpy()


def requests(name, rows):
    """Kept requests by name: method, address, body and headers."""
    good = np.round(rows.astype(np.float64), 4).tolist()
    flawed = json.loads(json.dumps(good))
    flawed[1] = np.full(rows.shape[1:], None).tolist()
    infer = "/v2/models/guard/infer"
    tensor = {"name": name, "shape": list(rows.shape), "datatype": "FP32"}
    data = rows.astype(np.float32)
    written = {**tensor, "data": np.round(data.astype(np.float64), 4).ravel().tolist()}
    with_null = {**tensor, "data": np.array(flawed, dtype=object).ravel().tolist()}
    binary = {**tensor, "parameters": {"binary_data_size": data.nbytes}}
    wanted = [{"name": "p_value"}, {"name": "is_ood"}]
    head = json.dumps({"inputs": [binary], "parameters": {"binary_data_output": True}, "outputs": wanted}).encode()
    bodies = {
        "rows": ("/predict", good),
        "one row": ("/predict", {name: good[:1]}),
        "bad row": ("/predict", {name: flawed}),
        "bad row refused": ("/predict", {name: flawed, "on_error": "refuse"}),
        "uneven rows": ("/predict", [*good, good[0][:-1]]),
        "text": ("/predict", "rows"),
        "infer": (infer, {"id": "7", "inputs": [written]}),
        "infer outputs": (infer, {"inputs": [written], "outputs": wanted}),
        "infer version": ("/v2/models/guard/versions/1/infer", {"inputs": [written]}),
        "infer bad row": (infer, {"inputs": [with_null]}),
        "infer refused": (infer, {"inputs": [with_null], "parameters": {"on_error": "refuse"}}),
        "infer other model": ("/v2/models/other/infer", {"inputs": [written]}),
        "infer other input": (infer, {"inputs": [{**written, "name": "other"}]}),
        "infer other shape": (infer, {"inputs": [{**written, "shape": [len(rows), 1]}]}),
        "infer other output": (infer, {"inputs": [written], "outputs": [{"name": "other"}]}),
    }
    asked = {key: ("POST", path, json.dumps(body).encode(), {}) for key, (path, body) in bodies.items()}
    asked["no json"] = "POST", "/predict", b"{", {}
    asked["other type"] = "POST", "/predict", b"1,2", {"content_type": "text/csv"}
    asked["infer binary"] = "POST", infer, head + data.tobytes(), {LENGTH.replace("-", "_"): str(len(head))}
    asked["infer short"] = "POST", infer, head + data.tobytes()[:-1], {LENGTH.replace("-", "_"): str(len(head))}
    gets = ("health/live", "health/ready", "models/guard", "models/guard/ready", "models/guard/versions/2", "nowhere")
    for path in ("/v2", *(f"/v2/{path}" for path in gets)):
        asked[path] = "GET", path, None, {}
    return asked


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
                assert abs(one - value) <= tolerance * largest, f"{place}/{row}: {one} {value}"
            else:
                assert_same(one, value, tolerance, f"{place}/{row}")
    elif isinstance(expected, float):
        assert abs(found - expected) <= tolerance * abs(expected), f"{place}: {found} {expected}"
    else:
        assert found == expected, place
