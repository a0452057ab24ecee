"""The benchmark on the real network and real images: runs where $IGEOOD_DATA has them."""

import os
from pathlib import Path

import pytest

from igeood.bench.runs import Plan, load_network, run

DATA = Path(os.environ.get("IGEOOD_DATA", ""))
WEIGHTS = DATA / "weights" / "densenet-bc-100-cifar10.safetensors"


@pytest.mark.data
@pytest.mark.skipif(
    not (os.environ.get("IGEOOD_DATA") and WEIGHTS.exists()), reason="set IGEOOD_DATA to the folder of real data"
)
def test_a_small_benchmark_of_the_real_network(tmp_path):
    network = load_network(str(WEIGHTS))
    assert (network.name, network.in_distribution) == ("densenet-bc-100", "cifar-10")
    methods = ("igeood-logits", "mahalanobis", "igeood+")
    plan = Plan(
        ood=("tiny-imagenet", "chars74k"), settings=("black-box", "white-box"), methods=methods, images=300, train=600,
        splits=1,
    )  # fmt: skip
    results = run([network], plan, tmp_path)
    [line] = results.networks.records
    assert line["layers"] == [["conv1", 24], ["trans1", 108], ["trans2", 150], ["relu", 342]]
    assert line["accuracy"] == pytest.approx(0.9454, abs=0.04)  # of 300 images
    found = {(c["method"], c["ood"]): c["auroc"] for c in results.cells.records}
    assert found["igeood-logits", "tiny-imagenet"] == pytest.approx(0.89, abs=0.06)
    assert found["igeood+", "chars74k"] > 0.95
    assert found["igeood+", "tiny-imagenet"] > found["mahalanobis", "tiny-imagenet"] + 0.1
