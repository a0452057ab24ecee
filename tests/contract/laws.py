"""What every method owes its users: a law is a function of a case, a method with samples for it."""

import copy
import warnings
from contextvars import copy_context
from functools import cached_property
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
import torch

import igeood
from igeood.detectors import method_name
from igeood.errors import InputError, NotReadyError
from igeood.geometry.precision import exporting
from igeood.guard import Guard
from igeood.outputs import Outputs
from igeood.summary import BUDGET, Summary

LAWS = {}
CLASSES = 5
LAYERS = {"early": 4, "block:late": 6}


def make_outputs(seed: int, rows: int = 200, *, is_ood: bool = False) -> Outputs:
    """Confident logits and separated Gaussians in each layer; for OOD samples unsure ones, between the classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % CLASSES
    logits = torch.randn(rows, CLASSES, generator=generator)
    logits[torch.arange(rows), labels] += 0.0 if is_ood else 6.0 + 2.0 * torch.rand(rows, generator=generator)
    features = {}
    for layer, width in LAYERS.items():
        means = torch.full((CLASSES, width), 2.5) if is_ood else 6.0 * torch.eye(CLASSES, width) + 1.0
        features[layer] = means[labels] + torch.randn(rows, width, generator=generator)
    return Outputs(logits, features, None if is_ood else labels)


class Case:
    """A method, and samples for it; what is fitted and scored is kept."""

    def __init__(self, name, suited):
        self.name, self.method, self.suited = name, igeood.METHODS[name], suited
        self.needs = self.method.needs
        self.train, self.held_out = self.part(0), self.part(1)
        self.test, self.ood = self.part(2, 70), self.part(3, 70, is_ood=True)

    def part(self, *size, **options):
        """More samples."""
        return self.suited(make_outputs(*size, **options), self.needs)

    def make(self):
        return igeood.detector(self.name)

    @cached_property
    def fitted(self):
        return self.make().fit(self.train)

    @cached_property
    def scores(self):
        """Of the test samples."""
        return self.fitted(self.test)

    @cached_property
    def guard(self):
        return Guard(self.make()).fit(self.train).calibrate(self.held_out)


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
    features = {block: convert(value) for block, value in outputs.features.items()}
    return Outputs(convert(outputs.logits), features, outputs.labels)


def extremes(case):
    """Five rows of huge, masked and vanishing values."""
    logits = torch.zeros(5, case.test.n_classes)
    logits[range(4), range(4)] = torch.tensor([1e4, -1e4, 1e38, -torch.inf])
    logits[4, :-1] = -torch.inf
    scale = torch.tensor([1.0, 1e4, 0.0, -1e6, 1e9])[:, None]
    return Outputs(logits, {block: value[:5] * scale for block, value in case.test.features.items()})


def refused(function, *arguments):
    """The argument that an error names."""
    with pytest.raises(InputError) as caught:
        function(*arguments)
    return caught.value.argument


@law
def a_higher_score_is_more_out_of_distribution(case):
    assert igeood.metrics.auroc(case.scores, case.fitted(case.ood)) > 0.7


@law
def scores_are_one_finite_float64_a_sample(case):
    for part in (case.test, case.test[:1], case.test[:0], extremes(case)):
        scores = case.fitted(part)
        assert (scores.shape, scores.dtype) == ((len(part),), torch.float64)
        assert scores.isfinite().all()


@law
def batches_and_the_order_of_samples_do_not_matter(case):
    for size in (1, 7, 64):
        batches = [case.test[start : start + size] for start in range(0, len(case.test), size)]
        close(torch.cat([case.fitted(batch) for batch in batches]), case.scores)
    order, train_order = (torch.randperm(n, generator=torch.Generator().manual_seed(0)) for n in (70, 200))
    close(case.fitted(case.test[order]), case.scores[order])
    close(case.make().fit(case.train[train_order])(case.test), case.scores)


@law
def shards_add_up_to_the_whole(case):
    """In any order, with and without room for all rows."""
    for budget in (BUDGET, 8000):
        whole = case.make().learn(Summary.of(case.train, case.needs, budget=budget))(case.test)
        parts = [Summary.of(case.train[a:b], case.needs, budget=budget) for a, b in ((0, 30), (30, 120), (120, 200))]
        for one, two, three in list(permutations(parts))[::2]:
            close(case.make().learn(one + two + three)(case.test), whole)


@law
def arrays_get_the_same_scores_in_their_own_kind(case):
    assert isinstance(case.scores, torch.Tensor)
    for convert in (torch.Tensor.numpy, torch.Tensor.tolist):
        test = converted(case.test, convert)
        refitted = case.make().fit(converted(case.train, convert))
        for scores in (case.fitted(test), refitted(test), case.guard.score(test)):
            assert isinstance(scores, np.ndarray)
            close(torch.from_numpy(scores), case.scores)


@law
def precisions_agree(case):
    """What is left is the rounding of values of size 10: 2⁻⁸ and 2⁻¹¹ of them, times the score's slope."""
    for dtype, tolerance in ((torch.bfloat16, 5e-2), (torch.float16, 1e-2), (torch.float64, 1e-9)):
        test, train = (converted(part, lambda value, dtype=dtype: value.to(dtype)) for part in (case.test, case.train))
        train = train.replace(_keys=case.train.keys)  # an input has one key, whatever the precision of its outputs
        for scores in (case.fitted(test), case.make().fit(train)(case.test)):
            assert scores.dtype == torch.float64
            assert (scores - case.scores).abs().max() <= tolerance * case.scores.abs().max()


@law
def the_score_has_a_finite_gradient(case):
    parts = [case.test[:5], case.train[:5], case.ood[:5]]
    logits = torch.cat([part.logits * scale for part, scale in zip(parts, (1, 1e3, 0), strict=True)]).requires_grad_()
    features = {b: torch.cat([part.features[b] for part in parts]).requires_grad_() for b in case.test.features}
    scores = case.fitted(Outputs(logits, features))
    gradients = torch.autograd.grad(scores.sum(), [logits, *features.values()], allow_unused=True)
    present = [gradient for gradient in gradients if gradient is not None]
    assert all(gradient.isfinite().all() for gradient in present)
    assert any((gradient[:5] != 0).any() for gradient in present)


@law
def neither_what_is_given_nor_the_original_of_a_copy_changes(case):
    before = copy.deepcopy((case.train, case.test))
    copy.deepcopy(case.fitted).fit(case.train).terms(case.test)
    copy.copy(case.fitted).fit(case.part(8))(case.test)
    assert torch.equal(case.fitted(case.test), case.scores)
    for one, other in zip(before, (case.train, case.test), strict=True):
        same((one.logits, one.features), (other.logits, other.features))


@law
def fits_are_equal_to_the_bit(case):
    """Of the same samples: again, after a fit of others, and from their summary."""
    again, after, learnt = case.make(), case.make().fit(case.part(9)), case.make().fit(case.part(9))
    after(case.test)  # what is derived from an earlier fit is forgotten with it
    assert again.fit(case.train) is again
    for detector in (again, after.fit(case.train), learnt.learn(Summary.of(case.train, case.needs))):
        same((detector.state(), detector(case.test)), (case.fitted.state(), case.scores))


@law
def a_fit_that_fails_says_why_and_leaves_the_detector_as_it_was(case):
    detector = copy.copy(case.fitted)
    train = case.train
    assert refused(detector.fit, train[:0]) == "data"
    assert refused(detector.fit, train.logits * torch.nan) == "logits"
    if case.needs.labels:
        assert refused(detector.fit, train.replace(labels=None)) == "labels"
    else:
        assert case.make().fit(train[train.labels != 3].replace(labels=None))(case.test).isfinite().all()
    if case.needs.must_read_layers:
        assert refused(detector.fit, Outputs(train.logits, labels=train.labels)) == "outputs"
    assert torch.equal(detector(case.test), case.scores)


@law
def a_class_without_rows_is_left_out_with_a_finding(case):
    few = case.train[case.train.labels != 3]
    with warnings.catch_warnings(action="ignore"):
        guard = Guard(case.make()).fit(few)
    assert guard.score(case.test).isfinite().all()
    assert [finding.code for finding in guard.health].count("class-without-rows") == bool(case.needs.labels)
    for nearest in guard.explain(case.test).nearest.values():
        assert (nearest != 3).all()


@law
def a_term_that_grows_never_lowers_the_score(case):
    """Where a score is made of values by name."""
    for column in range(case.fitted.values(case.test).shape[1] if hasattr(case.fitted, "values") else 0):
        for step in (1e-3, 1.0, 100.0):
            values = case.fitted.values(case.test)
            values[:, column] += step
            with patch.object(type(case.fitted), "values", lambda *_, values=values: values):
                assert (case.fitted.score(case.test) >= case.scores - 1e-12).all()


@law
def what_cannot_be_scored_is_refused_by_name(case):
    with pytest.raises(NotReadyError):
        case.make()(case.test)
    logits, features = case.test.logits, case.test.features
    assert refused(case.fitted, Outputs(logits[:, :4], features)) == "logits"
    for block in case.needs.blocks(features):
        others = {name: value for name, value in features.items() if name != block}
        assert refused(case.fitted, Outputs(logits, others)) == "outputs"
        wider = torch.cat([features[block]] * 2, dim=1)
        assert refused(case.fitted, Outputs(logits, {**others, block: wider})) == f"features[{block!r}]"


@law
def names_and_options_lead_back_to_the_detector(case):
    detector = case.make()
    params = detector.params()
    assert method_name(detector) == case.name
    assert case.method.needs_layers == (bool(case.needs.blocks(case.test.features)) and case.needs.layers != "any")
    assert type(detector)(**params).params() == params
    assert all(f"{option}=" in repr(detector) for option in params)
    assert case.method.fixed.items() <= params.items()


@law
def options_are_checked_and_named(case):
    for option in (*case.method.options, "nonsense", *case.method.fixed):
        assert refused(lambda option=option: igeood.detector(case.name, **{option: object()})) == option


@law
def files_hold_the_detector_to_the_bit(case):
    """Its state in any order, and a guard's file."""
    state = case.fitted.state()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    for order in (sorted(state), sorted(state, reverse=True)):
        tensors = {key: state[key].clone() for key in order}
        loaded = case.make().load_state(tensors, case.fitted.n_classes_, case.fitted.widths_)
        assert torch.equal(loaded(case.test), case.scores)
        assert loaded.term_names == case.fitted.term_names
    with TemporaryDirectory() as folder:
        case.guard.save(Path(folder) / "guard")
        guard = igeood.load(Path(folder) / "guard")
    assert (type(guard.detector), guard.detector.params()) == (case.method.kind, case.fitted.params())
    same(vars(guard.predict(case.test)), vars(case.guard.predict(case.test)))


@law
def a_bad_row_is_refused_alone_and_others_by_the_threshold(case):
    fine = torch.arange(len(case.test)) != 3
    logits = torch.where(fine[:, None], case.test.logits, torch.nan)
    verdict = case.guard.predict(Outputs(logits, case.test.features, on_error="refuse"), on_error="refuse")
    close(verdict.score[fine], case.scores[fine])
    assert torch.equal(verdict.is_ood[fine], verdict.score[fine] > case.guard.threshold)
    assert ((verdict.p_value > 0) & (verdict.p_value <= 1)).all()
    assert torch.equal(verdict.label[fine], case.test.logits.argmax(dim=1)[fine])
    assert verdict.is_ood[3]
    assert [reason is None for reason in verdict.reason] == fine.tolist()
    assert case.guard.predict(case.held_out).is_ood.double().mean() <= 0.05


@law
def scores_are_the_same_while_a_graph_is_traced_whatever_the_size_of_values(case):
    context = copy_context()
    context.run(exporting.set, True)
    for part in (case.test, case.ood, case.test[:1], extremes(case)):
        close(context.run(case.fitted.score, part), case.fitted(part))


@law
def a_graph_gives_the_same_verdicts(case):
    onnxruntime = pytest.importorskip("onnxruntime")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "guard.onnx"
        try:
            case.guard.export(path, example=case.test[:3])
        except InputError as error:
            pytest.fail(str(error))
        session = onnxruntime.InferenceSession(str(path))
    outputs = ["score", "p_value", "is_ood", "label"]
    for part in (case.ood, case.test[:7], case.test[:1]):
        tensors = (part.logits, *(part.features[block] for block in case.fitted.widths_))
        arrays = {each.name: value.numpy() for each, value in zip(session.get_inputs(), tensors, strict=True)}
        verdict = case.guard.predict(part)
        for name, value in zip(outputs, session.run(outputs, arrays), strict=True):
            close(torch.from_numpy(value).double(), getattr(verdict, name).double())


@law
def declared_probabilities_are_their_logarithms(case):
    if "probabilities" not in case.method.options or case.name == "energy":  # which softmax removes
        return
    detector = igeood.detector(case.name, probabilities=True)
    train, test = (part.replace(logits=part.logits.double().softmax(1)) for part in (case.train, case.test))
    logs = [part.replace(logits=part.logits.log()) for part in (train, test)]
    close(detector.fit(train)(test), case.make().fit(logs[0])(logs[1]))
    for row in ([0.9, 0, 0, 0, 0], [1.5, -0.5, 0, 0, 0]):
        wrong = Outputs([row], {block: value[:1] for block, value in case.test.features.items()})
        assert refused(detector, wrong) == "probabilities"


@law
def terms_sum_to_the_score_and_change_with_the_input(case):
    reasons, other = (case.guard.explain(part, top=3) for part in (case.test, case.ood))
    assert reasons.contributions.shape == (len(case.test), len(set(reasons.columns)))
    close(reasons.contributions.sum(dim=1), case.scores)
    assert (reasons.contributions != other.contributions).any(dim=1).all()
    assert isinstance(case.guard.explain(converted(case.test, torch.Tensor.numpy)).contributions, np.ndarray)


@law
def reasons_name_the_nearest_class_and_distinct_channels(case):
    reasons, other = (case.guard.explain(part, top=3) for part in (case.test, case.ood))
    for layer, nearest in reasons.nearest.items():
        assert (nearest == case.test.labels).double().mean() > 0.99, layer
    assert reasons.channels.keys() == reasons.channel_shares.keys()
    for layer, shares in reasons.channel_shares.items():
        channels, width = reasons.channels[layer], case.test.features[layer].shape[1]
        assert shares.shape == channels.shape == (len(case.test), 3)
        assert all(len(set(row) & set(range(width))) == 3 for row in channels.tolist())
        assert ((shares >= 0) & (shares <= 1 + 1e-12)).all()
        assert (shares.diff(dim=1) <= 0).all()
        whole = case.guard.explain(case.test, top=width).channel_shares[layer]
        close(whole.sum(dim=1), torch.ones(len(case.test), dtype=whole.dtype))
        assert (shares != other.channel_shares[layer]).any(dim=1).all()
    if reasons.centroid_distance is not None:
        assert torch.equal(reasons.centroid_distance.argmin(dim=1), case.test.labels)
