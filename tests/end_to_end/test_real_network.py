"""The real network on real images: runs where $IGEOOD_DATA has them."""

import os
from pathlib import Path

import numpy as np
import pytest

import igeood
from igeood.bench.runs import Plan, load_network, run
from igeood.bench.runs.observing import recall
from igeood.metrics import evaluate

WEIGHTS = Path(os.environ.get("IGEOOD_DATA", "nowhere")) / "weights" / "densenet-bc-100-cifar10.safetensors"
FOREIGN = ("tiny-imagenet", "chars74k")
without_data = pytest.mark.skipif(not WEIGHTS.exists(), reason="set IGEOOD_DATA to the folder of real data")
pytestmark = [pytest.mark.data, without_data]


@pytest.fixture(scope="module")
def network():
    return load_network(str(WEIGHTS))


@pytest.fixture(scope="module")
def results(network, tmp_path_factory):
    """A small benchmark: 1,000 images go through the network, once for all tests."""
    methods = ("igeood-logits", "mahalanobis", "igeood+")
    sizes = {"images": 270, "train": 190, "splits": 1}
    plan = Plan(ood=FOREIGN, settings=("black-box", "white-box"), methods=methods, **sizes)
    return run([network], plan, tmp_path_factory.mktemp("real"))


def test_the_checkpoint_loads_as_it_is_and_is_as_good_as_it_says(network, results):
    assert (network.name, network.in_distribution) == ("densenet-bc-100", "cifar-10")
    [line] = results.networks.records
    assert line["layers"] == [["conv1", 24], ["trans1", 108], ["trans2", 150], ["relu", 342]]
    assert 0.92 < line["accuracy"] < 0.97  # 94.54% on the whole test set


def test_black_box_figures(network, results):
    """An independent reference found MSP at 37 and 38, Energy at 54 and 44, IGEOOD at 54 and 50; 270 images: ± 6."""
    digests = {**results.networks.records[0]["data"], **{c["ood"]: c["data"]["ood"] for c in results.cells.records}}
    outputs = {k: recall(results.folder / "outputs", weights=network.weights, images=d) for k, d in digests.items()}
    found = {}
    for name in ("msp", "energy", "igeood-logits"):
        detector = igeood.detector(name).fit(outputs["train"])
        inside = detector(outputs["test"])
        found[name] = [100 * evaluate(inside, detector(outputs[ood])).tnr_at_tpr for ood in FOREIGN]
    for name, expected in {"msp": (37, 38), "energy": (54, 44), "igeood-logits": (54, 50)}.items():
        assert found[name] == pytest.approx(expected, abs=9), name
    assert np.mean(found["igeood-logits"]) > np.mean(found["msp"])


def test_igeood_plus_is_ahead_of_mahalanobis(results):
    found = {(c["method"], c["ood"]): c for c in results.cells.records}
    gains = [found["igeood+", ood]["tnr"] - found["mahalanobis", ood]["tnr"] for ood in FOREIGN]
    assert 100 * np.mean(gains) >= 11
    assert found["igeood-logits", "tiny-imagenet"]["auroc"] == pytest.approx(0.89, abs=0.06)
    assert found["igeood+", "chars74k"]["auroc"] > 0.95
    assert found["igeood+", "tiny-imagenet"]["auroc"] > found["mahalanobis", "tiny-imagenet"]["auroc"] + 0.1
