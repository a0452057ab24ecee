"""The paper's numbers are as they were checked; its example in one dimension claims what is so over several seeds."""

import math
from hashlib import sha256

import numpy as np
import pytest

from igeood import METHODS
from igeood.bench.paper.reported import load
from igeood.bench.paper.toy import OOD_I, OOD_II, TRUTH, toy


def test_every_number_is_as_it_was_checked_and_of_a_method_that_is_there():
    assert sha256(repr(load()).encode()).hexdigest().startswith("a53a2dc9d5c6c42e")
    assert {one.method for one in load()} <= {*METHODS, ""}


def area(example, score, ood):
    return example.evaluations[score][ood].auroc


def test_what_the_example_claims():
    """Without OOD statistics the metric adds nothing; with them Mahalanobis does as well, near the best there is."""
    examples = [toy(seed) for seed in range(5)]
    for example in examples:
        found = {name: area(example, name, OOD_II) for name in example.evaluations}
        assert 0.4 <= found["mahalanobis"] <= 0.6
        assert found["fisher-rao-ood"] > 0.9
        assert area(example, "fisher-rao-ood", OOD_I) > area(example, "mahalanobis", OOD_I)
        assert example.evaluations["fisher-rao"] == example.evaluations["mahalanobis"]
        assert found["mahalanobis-ood"] == pytest.approx(found["fisher-rao-ood"], abs=0.01)
        assert found["likelihood-ratio"] == pytest.approx(found["fisher-rao-ood"], abs=0.01)
        assert found["mahalanobis"] < found["fisher-rao-ood-printed"] < found["fisher-rao-ood"]
        for ood in (OOD_I, OOD_II):  # no score is above the likelihood ratio's but by the draws' noise
            highest = max(area(example, name, ood) for name in example.evaluations)
            assert highest <= area(example, "likelihood-ratio", ood) + 0.005
    best = 0.5 * (1.0 + math.erf(TRUTH[OOD_I].mean / 2.0))  # Φ(Δ/(σ√2))
    assert np.mean([area(each, "likelihood-ratio", OOD_I) for each in examples]) == pytest.approx(best, abs=0.01)
    assert toy(0).evaluations == examples[0].evaluations != examples[1].evaluations
