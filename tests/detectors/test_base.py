"""What the base class and the registry keep: options, temperatures, input steps, what a file can hold."""

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors import Igeood, Mahalanobis, MahalanobisLayers
from igeood.errors import InputError

BLACK = [
    name
    for name, method in sorted(igeood.METHODS.items())
    if "temperature" in method.options and not method.needs_layers
]


def test_declared_probabilities_may_be_off_by_a_thousandth():
    rows = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    detector = igeood.MaxSoftmax(probabilities=True).fit(rows / rows.sum(dim=1, keepdim=True))
    for off in (-9e-4, 9e-4):
        assert detector(torch.tensor([[0.5, 0.25, 0.25 + off]])).isfinite().all()
    for off in (-2e-3, 2e-3):
        with pytest.raises(InputError) as caught:
            detector(torch.tensor([[0.5, 0.25, 0.25 + off]]))
        assert caught.value.argument == "probabilities"


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


@pytest.mark.parametrize("name", BLACK)
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


@pytest.mark.parametrize(
    ("method", "option", "value"),
    [
        *(("knn", "k", value) for value in (0, "most")),
        *(("knn", "rows", value) for value in (2.5, True)),
        *(("energy", "temperature", value) for value in (0.0, -1.0, np.nan, np.inf, "hot")),
        ("igeood-logits", "centroid_temperature", -1.0),
        ("mahalanobis", "relative", "yes"),
        *((method, "percentile", 100.0) for method in ("react", "ash", "scale")),
    ],
)
def test_options_are_checked_against_their_annotations(method, option, value):
    with pytest.raises(InputError) as caught:
        igeood.detector(method, **{option: value})
    assert caught.value.argument == option
    assert repr(value) in str(caught.value)


def test_options_are_kept_as_plain_numbers_and_an_unknown_name_gets_the_nearest():
    assert repr(igeood.detector("knn", k=np.int64(3), rows=9)) == "KNN(k=3, rows=9)"
    assert igeood.IgeoodLogits(temperature=np.float32(2), centroid_temperature=1).centroid_temperature == 1.0
    defaults = {"igeood-logits": 1.0, "energy": 1.0, "msp": 1.0, "odin": 1000.0}
    assert {name: igeood.detector(name).temperature for name in defaults} == defaults
    with pytest.raises(InputError, match="'msp'") as caught:
        igeood.detector("MSP")
    assert caught.value.argument == "method"


def test_what_a_file_cannot_hold_is_an_error_when_saved():
    class Keeps(igeood.Detector):
        bank_: torch.Tensor  # no option

        def learn(self, summary):
            super().learn(summary)
            self.rows_ = summary.rows
            return self

        def score(self, outputs):
            return outputs.logits.amax(dim=1)

    with pytest.raises(InputError, match="rows_") as caught:
        Keeps().fit(2.0 * torch.eye(3), [0, 1, 2]).state()
    assert caught.value.argument == "detector"
