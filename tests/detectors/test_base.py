"""What the base class says and keeps: warnings, messages, the order of layers."""

import warnings

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors import Igeood, IgeoodFeatures, MahalanobisEnsemble
from igeood.errors import IgeoodWarning, InputError, NotReadyError
from igeood.outputs import Outputs


def likely(n: int = 6, n_classes: int = 3) -> torch.Tensor:
    """Rows that are probabilities, with a 0 in each."""
    rows = torch.rand(n, n_classes, generator=torch.Generator().manual_seed(0)) + 0.1
    rows[:, 0] = 0.0
    return rows / rows.sum(dim=1, keepdim=True)


def test_logits_that_look_like_probabilities_are_a_warning():
    said = r"^logits: .*are these probabilities\? Then say so with probabilities=True$"
    rows = likely()
    with pytest.warns(IgeoodWarning, match=said) as at_fit:
        detector = igeood.MaxSoftmax().fit(rows)
    with pytest.warns(IgeoodWarning, match=said) as at_score:
        detector.score(rows[:1])
    with pytest.warns(IgeoodWarning, match=said) as once:
        igeood.MaxSoftmax().fit_batches([Outputs(rows), Outputs(rows)])
    assert [len(at_fit), len(at_score), len(once)] == [1, 1, 1]


@pytest.mark.parametrize("row", [[1.2, -0.1, -0.1], [0.5, 0.3, 0.1], [0.5, 0.3, 0.3]])
def test_one_row_that_is_none_is_enough_not_to_warn(row):
    rows = torch.cat([likely(), torch.tensor([row])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        detector = igeood.MaxSoftmax().fit(rows)
        detector.score(rows)
        detector.score(rows[:0])
        igeood.MaxSoftmax(probabilities=True).fit(likely()).score(likely())


def test_probabilities_keep_the_kind_of_array_and_all_else():
    rows, labels = likely(9).numpy(), np.arange(9) % 3
    detector = igeood.IgeoodLogits(probabilities=True).fit(rows, labels)
    assert isinstance(detector.score(rows), np.ndarray)
    assert isinstance(detector.score(torch.from_numpy(rows)), torch.Tensor)
    read = detector.read(Outputs(rows, {"l": rows}, labels))
    assert list(read.features) == ["l"]
    assert read.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("off", [-2e-3, -9e-4, 9e-4, 2e-3])
def test_probabilities_may_be_off_by_a_thousandth(off):
    rows = torch.tensor([[0.5, 0.25, 0.25 + off]])
    detector = igeood.MaxSoftmax(probabilities=True).fit(likely())
    if abs(off) < 1e-3:
        assert detector.score(rows).isfinite().all()
    else:
        with pytest.raises(InputError, match=rf"row 0 sums to {1 + off:g}, .*\(1 of 1 rows are not\)"):
            detector.score(rows)


@pytest.mark.parametrize("name", sorted(igeood.METHODS))
def test_errors_name_the_detector(name, known):
    detector = igeood.detector(name)
    kind = type(detector).__name__
    how = r"fit\(logits, labels\)" if detector.needs_labels else r"fit\(logits\), which needs no labels,"
    with pytest.raises(NotReadyError, match=rf"^{kind}: not fitted yet; call {how} first$"):
        detector.score(known.test)
    with pytest.raises(InputError, match=f"no sample to fit {kind} on"):
        detector.fit_batches([])
    if detector.needs_labels:
        with pytest.raises(InputError, match=f"labels: {kind} needs the true class"):
            detector.fit(Outputs(known.train.logits, known.train.features))
    detector.fit(known.train)
    with pytest.raises(InputError, match=f"9 columns, but {kind} was fitted on 10 classes"):
        detector.score(Outputs(known.test.logits[:, :9], known.test.features))
    assert repr(detector).startswith(f"{kind}(")
    assert repr(detector) == f"{kind}({', '.join(f'{k}={v!r}' for k, v in detector.params().items())})"


def test_a_detector_without_temperature_has_none_to_set(known):
    with pytest.raises(InputError, match=r"^temperature: MahalanobisEnsemble has none to set"):
        MahalanobisEnsemble().fit(known.train).at_temperature(2.0, known.train)


def test_empty_batches_are_passed_over(known):
    batches = [known.train[:0], known.train[:150], known.train[:0], known.train[150:]]
    for name in sorted(igeood.METHODS):
        found, whole = igeood.detector(name).fit_batches(batches), igeood.detector(name).fit(known.train)
        torch.testing.assert_close(found.score(known.test), whole.score(known.test), rtol=1e-6, atol=1e-6)


def test_batches_of_another_width_are_refused(known):
    with pytest.raises(InputError, match=r"logits: .*9 columns.*10"):
        igeood.MaxSoftmax().fit_batches([Outputs(known.train.logits), Outputs(known.train.logits[:, :9])])


@pytest.mark.parametrize("kind", [Igeood, IgeoodFeatures, MahalanobisEnsemble])
def test_layers_keep_their_order_whatever_order_a_file_gives(known, kind):
    """Twelve of them, for 10 comes before 2 in the alphabet, with names that look like places."""
    names = [f"{(7 * i) % 12}:block:{i}" for i in range(12)]
    features = {name: known.train.features["early"] * (i + 1) + 0.1 * i for i, name in enumerate(names)}
    train = Outputs(known.train.logits, features, known.train.labels)
    fitted = kind().fit(train)
    expected = fitted.score(train)
    for order in (sorted, lambda keys: sorted(keys, reverse=True)):
        state = fitted.state()
        loaded = kind().load_state({key: state[key] for key in order(state)}, 10)
        layers = loaded.layers_ if kind is IgeoodFeatures else loaded.features_.layers_
        assert layers == names
        assert torch.equal(loaded.score(train), expected)
        assert loaded.n_classes_ == 10


@pytest.mark.parametrize("name", [name for name in sorted(igeood.METHODS) if not igeood.METHODS[name].needs_layers])
def test_the_input_step_lowers_the_score_itself(name, known):
    detector = igeood.detector(name).fit(known.train)
    ((score, layers),) = detector.step_scores(known.test)
    assert layers is None
    assert torch.equal(score, detector.score(known.test))


def test_the_input_steps_of_layers(known):
    """IGEOOD steps by its output's score for all layers, Mahalanobis by each layer's own."""
    whole = Igeood().fit(known.train)
    ((score, layers),) = whole.step_scores(known.test)
    assert layers is None
    assert torch.equal(score, whole.output_.score(known.test))
    for detector in (MahalanobisEnsemble().fit(known.train), igeood.Mahalanobis().fit(known.train)):
        steps = detector.step_scores(known.test)
        part = getattr(detector, "features_", detector)
        assert [layers for _, layers in steps] == [("early",), ("block.late",)]
        torch.testing.assert_close(torch.stack([s for s, _ in steps], dim=1), part.layer_scores(known.test))
