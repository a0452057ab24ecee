"""What every method owes its users. The methods are those of the registry; a new one is held to every law by itself.

A law is a function of a case: a method with samples for it. The last tests hold detectors of their own to them, a good
one and some broken ones, to show that each law can fail.
"""

import copy
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors import METHODS, method_name, register
from igeood.detectors.base import parameter_names
from igeood.errors import GuardFileError, IgeoodWarning, InputError, NotReadyError
from igeood.guard import Guard
from igeood.outputs import Outputs, returned_blocks
from igeood.summary import Needs, Summary

LAWS = {}


def law(function):
    LAWS[function.__name__] = function
    return function


def close(scores, expected):
    torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)


def same(one, other):
    """Tensors, or tuples and mappings of them, to the bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def converted(outputs, convert):
    """Outputs with every array but the labels converted."""
    return Outputs(convert(outputs.logits), {k: convert(v) for k, v in outputs.features.items()}, outputs.labels)


@law
def a_higher_score_is_more_out_of_distribution(case):
    assert igeood.metrics.auroc(case.fitted.score(case.test), case.fitted.score(case.ood)) > 0.7


@law
def scores_are_one_finite_float64_a_sample(case):
    logits = torch.zeros(5, case.test.n_classes)
    logits[0, 0], logits[1, 1], logits[2, 2], logits[3, 3], logits[4, :-1] = 1e4, -1e4, 1e38, -torch.inf, -torch.inf
    scale = torch.tensor([1.0, 1e4, 0.0, -1e6, 1e9])[:, None]
    extremes = Outputs(logits, {k: v[:5] * scale for k, v in case.test.features.items()})
    for part in (case.test, case.test[:1], case.test[:0], extremes):
        score = case.fitted.score(part)
        assert (score.shape, score.dtype) == ((len(part),), torch.float64)
        assert score.isfinite().all()


@law
def batches_and_the_order_of_samples_do_not_matter(case):
    whole = case.fitted.score(case.test)
    for size in (1, 7, 64):
        close(torch.cat([case.fitted.score(case.test[i : i + size]) for i in range(0, len(case.test), size)]), whole)
    order, train_order = (torch.randperm(n, generator=torch.Generator().manual_seed(0)) for n in (70, 200))
    close(case.fitted.score(case.test[order]), whole[order])
    close(case.make().fit(case.train[train_order]).score(case.test), whole)


@law
def lists_numpy_arrays_and_tensors_get_the_same_scores_in_kind(case):
    expected = case.fitted.score(case.test)
    assert isinstance(expected, torch.Tensor)
    for convert in (torch.Tensor.numpy, torch.Tensor.tolist):
        given = converted(case.test, convert)
        refitted = case.make().fit(converted(case.train, convert))
        for scores in (case.fitted.score(given), refitted.score(given), case.guard.score(given)):
            assert isinstance(scores, np.ndarray)
            close(torch.from_numpy(scores), expected)


@law
def precisions_agree(case):
    """What is left is the rounding of values of size 10: 2⁻⁸ and 2⁻¹¹ of them, times the score's slope."""
    expected = case.fitted.score(case.test)
    for dtype, tolerance in ((torch.bfloat16, 5e-2), (torch.float16, 1e-2), (torch.float64, 1e-9)):
        rounded = converted(case.test, lambda t, dtype=dtype: t.to(dtype))
        trained = converted(case.train, lambda t, dtype=dtype: t.to(dtype))
        trained = trained.replace(_keys=case.train.keys)  # an input has one key, whatever the precision of its outputs
        for scores in (case.fitted.score(rounded), case.make().fit(trained).score(case.test)):
            assert scores.dtype == torch.float64
            assert (scores - expected).abs().max() <= tolerance * expected.abs().max()


@law
def the_score_has_a_finite_gradient(case):
    parts = [case.test[:5], case.train[:5], case.ood[:5]]
    logits = torch.cat([part.logits * scale for part, scale in zip(parts, (1, 1e3, 0), strict=True)]).requires_grad_()
    features = {k: torch.cat([part.features[k] for part in parts]).requires_grad_() for k in case.test.features}
    scores = case.fitted.score(Outputs(logits, features))
    gradients = torch.autograd.grad(scores.sum(), [logits, *features.values()], allow_unused=True)
    present = [gradient for gradient in gradients if gradient is not None]
    assert all(gradient.isfinite().all() for gradient in present)
    assert any((gradient[:5] != 0).any() for gradient in present)


@law
def neither_what_is_given_nor_the_original_of_a_copy_changes(case):
    before, score = copy.deepcopy((case.train, case.test)), case.fitted.score(case.test)
    copy.deepcopy(case.fitted).fit(case.train).contributions(case.test)
    copy.copy(case.fitted).fit(case.part(8)).score(case.test)
    assert torch.equal(case.fitted.score(case.test), score)
    for one, other in zip(before, (case.train, case.test), strict=True):
        same((one.logits, one.features), (other.logits, other.features))


@law
def fits_are_equal_to_the_bit(case):
    """Of the same samples: again, after a fit of others, and from their summary."""
    again, second, third = case.make(), case.make().fit(case.part(9)), case.make()
    for detector in (again.fit(case.train), second.fit(case.train), third.learn(Summary.of(case.train, case.needs))):
        same((detector.state(), detector.score(case.test)), (case.fitted.state(), case.fitted.score(case.test)))
    assert again.fit(case.train) is again


@law
def a_fit_that_fails_says_why_and_leaves_the_detector_as_it_was(case):
    detector, train = copy.copy(case.fitted), case.train
    before = detector.score(case.test)
    few = train[train.labels != 3]
    bad = {"^data: no training row": train[:0], "row 0 has NaN": train.logits * torch.nan}
    if case.needs.labels:
        bad[r"^labels: no sample of class 3 \(1 of 5 classes have none\); give every"] = few
        bad["^labels: this method needs the class of each row; give"] = few.replace(labels=None)
    else:
        assert case.make().fit(few.replace(labels=None)).score(case.test).isfinite().all()
    if case.needs.blocks(train.features):
        bad["^outputs: no features to learn from; give"] = Outputs(train.logits, labels=train.labels)
    for said, outputs in bad.items():
        with pytest.raises(InputError, match=said):
            detector.fit(outputs)
    assert torch.equal(detector.score(case.test), before)


@law
def what_cannot_be_scored_is_refused_by_name(case):
    kind = case.kind.__name__
    for call in (lambda d: d.score(case.test), lambda d: d.contributions(case.test), lambda d: d.state()):
        with pytest.raises(NotReadyError, match=rf"^{kind}: not fitted yet; call fit\(logits"):
            call(case.make())
    with pytest.raises(InputError, match=rf"logits: 4 columns, but {kind} was fitted on 5 classes; give"):
        case.fitted.score(Outputs(case.test.logits[:, :4], case.test.features))
    for block in case.needs.blocks(case.test.features):
        others = {k: v for k, v in case.test.features.items() if k != block}
        with pytest.raises(InputError, match=rf"^outputs: {kind} needs the features of layer .*; these have "):
            case.fitted.score(Outputs(case.test.logits, others))
        wider = torch.cat([case.test.features[block]] * 2, dim=1)
        with pytest.raises(InputError, match=r"^features\[.*: \d+ channels, but .* was fitted on \d+; give"):
            case.fitted.score(Outputs(case.test.logits, {**others, block: wider}))


@law
def names_and_options_lead_back_to_the_detector(case):
    detector, method = case.make(), METHODS[case.name]
    assert method_name(detector) == case.name
    assert (bool(method.title), len(method.style)) == (True, 3)
    layers = set(case.needs.blocks(case.test.features)) - set(returned_blocks(case.needs.returns))
    assert method.needs_layers == bool(layers)
    assert type(detector)(**detector.params()).params() == detector.params()
    assert all(f"{option}=" in repr(detector) for option in parameter_names(case.kind))
    assert {**method.fixed} == {name: detector.params()[name] for name in method.fixed}
    with pytest.raises(InputError, match=f"^nonsense: '{case.name.replace('+', '.')}' has no such option"):
        igeood.detector(case.name, nonsense=1)


@law
def state_goes_out_and_in_again_to_the_bit(case):
    state = case.fitted.state()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    for order in (sorted(state), sorted(state, reverse=True)):
        tensors = {key: state[key].clone() for key in order}
        loaded = case.make().load_state(tensors, case.fitted.n_classes_, case.fitted.widths_)
        assert torch.equal(loaded.score(case.test), case.fitted.score(case.test))
        assert loaded.columns_ == case.fitted.columns_


@law
def a_guard_is_saved_and_loaded_to_the_bit(case):
    with tempfile.TemporaryDirectory() as folder:
        case.guard.save(Path(folder) / "guard")
        loaded = igeood.load(Path(folder) / "guard")
    assert (type(loaded.detector), loaded.detector.params()) == (case.kind, case.fitted.params())
    same(vars(loaded.predict(case.test)), vars(case.guard.predict(case.test)))


def tensors_of(case, part):
    """What the plain module of a case's detector takes."""
    return (part.logits, *(part.features[block] for block in case.fitted.widths_))


@law
def the_plain_module_gives_the_same_scores_whatever_the_size_of_values(case):
    huge = torch.tensor([1.0, 1e4, 0.0, -1e6, 1e9])[:, None]
    extremes = Outputs(
        case.test.logits[:5] * huge.sign() * 1e3, {k: v[:5] * huge for k, v in case.test.features.items()}
    )
    judge = case.fitted.judge()
    for part in (case.test, case.ood, case.train, case.test[:1], extremes):
        expected = case.fitted.score(part)
        torch.testing.assert_close(judge(*tensors_of(case, part)), expected, rtol=1e-9, atol=1e-9)


@law
def a_graph_gives_the_same_verdicts(case):
    onnxruntime = pytest.importorskip("onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "guard.onnx"
        case.guard.export(path, example=case.test[:3])
        session = onnxruntime.InferenceSession(str(path))
    names = [value.name for value in session.get_inputs()]
    for part in (case.ood, case.test[:7], case.test[:1]):
        given = dict(zip(names, (value.numpy() for value in tensors_of(case, part)), strict=True))
        verdict, graph = case.guard.predict(part), session.run(["score", "p_value", "is_ood", "label"], given)
        for value, name in zip(graph, ("score", "p_value", "is_ood", "label"), strict=True):
            close(torch.from_numpy(value).double(), getattr(verdict, name).double())


@law
def declared_probabilities_are_their_logarithms(case):
    if "probabilities" not in METHODS[case.name].options:
        return
    if case.name == "energy":
        with pytest.raises(InputError, match=r"^probabilities: energy needs logits"):
            igeood.detector(case.name, probabilities=True)
        return
    detector = igeood.detector(case.name, probabilities=True)
    chances = [part.replace(logits=part.logits.double().softmax(1)) for part in (case.train, case.test)]
    logs = [part.replace(logits=part.logits.log()) for part in chances]
    close(detector.fit(chances[0]).score(chances[1]), case.make().fit(logs[0]).score(logs[1]))
    with pytest.warns(IgeoodWarning, match="200 of 200 samples and training samples have equal outputs"):
        Guard(detector).fit(chances[0]).calibrate(chances[0])
    for wrong in ([[0.9, 0, 0, 0, 0]], [[1.5, -0.5, 0, 0, 0]]):
        with pytest.raises(InputError, match=r"^probabilities: row 0 has a negative entry, or a sum.*; renormalise"):
            detector.score(Outputs(wrong, {k: v[:1] for k, v in case.test.features.items()}))


@law
def contributions_sum_to_the_score_and_change_with_the_input(case):
    told, other = (case.guard.explain(part, top=3) for part in (case.test, case.ood))
    assert told.contributions.shape == (len(case.test), len(told.columns))
    assert len(set(told.columns)) == len(told.columns)
    close(told.contributions.sum(dim=1), case.guard.score(case.test))
    close(told.score, case.guard.score(case.test))
    assert (told.contributions != other.contributions).any(dim=1).all()
    assert isinstance(case.guard.explain(converted(case.test, torch.Tensor.numpy)).contributions, np.ndarray)
    assert str(told).count("sample ") == len(case.test)


@law
def reasons_name_the_nearest_class_and_distinct_channels(case):
    told, other = (case.guard.explain(part, top=3) for part in (case.test, case.ood))
    for layer, nearest in told.nearest.items():
        assert (nearest == case.test.labels).double().mean() > 0.99, layer
    assert told.channels.keys() == told.channel_shares.keys()
    for layer, shares in told.channel_shares.items():
        channels, width = told.channels[layer], case.test.features[layer].shape[1]
        assert shares.shape == channels.shape == (len(case.test), 3)
        assert all(len(set(row) & set(range(width))) == 3 for row in channels.tolist())
        assert ((shares >= 0) & (shares <= 1 + 1e-12)).all()
        assert (shares.diff(dim=1) <= 0).all()
        whole = case.guard.explain(case.test, top=width).channel_shares[layer]
        close(whole.sum(dim=1), torch.ones(len(case.test), dtype=whole.dtype))
        assert (shares != other.channel_shares[layer]).any(dim=1).all()
    if told.centroid_distance is not None:
        assert (told.centroid_distance >= 0).all()
        assert torch.equal(told.centroid_distance.argmin(dim=1), case.test.labels)


# of each family one, of which `make test` makes the graph
GRAPHED = {
    "fisher-rao-product",
    "gen",
    "igeood+",
    "igeood-logits",
    "kl-min",
    "knn",
    "mahalanobis",
    "vim",
}  # of each family
CASES = [
    pytest.param(name, method, marks=[pytest.mark.slow] * (name.startswith("a_graph") and method not in GRAPHED))
    for method in sorted(METHODS)
    for name in LAWS
]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_law(name, method, make_case):
    LAWS[name](make_case(method))


class Mine(igeood.Detector):
    """A user's own: the squared distance to the nearest class's mean in the last layer."""

    needs = Needs(layers="last", labels=True, sums="mean")
    power: float = 2.0

    def _learn(self, summary):
        self.mean_ = {block: sums.mean for block, sums in summary.sums.items()}

    def _distances(self, batch):
        (mean,) = self.mean_.values()
        return (self._last_features(batch).double()[:, None] - mean).abs().pow(self.power)  # (N, C, k)

    def _score(self, batch):
        return self._distances(batch).sum(dim=2).amin(dim=1)

    def _explain(self, batch, top):
        (block,) = self.mean_
        parts = self._distances(batch)
        nearest = parts.sum(dim=2).argmin(dim=1)
        own = parts[torch.arange(len(parts)), nearest]
        best = (own / own.sum(dim=1, keepdim=True)).topk(min(top, own.shape[1]), dim=1)
        return {"nearest": {block: nearest}, "channels": {block: best.indices}, "channel_shares": {block: best.values}}


def constant_reasons(self, batch, top):
    reasons, channels = Mine._explain(self, batch, top), torch.arange(top).expand(len(batch), top)
    constant = {"channels": channels, "channel_shares": 0.5 ** (channels + 1.0)}
    return reasons | {name: dict.fromkeys(self.mean_, value) for name, value in constant.items()}


def chancy(self, summary):
    Mine._learn(self, summary)
    self.mean_ = {block: mean + 1e-3 * torch.randn_like(mean) for block, mean in self.mean_.items()}


def forgetful(self, summary):
    Mine._learn(self, summary)
    self.size = 2.0  # a name that does not end in an underscore: not saved


# what is wrong with a detector, and the law that it breaks
BROKEN = {
    "a_higher_score_is_more_out_of_distribution": {"_score": lambda self, batch: -Mine._score(self, batch)},
    "batches_and_the_order_of_samples_do_not_matter": {"_score": lambda self, b: Mine._score(self, b) / len(b)},
    "fits_are_equal_to_the_bit": {"_learn": chancy},
    "state_goes_out_and_in_again_to_the_bit": {"_learn": forgetful, "_score": lambda s, b: s.size * Mine._score(s, b)},
    "the_score_has_a_finite_gradient": {"_score": lambda self, batch: Mine._score(self, batch).detach()},
    "contributions_sum_to_the_score_and_change_with_the_input": {
        "_contributions": lambda _, batch: torch.ones(len(batch), 1, dtype=torch.float64)
    },
    "reasons_name_the_nearest_class_and_distinct_channels": {"_explain": constant_reasons},
}


@pytest.fixture
def registered(make_case):
    """Register a class for one test."""

    def add(kind, name="my-method", **options):
        register(name, title="Mine", **options)(kind)
        return make_case(name)

    with patch.dict(METHODS):
        yield add


@pytest.mark.parametrize("name", LAWS)
def test_a_detector_of_ones_own_is_held_to_every_law(name, registered):
    LAWS[name](registered(Mine))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_detectors_are_caught(name, registered):
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        LAWS[name](registered(type("Broken", (Mine,), BROKEN[name])))


def test_a_guard_of_a_method_that_is_not_registered_here(registered, tmp_path):
    case = registered(Mine, "mine-elsewhere")
    case.guard.save(tmp_path / "guard")
    del METHODS["mine-elsewhere"]
    with pytest.raises(GuardFileError, match=r"of method 'mine-elsewhere', which is not registered here; import the"):
        igeood.load(tmp_path / "guard")
    with pytest.raises(InputError, match=r"^detector: Mine is not registered; decorate its class with"):
        case.guard.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_names_are_taken_once(registered):
    with pytest.raises(InputError, match=r"^name: 'msp' is MaxSoftmax already; choose another"):
        registered(Mine, "msp")
    registered(Mine)
    registered(Mine, "my-other", fixed={"power": 1.0})  # a class may have several names
    registered(Mine)  # and be imported again
    assert igeood.detector("my-other").power == 1.0
    assert method_name(Mine(power=1.0)) == "my-method"
    with pytest.raises(InputError, match=r"^power: 'my-other' has no such option"):
        igeood.detector("my-other", power=3.0)
