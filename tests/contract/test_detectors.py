"""What every detector of the catalogue owes its users. New methods are found by themselves."""

import copy

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors.base import parameter_names
from igeood.errors import InputError, NotReadyError

METHODS = sorted(igeood.METHODS)


@pytest.fixture(params=METHODS)
def name(request):
    return request.param


@pytest.fixture
def fitted(name, classifier):
    return igeood.detector(name).fit(classifier.train, classifier.labels)


def test_a_higher_score_is_more_out_of_distribution(fitted, classifier):
    assert igeood.metrics.auroc(fitted.score(classifier.test), fitted.score(classifier.ood)) > 0.9


def test_scores_are_one_float64_a_sample(fitted, classifier):
    score = fitted.score(classifier.test)
    assert score.shape == (len(classifier.test),)
    assert score.dtype == torch.float64
    assert score.isfinite().all()


def test_fitting_twice_is_fitting_once(name, fitted, classifier, make):
    once = fitted.score(classifier.test)
    twice = igeood.detector(name).fit(make(10, seed=9).train, make(10, seed=9).labels)
    twice.fit(classifier.train, classifier.labels)
    assert torch.equal(twice.score(classifier.test), once)


def test_the_order_of_samples_does_not_matter(name, fitted, classifier):
    order = torch.randperm(len(classifier.train), generator=torch.Generator().manual_seed(0))
    shuffled = igeood.detector(name).fit(classifier.train[order], classifier.labels[order])
    torch.testing.assert_close(shuffled.score(classifier.test), fitted.score(classifier.test), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        fitted.score(classifier.test[order]), fitted.score(classifier.test)[order], rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("size", [1, 7, 64])
def test_batches_do_not_matter(fitted, classifier, size):
    parts = torch.cat([fitted.score(part) for part in classifier.test.split(size)])
    torch.testing.assert_close(parts, fitted.score(classifier.test), rtol=1e-9, atol=1e-12)


def test_inputs_are_not_changed(name, classifier):
    train, labels, test = classifier.train.clone(), classifier.labels.clone(), classifier.test.numpy().copy()
    igeood.detector(name).fit(train, labels).score(test)
    assert torch.equal(train, classifier.train)
    assert torch.equal(labels, classifier.labels)
    assert np.array_equal(test, classifier.test.numpy())


def test_numpy_is_torch(name, fitted, classifier):
    by_numpy = igeood.detector(name).fit(classifier.train.numpy(), classifier.labels.numpy())
    score = by_numpy.score(classifier.test.numpy())
    assert isinstance(score, np.ndarray)
    assert np.array_equal(score, fitted.score(classifier.test).numpy())
    assert isinstance(fitted.score(classifier.test.tolist()), np.ndarray)
    assert isinstance(fitted.score(igeood.Outputs(classifier.test.numpy())), np.ndarray)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # the rounding of logits of size 10 is what is left: 2⁻⁸, 2⁻¹¹ and 2⁻²⁴ of them, times the temperature's slope
    [(torch.bfloat16, 5e-2), (torch.float16, 1e-2), (torch.float32, 1e-9), (torch.float64, 1e-9)],
)
def test_precisions_agree(name, fitted, classifier, dtype, tolerance):
    score = fitted.score(classifier.test.to(dtype))
    assert score.dtype == torch.float64
    expected = fitted.score(classifier.test)
    assert (score - expected).abs().max() <= tolerance * expected.abs().max()
    refitted = igeood.detector(name).fit(classifier.train.to(dtype), classifier.labels)
    assert (refitted.score(classifier.test) - expected).abs().max() <= tolerance * expected.abs().max()


def test_integers_are_numbers(fitted):
    logits = np.array([[3, 0, 0, 0, 0, 0, 0, 0, 0, 1]])
    assert fitted.score(logits)[0] == fitted.score(logits.astype(float))[0]


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_any_device(fitted, classifier, device):
    if not getattr(torch, device).is_available():
        pytest.skip(f"no {device} on this machine")
    score = fitted.score(classifier.test.to(device))
    assert score.device.type == device
    torch.testing.assert_close(score.cpu().double(), fitted.score(classifier.test), rtol=1e-5, atol=1e-5)


def test_score_is_differentiable(fitted, classifier):
    logits = torch.cat([classifier.test[:5], classifier.train[:5] * 1e3, torch.zeros(1, 10)]).requires_grad_()
    (gradient,) = torch.autograd.grad(fitted.score(logits).sum(), logits)
    assert gradient.isfinite().all()
    assert (gradient[:5] != 0).any()


def test_extremes_and_masked_classes_are_finite(fitted):
    logits = torch.zeros(4, 10)
    logits[0, 0], logits[1, 1], logits[2, 2], logits[3, 3] = 1e4, -1e4, 1e38, -torch.inf
    assert fitted.score(logits).isfinite().all()


def test_state_goes_into_a_file_and_back(name, fitted, classifier, tmp_path):
    guard = igeood.black_box(method=name).fit(classifier.train, classifier.labels).calibrate(classifier.held_out)
    guard.save(tmp_path / "guard.safetensors")
    loaded = igeood.load(tmp_path / "guard.safetensors")
    assert type(loaded.detector) is type(fitted)
    assert loaded.detector.params() == fitted.params()
    assert torch.equal(loaded.score(classifier.test), fitted.score(classifier.test))


def test_copies_are_independent(fitted, classifier, make):
    before = fitted.score(classifier.test)
    other = copy.deepcopy(fitted)
    other.fit(make(5).train, make(5).labels)
    assert torch.equal(fitted.score(classifier.test), before)


def test_options_are_kept_under_their_names(name, fitted):
    for option in parameter_names(type(fitted)):
        assert hasattr(fitted, option)
    assert type(fitted)(**fitted.params()).params() == fitted.params()
    assert "probabilities=False" in repr(fitted)


def test_probabilities_are_logits_once_declared(name, classifier):
    if name == "energy":
        with pytest.raises(InputError, match="energy needs logits"):
            igeood.detector(name, probabilities=True)
        return
    train, test = classifier.train.double().softmax(1), classifier.test.double().softmax(1)
    by_logits = igeood.detector(name).fit(train.log(), classifier.labels).score(test.log())
    found = igeood.detector(name, probabilities=True).fit(train, classifier.labels).score(test)
    torch.testing.assert_close(found, by_logits, rtol=1e-9, atol=1e-9)
    half = igeood.detector(name, probabilities=True).fit(train.half(), classifier.labels)
    assert half.score(test.half()).isfinite().all()


def test_rows_that_are_no_probabilities(name, classifier):
    if name == "energy":
        pytest.skip("energy refuses probabilities altogether")
    detector = igeood.detector(name, probabilities=True)
    with pytest.raises(InputError, match=r"row 0 .* \(\d+ of 400 rows"):
        detector.fit(classifier.train, classifier.labels)
    detector.fit(classifier.train.softmax(1), classifier.labels)
    with pytest.raises(InputError, match=r"row 1 sums to 0\.9, not"):
        detector.score([[1.0] + [0.0] * 9, [0.9] + [0.0] * 9])
    with pytest.raises(InputError, match="row 0 has a negative entry"):
        detector.score([[1.5, -0.5] + [0.0] * 8])


def test_scoring_before_fitting(name, classifier):
    with pytest.raises(NotReadyError, match="call fit"):
        igeood.detector(name).score(classifier.test)
    with pytest.raises(NotReadyError):
        igeood.detector(name).state()


def test_empty_batches(name, fitted):
    assert fitted.score(np.empty((0, 10))).shape == (0,)
    assert fitted.score(torch.empty(0, 10)).dtype == torch.float64
    with pytest.raises(InputError, match="no sample to fit"):
        igeood.detector(name).fit(np.empty((0, 10)), np.empty(0, dtype=int))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, r"row 3 has NaN \(2 of 8 rows"),
        (np.inf, r"row 3 has \+inf \(2 of 8 rows"),
        (-np.inf, r"row 3 has nothing but −inf \(2 of 8 rows"),
    ],
)
def test_rows_that_are_no_logits(name, fitted, classifier, value, message):
    logits = classifier.test[:8].numpy().copy()
    logits[[3, 6]] = value
    with pytest.raises(InputError, match=message):
        fitted.score(logits)
    with pytest.raises(InputError, match=message):
        igeood.detector(name).fit(logits, np.arange(8))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (np.zeros((2, 9)), "9 columns, but .* was fitted on 10 classes"),
        (np.zeros(10), r"got \(10,\); a single sample is logits\[None, :\]"),
        (np.zeros((2, 3, 10)), r"expected shape \(N, C\)"),
        (np.zeros((2, 1)), "C must be at least 2"),
        (np.zeros((2, 10), dtype=complex), "real numbers"),
        (np.zeros((2, 10), dtype=bool), "real numbers"),
        (np.full((2, 10), "a"), "real numbers"),
        ([[1.0, 2.0], [1.0]], "cannot be read as an array"),
        (torch.zeros(2, 10).to_sparse(), "dense tensor"),
        (torch.zeros(2, 10, dtype=torch.complex64), "real numbers"),
        (None, "real numbers"),
    ],
)
def test_logits_of_the_wrong_kind(fitted, logits, message):
    with pytest.raises(InputError, match=f"^logits: .*{message}"):
        fitted.score(logits)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0] * 399, r"labels: expected 400 of them.*got shape \(399,\)"),
        ([0] * 399 + [10], r"labels: 10 at position 399 is outside 0…9 \(1 of 400"),
        ([-1] + [0] * 399, "labels: -1 at position 0 is outside 0…9"),
        ([0.5] * 400, "labels: expected integers, got float64"),
        ([True] * 400, "labels: expected integers, got bool"),
    ],
)
def test_labels_that_do_not_fit(name, classifier, labels, message):
    with pytest.raises(InputError, match=message):
        igeood.detector(name).fit(classifier.train, labels)


def test_labels_where_they_are_needed(name, classifier):
    detector = igeood.detector(name)
    if detector.needs_labels:
        with pytest.raises(InputError, match=r"labels: .* needs the true class"):
            detector.fit(classifier.train)
        with pytest.raises(InputError, match="no sample of class 7"):
            detector.fit(classifier.train[classifier.labels != 7], classifier.labels[classifier.labels != 7])
    else:
        assert detector.fit(classifier.train).score(classifier.test).isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan, np.inf, "hot"])
def test_temperatures_that_are_none(name, temperature):
    with pytest.raises(InputError, match=r"^temperature: "):
        igeood.detector(name, temperature=temperature)


def test_a_fit_that_fails_leaves_the_first_one(fitted, classifier):
    before = fitted.score(classifier.test)
    with pytest.raises(InputError):
        fitted.fit(classifier.train * torch.nan, classifier.labels)
    assert torch.equal(fitted.score(classifier.test), before)


def test_state_of_another_shape_is_refused(fitted):
    with pytest.raises(InputError, match="state: expected"):
        fitted.load_state({"something": torch.zeros(1)}, 10)
