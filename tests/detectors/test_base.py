"""What the base class and the registry keep: options, temperatures, input steps, what a file can hold."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors import Igeood, Mahalanobis, MahalanobisLayers

TEMPERED = ["msp", "odin", "energy", "entropy", "gen", "igeood-logits", "igeood-logits-min", "kl-sum", "kl-min"]


@pytest.mark.parametrize("off", [-2e-3, -9e-4, 9e-4, 2e-3])
def test_declared_probabilities_may_be_off_by_a_thousandth(off, refused):
    detector = igeood.MaxSoftmax(probabilities=True).fit([[0.5, 0.2, 0.3], [0.1, 0.2, 0.7]])
    with refused("probabilities") if abs(off) > 1e-3 else nullcontext():
        assert detector(torch.tensor([[0.5, 0.25, 0.25 + off]])).isfinite().all()


def test_the_input_steps_of_layers(known):
    """The score itself; IGEOOD's is its output's, for all layers; Mahalanobis has one of each layer."""
    for detector, output in ((igeood.Energy(), igeood.Energy()), (Igeood(), igeood.IgeoodLogits())):
        ((score, layers),) = detector.fit(known.train).step_scores(known.test)
        assert layers is None
        torch.testing.assert_close(score, output.fit(known.train)(known.test), rtol=1e-9, atol=1e-9)
    expected = Mahalanobis().fit(known.train).terms(known.test)
    for detector in (MahalanobisLayers().fit(known.train), Mahalanobis().fit(known.train)):
        steps = detector.step_scores(known.test)
        assert [layers for _, layers in steps] == [("early",), ("block.late",)]
        torch.testing.assert_close(torch.stack([score for score, _ in steps], dim=1), expected)


@pytest.mark.parametrize("name", TEMPERED)
def test_another_temperature_is_a_fit_at_it(name, known):
    """Near a fit at a neighbouring temperature, roughly."""
    detector = igeood.detector(name).fit(known.train)
    summary = igeood.Summary.of(known.train, detector.needs)
    fresh = igeood.detector(name, temperature=3.0).fit(known.train)(known.test)
    other = detector.at_temperature(3.0, summary)
    assert other.params() == {**detector.params(), "temperature": 3.0}
    torch.testing.assert_close(other(known.test), fresh, rtol=1e-9, atol=1e-9)
    rough = detector.at_temperature(3.0, summary, near=detector.at_temperature(2.9, summary))
    torch.testing.assert_close(rough(known.test), fresh, rtol=0, atol=1e-3 * float(fresh.std()))


WRONG = [
    *(("knn", "k", value) for value in (0, "most")),
    *(("knn", "rows", value) for value in (2.5, True)),
    *(("energy", "temperature", value) for value in (0.0, -1.0, np.nan, np.inf, "hot")),
    *((method, "percentile", 100.0) for method in ("react", "ash", "scale")),
    *(("igeood-logits", "centroid_temperature", -1.0), ("mahalanobis", "relative", "yes")),
]


@pytest.mark.parametrize(("method", "option", "value"), WRONG)
def test_options_are_checked_against_their_annotations(method, option, value, refused):
    with refused(option) as caught:
        igeood.detector(method, **{option: value})
    assert repr(value) in str(caught.value)


def test_options_are_kept_as_plain_numbers_and_an_unknown_name_gets_the_nearest(refused):
    assert repr(igeood.detector("knn", k=np.int64(3), rows=9)) == "KNN(k=3, rows=9)"
    assert igeood.IgeoodLogits(temperature=np.float32(2), centroid_temperature=1).centroid_temperature == 1.0
    defaults = {"igeood-logits": 1.0, "energy": 1.0, "msp": 1.0, "odin": 1000.0}
    assert {name: igeood.detector(name).temperature for name in defaults} == defaults
    with refused("probabilities"):
        igeood.detector("energy", probabilities=True)
    with refused("method") as caught:
        igeood.detector("MSP")
    assert "'msp'" in caught.value.cure


def test_what_a_file_cannot_hold_is_an_error_when_saved(refused):
    detector = igeood.MaxSoftmax().fit(2.0 * torch.eye(3), [0, 1, 2])
    detector.rows_ = 3  # no tensor
    with refused("detector"):
        detector.state()
