"""Scores and figures of version 0.1, frozen in tests/frozen: a later version has to give the same ones.

The made-up sets are made again from their seeds; `real` holds outputs of DenseNet-BC-100 on CIFAR-10 and Tiny-ImageNet.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import igeood
from igeood.detectors import IgeoodFeatures, Mahalanobis
from igeood.detectors.gaussians import OodFeatures
from igeood.metrics import evaluate
from igeood.outputs import Outputs

FROZEN = Path(__file__).parents[1] / "frozen"
SETS = {"six": 6, "two": 2, "forty": 40, "real": 10}  # number of classes
WIDTHS = {"early": 7, "middle": 12, "late": 20}  # of the made-up layers
LAYERS = (*WIDTHS, "conv1", "trans1", "trans2", "relu")
LOGITS = ("msp", "odin", "energy", "kl-sum", "kl-min", "igeood-logits", "igeood-logits-min")
STANDARDISED = ("mahalanobis", "igeood", "igeood+")
# Fitted on 240 rows of 342 channels, every training row has the same distance: its deviation is rounding.
DEGENERATE = ("real", "mahalanobis")
EXACT = [(method, options) for method in LOGITS for options in ({}, {"temperature": 3.0})]
EXACT.append(("igeood-logits", {"temperature": 3.0, "centroid_temperature": 1.0}))
LAYERED = {"igeood-features": IgeoodFeatures, "mahalanobis-layers": Mahalanobis}


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
def outputs(name):
    sides = {}
    for side, values in arrays(name).items():
        features = {layer: values[f"feature.{layer}"] for layer in LAYERS if f"feature.{layer}" in values}
        sides[side] = Outputs(values["logits"], features, values.get("labels"))
    return sides


@cache
def frozen(name):
    """Frozen tensors of a set by `variant/side`, and its figures."""
    path = FROZEN / ("real_outputs.safetensors" if name == "real" else "made_up.safetensors")
    prefix = f"scores/{name}/"
    with safe_open(path, framework="numpy") as file:
        scores = {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
        return scores, json.loads(file.metadata()["figures"])[name]


def variant(method, options):
    return " ".join([method, *(f"{key}={value:g}" for key, value in options.items())])


def assert_frozen(name, what, score, tolerance=1e-9):
    """Equal up to a part of the largest score; the frozen rows are the first ones."""
    for side in ("id", "ood"):
        expected = frozen(name)[0][f"{what}/{side}"]
        found = np.asarray(score(outputs(name)[side][: len(expected)]))
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max(), err_msg=side)


def assert_figures(inside, outside, expected, points):
    found = evaluate(inside, outside)
    assert [100 * found.tnr_at_tpr, 100 * found.auroc] == pytest.approx(expected, abs=points)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("method", "options"), EXACT, ids=[variant(*each) for each in EXACT])
def test_scores_of_logits(name, method, options):
    assert_frozen(name, variant(method, options), igeood.detector(method, **options).fit(outputs(name)["train"]).score)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("what", LAYERED)
def test_scores_of_layers_and_distances_to_the_ood_statistics(name, what):
    detector = LAYERED[what]().fit(outputs(name)["train"])
    # 240 rows for 342 channels: another order of the rows changes Mahalanobis distances by up to 2e-9
    assert_frozen(name, what, detector.layer_scores, 1e-7 if name == "real" and "mahalanobis" in what else 1e-9)
    against = OodFeatures().fit(outputs(name)["ood"])
    assert_frozen(name, "igeood-features-ood", lambda rows: -against.layer_scores(rows))


@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name in SETS for method in STANDARDISED if (name, method) != DEGENERATE]
)
def test_figures_before_tuning(name, method):
    data = outputs(name)
    detector = igeood.detector(method).fit(data["train"])
    assert_figures(detector.score(data["id"]), detector.score(data["ood"]), frozen(name)[1]["untuned"][method], 0.3)


@pytest.mark.parametrize("name", ["six", "two"])
@pytest.mark.parametrize("method", [*LOGITS, *STANDARDISED])
def test_figures_after_tuning(name, method):
    """Tuned on the first half of the rows, measured on the second: two rows are one point.

    Near-ties of TNR have gone to the higher AUROC since, and six rows to the other side at most.
    """
    data = outputs(name)
    make = igeood.white_box if method in STANDARDISED else igeood.black_box
    guard = make(method=method).fit(data["train"]).tune(data["id"][:150], ood=data["ood"][:200], share=1.0)
    held = guard.score(data["id"][150:]), guard.score(data["ood"][200:])
    assert_figures(*held, frozen(name)[1]["guard"][method]["held"], 3.1)
