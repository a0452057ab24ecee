"""Every method of the registry is held to every law; a new one is, too, by itself.

A good detector of a user's own keeps every law as well, and for each law there is a detector that breaks it.
"""

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch

import igeood
from igeood.detectors import METHODS, method_name, register
from igeood.detectors.logits import LogitsDetector
from igeood.errors import GuardFileError
from igeood.geometry.precision import exporting
from igeood.outputs import Outputs
from igeood.summary import ClassSums, Needs

from .laws import LAWS, Case, refused


@igeood.options
class Mine(igeood.Detector):
    """A user's own: the distance to the nearest class's mean in the last layer, to a power."""

    needs = Needs(layers="last", labels=True, sums="mean")
    power: float = 2.0

    def learn(self, summary):
        super().learn(summary)
        self.classes_ = summary.counts.nonzero()[:, 0]
        self.mean_ = {block: summary.sums[block].mean[self.classes_] for block in self.widths_}
        return self

    def distances(self, outputs):
        (mean,) = self.mean_.values()
        return (self.last_features(outputs).double()[:, None] - mean).abs().pow(self.power)  # (N, C, k)

    def score(self, outputs):
        return self.distances(outputs).sum(dim=2).amin(dim=1)

    def explain(self, outputs, top):
        (block,) = self.mean_
        parts = self.distances(outputs)
        nearest = parts.sum(dim=2).argmin(dim=1)
        own = parts[torch.arange(len(parts)), nearest]
        best = (own / own.sum(dim=1, keepdim=True)).topk(min(top, own.shape[1]), dim=1)
        classes = {block: self.classes_[nearest]}
        return {"nearest": classes, "channels": {block: best.indices}, "channel_shares": {block: best.values}}


def then(change):
    """A `learn` that changes what it has learnt."""

    def learn(self, summary):
        Mine.learn(self, summary)
        change(self)
        return self

    return learn


def shake(self):
    self.mean_ = {block: mean + 1e-3 * torch.randn_like(mean) for block, mean in self.mean_.items()}


def fits_by_halves(self, outputs, labels=None):
    self.power = 2.5
    Mine.fit(self, outputs, labels)
    self.power = 2.0
    return self


def doubles_its_option(self):
    Mine.__post_init__(self)
    self.power *= 2


def constant_reasons(self, outputs, top):
    channels = torch.arange(top).expand(len(outputs), top)
    constant = {"channels": channels, "channel_shares": 0.5 ** (channels + 1.0)}
    return Mine.explain(self, outputs, top) | {k: dict.fromkeys(self.mean_, v) for k, v in constant.items()}


class LastSums(ClassSums):
    """Sums that do not add."""

    def __add__(self, other):
        return other


class TakenForLogits(LogitsDetector):
    """Probabilities are scored as if they were logits."""

    def read(self, outputs, labels=None):
        return Outputs.of(outputs, labels)

    def score(self, outputs):
        return -outputs.logits.double().softmax(dim=1).amax(dim=1)


# for each law what a detector that breaks it has in place of what `Mine` has
BROKEN = {
    "a_higher_score_is_more_out_of_distribution": {"score": lambda self, outputs: -Mine.score(self, outputs)},
    "scores_are_one_finite_float64_a_sample": {"score": lambda self, o: Mine.score(self, o).exp().log()},
    "batches_and_the_order_of_samples_do_not_matter": {"score": lambda self, o: Mine.score(self, o) / len(o)},
    "shards_add_up_to_the_whole": {"needs": replace(Mine.needs, sums=LastSums)},
    "arrays_get_the_same_scores_in_their_own_kind": {
        "__call__": lambda self, o: torch.as_tensor(Mine.__call__(self, o))
    },
    "precisions_agree": {"score": lambda self, o: Mine.score(self, o).to(self.last_features(o).dtype).double()},
    "the_score_has_a_finite_gradient": {
        "score": lambda self, o: Mine.score(self, o) + (0 * Mine.score(self, o)).sqrt()
    },
    "neither_what_is_given_nor_the_original_of_a_copy_changes": {
        "score": lambda self, o: Mine.score(self, o) + 0 * o.logits.add_(1.0).sum()
    },
    "fits_are_equal_to_the_bit": {"learn": then(shake)},
    "a_fit_that_fails_says_why_and_leaves_the_detector_as_it_was": {"fit": fits_by_halves},
    "a_class_without_rows_is_left_out_with_a_finding": {"learn": then(lambda self: self.findings_.clear())},
    "a_term_that_grows_never_lowers_the_score": {
        "values": lambda self, outputs: Mine.score(self, outputs)[:, None],
        "score": lambda self, outputs: (self.values(outputs)[:, 0] - 5.0).square(),
    },
    "what_cannot_be_scored_is_refused_by_name": {"__call__": lambda _, outputs: torch.zeros(len(outputs))},
    "names_and_options_lead_back_to_the_detector": {"__post_init__": doubles_its_option},
    "options_are_checked_and_named": {"__post_init__": lambda _: None},
    "files_hold_the_detector_to_the_bit": {
        "size": 1.0,  # a name that does not end in an underscore
        "learn": then(lambda self: setattr(self, "size", 2.0)),
        "score": lambda self, outputs: self.size * Mine.score(self, outputs),
    },
    "a_bad_row_is_refused_alone_and_others_by_the_threshold": {
        "score": lambda self, outputs: Mine.score(self, outputs) + len(outputs.reasons)
    },
    "scores_are_the_same_while_a_graph_is_traced_whatever_the_size_of_values": {
        "score": lambda self, outputs: Mine.score(self, outputs) + float(exporting.get())
    },
    "a_graph_gives_the_same_verdicts": {
        "score": lambda self, o: Mine.score(self, o) + float(Mine.score(self, o).sum() >= 1e6)
    },
    "declared_probabilities_are_their_logarithms": {"bases": (TakenForLogits,)},
    "terms_sum_to_the_score_and_change_with_the_input": {"terms": lambda _, o: torch.ones(len(o), 1).double()},
    "reasons_name_the_nearest_class_and_distinct_channels": {"explain": constant_reasons},
}


# of most families one, of which `make test` makes the graph
GRAPHED = {"evidence", "gen", "igeood-logits", "knn", "mahalanobis", "vim"}  # the others are slow


def param(name, method):
    is_slow = name == "a_graph_gives_the_same_verdicts" and method not in GRAPHED
    return pytest.param(name, method, marks=[pytest.mark.slow] if is_slow else [])


@pytest.fixture(scope="session")
def make_case(suited):
    """A case of a method; each is made once."""

    @cache
    def make(name, _kind):
        return Case(name, suited)

    return lambda name: make(name, METHODS[name].kind)


@pytest.mark.parametrize(("name", "method"), [param(name, method) for method in sorted(METHODS) for name in LAWS])
def test_law(name, method, make_case):
    LAWS[name](make_case(method))


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


@pytest.mark.parametrize("name", LAWS)
def test_a_detector_that_breaks_a_law_is_caught(name, registered):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        LAWS[name](registered(type("Broken", BROKEN[name].get("bases", (Mine,)), BROKEN[name])))


def test_a_guard_of_a_method_that_is_not_registered_here(registered, tmp_path):
    case = registered(Mine, "mine-elsewhere")
    case.guard.save(tmp_path / "guard")
    del METHODS["mine-elsewhere"]
    with pytest.raises(GuardFileError, match="mine-elsewhere"):
        igeood.load(tmp_path / "guard")
    assert refused(case.guard.save, tmp_path / "other") == "detector"
    assert not (tmp_path / "other").exists()


def test_names_are_taken_once(registered):
    assert refused(registered, Mine, "msp") == "name"
    registered(Mine)
    registered(Mine, "my-other", fixed={"power": 1.0})  # a class may have several names
    registered(Mine)  # and be imported again
    assert igeood.detector("my-other").power == 1.0
    assert method_name(Mine(power=1.0)) == "my-method"
