"""What every detector of the catalogue owes its users. New methods are found by themselves."""

import copy

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors.base import parameter_names
from igeood.errors import InputError, NotReadyError
from igeood.guard import Guard
from igeood.outputs import Outputs

METHODS = sorted(igeood.METHODS)
BLACK = [name for name in METHODS if not igeood.METHODS[name].needs_layers]


@pytest.fixture(params=METHODS)
def name(request):
    return request.param


@pytest.fixture(params=BLACK)
def black(request):
    return request.param


@pytest.fixture
def fitted(name, known):
    return igeood.detector(name).fit(known.train)


@pytest.fixture
def fitted_black(black, classifier):
    return igeood.detector(black).fit(classifier.train, classifier.labels)


def converted(outputs: Outputs, convert) -> Outputs:
    """Outputs with every array but the labels converted."""
    return Outputs(convert(outputs.logits), {k: convert(v) for k, v in outputs.features.items()}, outputs.labels)


def test_a_higher_score_is_more_out_of_distribution(fitted, known):
    assert igeood.metrics.auroc(fitted.score(known.test), fitted.score(known.ood)) > 0.9


def test_scores_are_one_float64_a_sample(fitted, known):
    score = fitted.score(known.test)
    assert score.shape == (len(known.test),)
    assert score.dtype == torch.float64
    assert score.isfinite().all()


def test_fitting_twice_is_fitting_once(name, fitted, known, make_known_):
    once = fitted.score(known.test)
    twice = igeood.detector(name).fit(make_known_(10, seed=3).train).fit(known.train)
    assert torch.equal(twice.score(known.test), once)


def test_the_order_of_samples_does_not_matter(name, fitted, known):
    order = torch.randperm(len(known.train), generator=torch.Generator().manual_seed(0))
    shuffled = igeood.detector(name).fit(known.train[order])
    torch.testing.assert_close(shuffled.score(known.test), fitted.score(known.test), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fitted.score(known.test[order]), fitted.score(known.test)[order], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_batches_do_not_matter(name, fitted, known, size):
    pieces = [slice(i, i + size) for i in range(0, 400, size)]
    parts = torch.cat([fitted.score(known.test[rows]) for rows in pieces])
    torch.testing.assert_close(parts, fitted.score(known.test), rtol=1e-9, atol=1e-11)
    streamed = igeood.detector(name).fit_batches(known.train[rows] for rows in pieces)
    torch.testing.assert_close(streamed.score(known.test), fitted.score(known.test), rtol=1e-6, atol=1e-6)


def test_inputs_are_not_changed(name, known):
    before = [copy.deepcopy(part) for part in (known.train, known.test)]
    igeood.detector(name).fit(known.train).score(known.test)
    for one, other in zip(before, (known.train, known.test), strict=True):
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.labels, other.labels)
        assert all(torch.equal(one.features[k], other.features[k]) for k in one.features)


def test_numpy_is_torch(name, fitted, known):
    by_numpy = igeood.detector(name).fit(converted(known.train, lambda t: t.numpy()))
    score = by_numpy.score(converted(known.test, lambda t: t.numpy()))
    assert isinstance(score, np.ndarray)
    assert np.array_equal(score, fitted.score(known.test).numpy())


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # the rounding of values of size 10 is what is left: 2⁻⁸, 2⁻¹¹ and 2⁻²⁴ of them, times the temperature's slope
    [(torch.bfloat16, 5e-2), (torch.float16, 1e-2), (torch.float32, 1e-9), (torch.float64, 1e-9)],
)
def test_precisions_agree(name, fitted, known, dtype, tolerance):
    score = fitted.score(converted(known.test, lambda t: t.to(dtype)))
    assert score.dtype == torch.float64
    expected = fitted.score(known.test)
    assert (score - expected).abs().max() <= tolerance * expected.abs().max()
    refitted = igeood.detector(name).fit(converted(known.train, lambda t: t.to(dtype)))
    assert (refitted.score(known.test) - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_any_device(fitted, known, device):
    if not getattr(torch, device).is_available():
        pytest.skip(f"no {device} on this machine")
    score = fitted.score(converted(known.test, lambda t: t.to(device)))
    assert score.device.type == device
    torch.testing.assert_close(score.cpu().double(), fitted.score(known.test), rtol=1e-5, atol=1e-5)


def test_score_is_differentiable(fitted, known):
    logits = torch.cat([known.test.logits[:5], known.train.logits[:5] * 1e3, torch.zeros(1, 10)]).requires_grad_()
    features = {k: torch.cat([v[:5], v[:5] * 1e3, v[:1]]).requires_grad_() for k, v in known.test.features.items()}
    sources = [logits, *features.values()]
    gradients = torch.autograd.grad(fitted.score(Outputs(logits, features)).sum(), sources, allow_unused=True)
    present = [g for g in gradients if g is not None]
    assert present
    assert all(g.isfinite().all() for g in present)
    assert any((g[:5] != 0).any() for g in present)


def test_extremes_and_masked_classes_are_finite(fitted, known):
    logits = torch.zeros(4, 10)
    logits[0, 0], logits[1, 1], logits[2, 2], logits[3, 3] = 1e4, -1e4, 1e38, -torch.inf
    features = {k: v[:4] * torch.tensor([1.0, 1e4, 0.0, -1e6])[:, None] for k, v in known.test.features.items()}
    assert fitted.score(Outputs(logits, features)).isfinite().all()


def test_state_goes_into_a_file_and_back(name, fitted, known, tmp_path):
    guard = Guard(igeood.detector(name)).fit(known.train).calibrate(known.held_out)
    guard.save(tmp_path / "guard.safetensors")
    loaded = igeood.load(tmp_path / "guard.safetensors")
    assert type(loaded.detector) is type(fitted)
    assert loaded.detector.params() == fitted.params()
    assert torch.equal(loaded.score(known.test), fitted.score(known.test))
    assert loaded.detector.notes_ == fitted.notes_


def test_copies_are_independent(fitted, known, make_known_):
    before = fitted.score(known.test)
    other = copy.deepcopy(fitted)
    other.fit(make_known_(5).train)
    assert torch.equal(fitted.score(known.test), before)


def test_options_are_kept_under_their_names(name, fitted):
    for option in parameter_names(type(fitted)):
        assert hasattr(fitted, option)
    assert type(fitted)(**fitted.params()).params() == fitted.params()
    assert all(f"{option}=" in repr(fitted) for option in parameter_names(type(fitted)))


def test_scoring_before_fitting(name, known):
    with pytest.raises(NotReadyError, match="call fit"):
        igeood.detector(name).score(known.test)
    with pytest.raises(NotReadyError):
        igeood.detector(name).state()


def test_empty_batches(name, fitted, known):
    assert fitted.score(known.test[:0]).shape == (0,)
    assert fitted.score(known.test[:0]).dtype == torch.float64
    with pytest.raises(InputError, match="no sample to fit"):
        igeood.detector(name).fit(known.train[:0])


def test_a_width_that_is_not_the_fitted_one(fitted, make_known_):
    with pytest.raises(InputError, match=r"9 columns, but .* was fitted on 10 classes"):
        fitted.score(make_known_(9, n=90).test)


def test_a_class_without_sample_is_named(name, known):
    kept = known.train[known.train.labels != 7]
    detector = igeood.detector(name)
    if detector.needs_labels:
        with pytest.raises(InputError, match="no sample of class 7"):
            detector.fit(kept)
        with pytest.raises(InputError, match=r"labels: .* needs the true class"):
            detector.fit(Outputs(kept.logits, kept.features))
    else:
        assert detector.fit(Outputs(kept.logits)).score(known.test).isfinite().all()


def test_a_fit_that_fails_leaves_the_first_one(fitted, known):
    before = fitted.score(known.test)
    with pytest.raises(InputError):
        fitted.fit(known.train.logits * torch.nan, known.train.labels)
    with pytest.raises(InputError):
        fitted.fit(known.train.logits[:, :1])
    assert torch.equal(fitted.score(known.test), before)


def test_state_of_another_shape_is_refused(fitted):
    with pytest.raises(InputError, match="state: expected"):
        copy.copy(fitted).load_state({**fitted.state(), "something": torch.zeros(1)}, 10)


# -- what holds for detectors of bare logits


def test_lists_and_integers_are_numbers(fitted_black):
    logits = np.array([[3, 0, 0, 0, 0, 0, 0, 0, 0, 1]])
    assert fitted_black.score(logits)[0] == fitted_black.score(logits.astype(float).tolist())[0]


def test_probabilities_are_logits_once_declared(black, classifier):
    if black == "energy":
        with pytest.raises(InputError, match="energy needs logits"):
            igeood.detector(black, probabilities=True)
        return
    train, test = classifier.train.double().softmax(1), classifier.test.double().softmax(1)
    by_logits = igeood.detector(black).fit(train.log(), classifier.labels).score(test.log())
    found = igeood.detector(black, probabilities=True).fit(train, classifier.labels).score(test)
    torch.testing.assert_close(found, by_logits, rtol=1e-9, atol=1e-9)
    half = igeood.detector(black, probabilities=True).fit(train.half(), classifier.labels)
    assert half.score(test.half()).isfinite().all()


def test_rows_that_are_no_probabilities(black, classifier):
    if black == "energy":
        pytest.skip("energy refuses probabilities altogether")
    detector = igeood.detector(black, probabilities=True)
    with pytest.raises(InputError, match=r"row 0 .* \(\d+ of 400 rows"):
        detector.fit(classifier.train, classifier.labels)
    detector.fit(classifier.train.softmax(1), classifier.labels)
    with pytest.raises(InputError, match=r"row 1 sums to 0\.9, not"):
        detector.score([[1.0] + [0.0] * 9, [0.9] + [0.0] * 9])
    with pytest.raises(InputError, match="row 0 has a negative entry"):
        detector.score([[1.5, -0.5] + [0.0] * 8])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, r"row 3 has NaN \(2 of 8 rows"),
        (np.inf, r"row 3 has \+inf \(2 of 8 rows"),
        (-np.inf, r"row 3 has nothing but −inf \(2 of 8 rows"),
    ],
)
def test_rows_that_are_no_logits(black, fitted_black, classifier, value, message):
    logits = classifier.test[:8].numpy().copy()
    logits[[3, 6]] = value
    with pytest.raises(InputError, match=message):
        fitted_black.score(logits)
    with pytest.raises(InputError, match=message):
        igeood.detector(black).fit(logits, np.arange(8))


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
def test_logits_of_the_wrong_kind(fitted_black, logits, message):
    with pytest.raises(InputError, match=f"^logits: .*{message}"):
        fitted_black.score(logits)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0] * 399, r"labels: expected 400 of them.*got shape \(399,\)"),
        ([0] * 399 + [10], r"labels: 10 at position 399 is outside 0…9 \(1 of 400"),
        ([-1] + [0] * 399, "labels: -1 at position 0 is outside 0…9"),
        ([0.5] * 400, r"labels: expected integers, .* got float64"),
        ([True] * 400, r"labels: expected integers, .* got bool"),
    ],
)
def test_labels_that_do_not_fit(black, classifier, labels, message):
    with pytest.raises(InputError, match=message):
        igeood.detector(black).fit(classifier.train, labels)


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan, np.inf, "hot"])
def test_temperatures_that_are_none(black, temperature):
    with pytest.raises(InputError, match=r"^temperature: "):
        igeood.detector(black, temperature=temperature)
