"""What the base class and the registry say and keep: warnings, names, the order of layers, input steps."""

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors import Igeood, Mahalanobis, MahalanobisLayers
from igeood.errors import IgeoodWarning, InputError

BLACK = [
    name
    for name, method in sorted(igeood.METHODS.items())
    if "temperature" in method.options and not method.needs_layers
]


def likely(n: int = 6, n_classes: int = 3) -> torch.Tensor:
    """Rows that are probabilities, with a 0 in each."""
    rows = torch.rand(n, n_classes, generator=torch.Generator().manual_seed(0)) + 0.1
    rows[:, 0] = 0.0
    return rows / rows.sum(dim=1, keepdim=True)


def test_logits_that_look_like_probabilities_are_a_warning_unless_one_row_is_none():
    said = r"^logits: .*are these probabilities\? Then say so with probabilities=True$"
    with pytest.warns(IgeoodWarning, match=said) as at_fit:
        igeood.MaxSoftmax().fit(likely())
    assert [warning.filename for warning in at_fit] == [__file__]
    for row in ([1.2, -0.1, -0.1], [0.5, 0.3, 0.1], [0.5, 0.3, 0.3]):
        rows = torch.cat([likely(), torch.tensor([row])])
        igeood.MaxSoftmax().fit(rows)  # a warning would be an error
    # those that are declared may be off by a thousandth
    detector = igeood.MaxSoftmax(probabilities=True).fit(likely())
    for off in (-9e-4, 9e-4):
        assert detector.score(torch.tensor([[0.5, 0.25, 0.25 + off]])).isfinite().all()
    for off in (-2e-3, 2e-3):
        with pytest.raises(InputError, match=r"row 0 has .* or a sum that is not 1 \(1 of 1 rows here do\)"):
            detector.score(torch.tensor([[0.5, 0.25, 0.25 + off]]))


def test_the_input_steps_of_layers(known):
    """The score itself; IGEOOD's is its output's, for all layers; Mahalanobis has one of each layer."""
    for detector, output in ((igeood.Energy(), igeood.Energy()), (Igeood(), igeood.IgeoodLogits())):
        ((score, layers),) = detector.fit(known.train).step_scores(known.test)
        assert layers is None
        torch.testing.assert_close(score, output.fit(known.train).score(known.test), rtol=1e-9, atol=1e-9)
    expected = Mahalanobis().fit(known.train).layer_scores(known.test)
    for detector in (MahalanobisLayers().fit(known.train), Mahalanobis().fit(known.train)):
        steps = detector.step_scores(known.test)
        assert [layers for _, layers in steps] == [("early",), ("block.late",)]
        torch.testing.assert_close(torch.stack([score for score, _ in steps], dim=1), expected)


@pytest.mark.parametrize("name", BLACK)
def test_another_temperature_is_a_fit_at_it(name, known):
    """From a summary's samples; near a fit at a neighbouring temperature, roughly."""
    first = igeood.detector(name).fit(known.train)
    samples = igeood.Summary.of(known.train, igeood.METHODS[name].needs).samples
    fresh = igeood.detector(name, temperature=3.0).fit(known.train).score(known.test)
    other = first.at_temperature(3.0, samples)
    assert (other.temperature, other.params() | {"temperature": 1.0}) == (3.0, first.params() | {"temperature": 1.0})
    torch.testing.assert_close(other.score(known.test), fresh, rtol=1e-9, atol=1e-9)
    rough = first.at_temperature(3.0, samples, near=first.at_temperature(2.9, samples))
    torch.testing.assert_close(rough.score(known.test), fresh, rtol=0, atol=1e-3 * float(fresh.std()))


def test_options_are_checked_against_their_annotations_and_an_unknown_name_gets_the_nearest():
    whole, positive = "a whole number, at least 1", "a positive finite number"
    for method, option, value, expected in (
        *(("knn", "k", value, f"{whole} or 'auto'") for value in (0, "most")),
        *(("knn", "rows", value, whole) for value in (2.5, True)),
        *((name, "temperature", value, positive) for name in BLACK for value in (0.0, -1.0, np.nan, np.inf, "hot")),
        ("igeood-logits", "centroid_temperature", -1.0, f"{positive} or None"),
        ("mahalanobis", "relative", "yes", "True or False"),
    ):
        with pytest.raises(InputError, match=f"^{option}: expected {expected}, got {value!r}$"):
            igeood.detector(method, **{option: value})
    with pytest.raises(InputError, match="reduce: expected 'sum' or 'min', got 'mean'"):
        igeood.KLDivergence(reduce="mean")
    assert repr(igeood.detector("knn", k=np.int64(3), rows=9)) == "KNN(k=3, rows=9)"
    assert igeood.IgeoodLogits(temperature=np.float32(2), centroid_temperature=1).centroid_temperature == 1.0
    defaults = {name: igeood.detector(name).temperature for name in BLACK}
    assert defaults == {name: {"odin": 1000.0, "logits-product": 5.0}.get(name, 1.0) for name in BLACK}
    for name, said in (("MSP", r"did you mean 'msp'\? there are msp, odin"), ("zzz", "there are msp, odin")):
        with pytest.raises(InputError, match=f"^method: no '{name}'; {said}"):
            igeood.detector(name)


def test_what_a_file_cannot_hold_is_an_error_when_saved():
    class Keeps(igeood.Detector):
        bank_: torch.Tensor  # no option

        def _learn(self, summary):
            self.rows_ = summary.rows

        def _score(self, batch):
            return batch.logits.amax(dim=1)

    with pytest.raises(InputError, match="detector: rows_ is int; keep tensors"):
        Keeps().fit(2.0 * torch.eye(3), [0, 1, 2]).state()
