"""Writes the frozen numbers of version 0.2. It has run once, on that version: see README.md.

OMP_NUM_THREADS=1 PYTHONPATH=src python tests/frozen/freeze.py
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from frozen_cases import FROZEN, Net, answer, guard_of, images, record, requests, scores, served_guard
from safetensors.numpy import save_file

LOGITS = ("msp", "odin", "energy", "kl-sum", "kl-min", "igeood-logits", "igeood-logits-min", "entropy", "gen")
LOGITS += ("max-logit", "logits-product")
LAYERED = ("igeood", "igeood+", "knn", "nnguide", "she", "fisher-rao-product", "probe")
WHITENED = ("mahalanobis", "mahalanobis++", "relative-mahalanobis")  # `real` has fewer rows than channels
HEADED = ("ash", "scale", "react", "fdbd", "vim", "probe")
ARRAYS = [(name, method, {}) for method in LOGITS for name in ("forty", "real")]
ARRAYS += [(name, method, {}) for method in LAYERED for name in ("six", "real")]
ARRAYS += [(name, method, {}) for method in WHITENED for name in ("six", "two")]
ARRAYS += [(name, method, {}) for method in HEADED for name in ("six head", "two head")]
ARRAYS += [
    ("six", "energy", {"temperature": 2.0}),
    ("six", "odin", {"temperature": 10.0}),
    ("six", "entropy", {"temperature": 2.0}),
    ("six", "gen", {"gamma": 0.3, "largest": 3}),
    ("six", "kl-sum", {"temperature": 2.0}),
    ("six", "igeood-logits", {"temperature": 3.0, "centroid_temperature": 1.0}),
    ("two", "igeood-logits", {}),
    ("six", "logits-product", {"temperature": 2.0}),
    ("six", "igeood", {"temperature": 2.0}),
    ("six", "mahalanobis", {"relative": True}),
    ("six", "knn", {"k": 5}),
    ("six", "nnguide", {"k": 5}),
    ("six", "fisher-rao-product", {"bank": 0}),
    ("six", "fisher-rao-product", {"k": 3}),
    ("six", "residual-flow", {"epochs": 0}),  # what Adam makes of float32 depends on the processor
    ("two", "residual-flow", {"epochs": 0}),
    ("six head", "ash", {"percentile": 65.0}),
    ("six head", "scale", {"percentile": 65.0}),
    ("six head", "react", {"percentile": 80.0}),
    ("six head", "vim", {"dimension": 4}),
]
WHITE = ("igeood", "igeood+", "mahalanobis", "knn", "vim", "fisher-rao-product", "probe", "gram", "batch-norm", "ash")
WHITE += ("scale", "react", "fdbd", "nnguide", "she", "mahalanobis++", "relative-mahalanobis")
MODEL = [("white_box", method, {}) for method in WHITE]
MODEL += [("black_box", method, {}) for method in ("energy", "deconf-c")]
MODEL += [
    ("white_box", "igeood", {"layers": ["relu1", "relu3"], "epsilon": 0.002, "std": 0.5}),
    ("grey_box", "igeood-logits", {"epsilon": 0.0012}),
    ("grey_box", "odin", {"epsilon": 0.002, "std": 0.25}),
    ("grey_box", "deconf-c", {"epsilon": 0.005}),
]
MARGINAL = {"tpr": 0.95}
TOLERANCE = {"tpr": 0.9, "guarantee": "tolerance", "confidence": 0.9}
GUARDS = [
    ("six", "black_box", "igeood-logits", {}, {"calibrate": MARGINAL, "classes": list("abcdef")}),
    ("six", "black_box", "energy", {"temperature": 2.0}, {"calibrate": TOLERANCE}),
    ("six", "black_box", "msp", {"probabilities": True}, {"calibrate": MARGINAL}),
    ("six", "black_box", "igeood-logits", {"probabilities": True}, {"calibrate": TOLERANCE}),
    ("six", "black_box", "energy", {}, {"tune": {"share": 0.4}, "calibrate": MARGINAL}),
    ("six", "black_box", "igeood-logits", {}, {"tune": {"share": 0.4, "seed": 1}, "calibrate": MARGINAL}),
    ("forty", "black_box", "logits-product", {}, {"calibrate": MARGINAL}),
    ("six", "white_box", "igeood", {}, {"calibrate": MARGINAL}),
    ("six", "white_box", "mahalanobis", {"layers": ["early", "late"]}, {"calibrate": TOLERANCE}),
    ("six", "white_box", "fisher-rao-product", {}, {"calibrate": MARGINAL}),
    ("forty", "white_box", "knn", {}, {"calibrate": MARGINAL}),
    ("images", "black_box", "energy", {}, {"calibrate": MARGINAL, "classes": ["ant", "bee", "cat", "dog"]}),
    ("images", "black_box", "deconf-c", {}, {"calibrate": MARGINAL}),
    ("images", "grey_box", "igeood-logits", {"epsilon": 0.0012}, {"calibrate": TOLERANCE}),
    ("images", "grey_box", "energy", {}, {"tune": {"share": 0.5, "epsilons": [0.0, 0.01]}, "calibrate": MARGINAL}),
    ("images", "white_box", "igeood", {}, {"calibrate": TOLERANCE}),
    ("images", "white_box", "vim", {}, {"calibrate": MARGINAL}),
    ("images", "white_box", "gram", {}, {"calibrate": MARGINAL}),
    ("images", "white_box", "batch-norm", {}, {"calibrate": MARGINAL}),
]


def freeze_network():
    """Weights of scaled draws, norms of the training images' statistics, and a head that also has their class means.

    Nothing is nearly singular, which would make scores depend on the processor: no channel is always 0, and the head's
    rows are independent, which centred means alone are not.
    """
    rng, net = np.random.default_rng(0), Net().double().eval()
    x, labels = images()["train"]
    with torch.no_grad():
        for value in net.parameters():
            draws = torch.from_numpy(rng.standard_normal(value.shape))
            value.copy_(draws / value[0].numel() ** 0.5 if value.ndim > 1 else 0.2 * draws)
        maps = x
        for i in (1, 2, 3):
            norm, maps = getattr(net, f"norm{i}"), getattr(net, f"conv{i}")(maps)
            norm.running_mean.copy_(maps.mean(dim=(0, 2, 3)))
            norm.running_var.copy_(maps.var(dim=(0, 2, 3)))
            norm.weight.add_(1.0)
            maps = norm(maps).relu()
        features = net.features(x)
        centred = (features - features.mean(dim=0)) / features.std(dim=0)
        means = torch.stack([centred[labels == label].mean(dim=0) for label in range(4)])
        net.head.weight.add_(2.0 * means).div_(features.std(dim=0))
        net.head.bias.copy_(-(net.head.weight @ features.mean(dim=0)) - means.square().sum(dim=1))
        print("accuracy of the network", float((net(x).argmax(dim=1) == labels).double().mean()))  # noqa: T201
    save_file({name: value.numpy() for name, value in net.state_dict().items()}, FROZEN / "network.safetensors")


def freeze_scores():
    cases = [{"set": name, "access": "", "method": method, "options": options} for name, method, options in ARRAYS]
    cases += [{"set": "images", "access": access, "method": m, "options": options} for access, m, options in MODEL]
    tensors = {f"{i}/{side}": value for i, case in enumerate(cases) for side, value in scores(case).items()}
    save_file(tensors, FROZEN / "scores.safetensors", {"cases": json.dumps(cases)})


def freeze_guards():
    names = ("set", "access", "method", "options")
    cases = [dict(zip(names, values, strict=True)) | steps for *values, steps in GUARDS]
    write("guards", [{"case": case, "expected": record(case, guard_of(case))} for case in cases])


def freeze_answers():
    sys.path.append(str(FROZEN.parent / "serve"))
    from conftest import serving  # noqa: PLC0415 (the tests' own service)

    answers = {}
    for name in ("logits", "images"):
        guard, model, tensor, rows = served_guard(name)
        with tempfile.TemporaryDirectory() as folder:
            guard.save(Path(folder) / "guard.safetensors")
            with serving.__wrapped__()(Path(folder) / "guard.safetensors", model) as running:
                client = running.client()
                answers[name] = {key: answer(client, *asked) for key, asked in requests(tensor, rows).items()}
    write("answers", answers)


def write(name, content):
    (FROZEN / f"{name}.json").write_text(json.dumps(content, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    freeze_network()
    freeze_scores()
    freeze_guards()
    freeze_answers()
