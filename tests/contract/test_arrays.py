"""Every array of the catalogue against every method, at every step: taken and right, or refused and clear.

What is taken gives the result of the same numbers as contiguous float64, is finite, and is left as it was. What is
refused is named, with its place and a cure, and leaves the detector or the guard as it was.
"""

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from arrays import ARRAYS, FEATURE_ARRAYS, LABELS, VECTORS, Case
from messages import check, cure

import igeood
from igeood.errors import IgeoodError, InputError
from igeood.guard import Guard
from igeood.outputs import ArrayLike, Outputs

METHODS = sorted(igeood.METHODS)
WHITE = [name for name in METHODS if igeood.METHODS[name].needs_layers]
N, CLASSES, FIRST = 120, 10, 60  # samples; classes; samples in the first of two batches
LAYER = "block.late"
WIDTHS = {"early": 4, LAYER: 5}


@dataclass(frozen=True)
class Parts:
    """What a user has of some samples."""

    logits: Any
    features: dict[str, Any]
    labels: Any

    def __getitem__(self, rows: slice) -> "Parts":
        return Parts(self.logits[rows], {k: v[rows] for k, v in self.features.items()}, self.labels[rows])

    def with_slot(self, slot: str, array: Any) -> "Parts":
        if slot == "features":
            return replace(self, features={**self.features, LAYER: array})
        return replace(self, **{slot: array})

    def like(self, case: Case) -> "Parts":
        """As many samples as the case has, where it has fewer than all."""
        n = N if case.clean is None else len(case.clean)
        return self[:n] if n < len(self.logits) else self


def make_parts(seed: int, n: int = N) -> Parts:
    """A pretend classifier's float64 logits and two layers about class means."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % CLASSES
    logits = rng.normal(size=(n, CLASSES))
    logits[np.arange(n), labels] += 6 * rng.uniform(0.5, 1, n)
    means = {k: np.random.default_rng(width).normal(size=(CLASSES, width)) * 2 for k, width in WIDTHS.items()}
    return Parts(logits, {k: means[k][labels] + rng.normal(size=(n, w)) for k, w in WIDTHS.items()}, labels)


TRAIN, HELD_OUT, TEST = (make_parts(seed) for seed in range(3))


def given(method: str, parts: Parts, first: int | None = None, *, labels: bool = False) -> Any:
    """What the method takes of these parts: `Outputs` where it reads layers, else logits, with their labels or not."""
    if method in WHITE:
        return Outputs(parts.logits, parts.features, parts.labels if labels else None, first=first)
    return (parts.logits, parts.labels) if labels else parts.logits


@cache
def ready(method: str) -> Guard:
    """A guard that is fitted and calibrated on the clean arrays."""
    guard = Guard(igeood.detector(method))
    if method in WHITE:
        return guard.fit(given(method, TRAIN, labels=True)).calibrate(given(method, HELD_OUT))
    return guard.fit(TRAIN.logits, TRAIN.labels).calibrate(HELD_OUT.logits)


def judged_after(subject: Any, method: str, parts: Parts) -> Any:
    """Scores of the clean test samples; where the fit was to another width, of its own."""
    changed = getattr(parts.logits, "shape", (N, CLASSES))[1:] != (CLASSES,)
    changed |= getattr(parts.features[LAYER], "shape", (N, WIDTHS[LAYER]))[1:] != (WIDTHS[LAYER],)
    return subject.score(given(method, parts if changed else TEST))


def fit(detector: Any, method: str, parts: Parts) -> Any:
    whole = given(method, parts, labels=True)
    detector.fit(*(whole if isinstance(whole, tuple) else (whole,)))
    return judged_after(detector, method, parts)


def fit_batches(detector: Any, method: str, parts: Parts) -> Any:
    blocks = (TRAIN[:FIRST], None), (parts, FIRST)
    layers = method in WHITE
    detector.fit_batches(Outputs(p.logits, p.features if layers else None, p.labels, first=n) for p, n in blocks)
    return detector.score(given(method, TEST))


def guard_fit(guard: Any, method: str, parts: Parts) -> Any:
    return fit(guard, method, parts)


def guard_fit_blocks(guard: Any, method: str, parts: Parts) -> Any:
    guard.fit([given(method, TRAIN[:FIRST], labels=True), given(method, parts, FIRST, labels=True)])
    return guard.score(given(method, TEST))


def score(detector: Any, method: str, parts: Parts) -> Any:
    return detector.score(given(method, parts))


def calibrate(guard: Any, method: str, parts: Parts) -> Any:
    guard.calibrate(given(method, parts))
    return np.append(guard.calibration.scores.numpy(), guard.threshold)


def predict(guard: Any, method: str, parts: Parts) -> Any:
    verdict = guard.predict(given(method, parts))
    columns = verdict.score, verdict.p_value, verdict.is_ood, verdict.label
    assert len({type(column) for column in columns}) == 1
    assert len(verdict) == len(verdict.score)
    return (
        torch.stack([torch.as_tensor(c, dtype=torch.float64) for c in columns])
        if torch.is_tensor(columns[0])
        else (np.stack(columns))
    )


def explain(guard: Any, method: str, parts: Parts) -> Any:
    return guard.explain(given(method, parts)).contributions


@dataclass(frozen=True)
class Stage:
    """A step at which arrays come in."""

    run: Callable[[Any, str, Parts], Any]
    clean: Parts
    first: int = 0  # samples that came before
    fits: bool = False
    called: str = "logits"  # what a bare array is called in errors


STAGES = {
    "fit": Stage(fit, TRAIN, fits=True),
    "fit_batches": Stage(fit_batches, TRAIN[FIRST:], FIRST, fits=True),
    "guard.fit": Stage(guard_fit, TRAIN, fits=True),
    "guard.fit blocks": Stage(guard_fit_blocks, TRAIN[FIRST:], FIRST, fits=True),
    "score": Stage(score, TEST),
    "guard.calibrate": Stage(calibrate, HELD_OUT, called="id_data"),
    "guard.predict": Stage(predict, TEST),
    "guard.explain": Stage(explain, TEST),
}

# -- what must come of a case

Fault = tuple[str, str]  # argument, place


def argument(method: str, stage: Stage, slot: str) -> str:
    if slot == "features":
        return f"features[{LAYER!r}]"
    return stage.called if slot == "logits" and method not in WHITE else slot


def fault(method: str, stage: Stage, slot: str, name: str, case: Case) -> Fault | None:
    """Argument and place of the error that must come; None where the array is to be taken."""
    if case.verdict == "refused":
        return argument(method, stage, slot), case.at(stage.first)
    if case.verdict == "same":
        return None
    return {"logits": of_logits, "features": of_features, "labels": of_labels}[slot](method, stage, name)


def alone(stage: Stage) -> bool:
    """Whether a fit gets no other samples."""
    return stage.fits and not stage.first


def of_width(method: str, stage: Stage, width: int) -> Fault | None:
    """Logits of another width: labels beyond it, or classes without a sample, or not what was fitted."""
    if width < CLASSES and stage.fits:
        return "labels", rf"\b{width} at position {stage.first + width}\b"
    if alone(stage):
        return ("labels", rf"\bclass {CLASSES}\b") if needs_labels(method) else None
    return stage.called, rf"\b{width} columns\b"


def of_none(method: str, stage: Stage) -> Fault | None:
    if alone(stage):
        return "outputs", "no sample"
    return ("id_data", r"\b0 samples") if stage.run is calibrate else None


def of_one(method: str, stage: Stage) -> Fault | None:
    if alone(stage) and needs_labels(method):
        return "labels", r"\bclass 1\b"
    return ("id_data", r"\b1 samples?\b") if stage.run is calibrate else None


def of_fewer(method: str, stage: Stage) -> Fault | None:
    """The others are more: the first layer is named, or the labels."""
    rows, (layer, width) = len(stage.clean.logits), next(iter(WIDTHS.items()))
    if method in WHITE:
        return f"features[{layer!r}]", rf"\({rows}, {width}\)"
    return ("labels", rf"\({rows},\)") if stage.fits else None


def needs_labels(method: str) -> bool:
    return igeood.METHODS[method].kind.needs_labels


OF_LOGITS: dict[str, Callable[[str, Stage], Fault | None]] = {
    "no column": lambda method, stage: (argument(method, stage, "logits"), rf"\({len(stage.clean.logits)}, 0\)"),
    "narrower": lambda method, stage: of_width(method, stage, CLASSES - 1),
    "wider": lambda method, stage: of_width(method, stage, CLASSES + 1),
    "empty": of_none,
    "one sample": of_one,
    "fewer samples": of_fewer,
}


def of_logits(method: str, stage: Stage, name: str) -> Fault | None:
    return OF_LOGITS[name](method, stage) if name in OF_LOGITS else None


def of_features(method: str, stage: Stage, name: str) -> Fault | None:
    called, n = argument(method, stage, "features"), len(stage.clean.logits)
    width = {"narrower": WIDTHS[LAYER] - 1, "wider": WIDTHS[LAYER] + 1, "one channel": 1}.get(name)
    if width is not None:
        return None if alone(stage) else (called, rf"\b{width} channels?\b")
    place = {
        "no column": rf"\({n}, 0\)",
        "of 1e300": rf"\bsample {stage.first}\b.*\b1e\+100\b",
        "empty": rf"\(0, {WIDTHS[LAYER]}\)",
        "one sample": rf"\(1, {WIDTHS[LAYER]}\)",
        "fewer samples": rf"\({n - 1}, {WIDTHS[LAYER]}\)",
    }.get(name)
    return place and (called, place)


def of_labels(method: str, stage: Stage, name: str) -> Fault | None:
    if name == "none" and stage.run is guard_fit_blocks:
        return "labels", r"\b1 of 2 batches\b"
    if not needs_labels(method):
        return None
    if name == "none":
        return "labels", r"\bneeds the true class of each sample\b"
    missing = {"one class": 1, "missing class": 7}.get(name)
    return None if missing is None or stage.first else ("labels", rf"\bclass {missing}\b")


# -- the check itself


def content(value: Any) -> Any:
    """Everything of an array that a call could change."""
    if isinstance(value, torch.Tensor):
        version = None if value.is_inference() else value._version
        if value.layout != torch.strided or value.is_meta or not value.ndim:
            return type(value), value.shape, version
        bits = value.detach().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()
        return value.requires_grad, value.grad, version, bits
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype, value.shape, value.strides, value.flags.writeable, value.tobytes()
    return repr(getattr(value, "values", value))


def answers(method: str, guard: Guard) -> list[Any]:
    """What a guard says of clean samples, bit by bit."""
    verdict = guard.predict(given(method, TEST))
    return [column.tobytes() for column in (verdict.score, verdict.p_value, verdict.is_ood, verdict.label)]


@cache
def first_answers(method: str) -> list[Any]:
    return answers(method, ready(method))


def result(method: str, stage: str, parts: Parts) -> Any:
    """What a step makes of these parts."""
    on_guard = stage.startswith("guard")
    if STAGES[stage].fits:
        subject: Any = Guard(igeood.detector(method)) if on_guard else igeood.detector(method)
    else:
        subject = copy.copy(ready(method)) if on_guard else ready(method).detector
    return STAGES[stage].run(subject, method, parts)


EXPECTED: dict[Any, Any] = {}


def expected(method: str, stage: str, slot: str, parts: Parts) -> Any:
    """`result` of clean parts, kept: many cases have the same numbers."""
    array = slot_of(parts, slot)
    key = method, stage, slot, np.shape(array), b"" if array is None else array.tobytes()
    if key not in EXPECTED:
        EXPECTED[key] = result(method, stage, parts)
    return EXPECTED[key]


def slot_of(parts: Parts, slot: str) -> Any:
    return parts.features[LAYER] if slot == "features" else getattr(parts, slot)


SLOTS = {"logits": ARRAYS, "features": FEATURE_ARRAYS, "labels": LABELS}


def stages(method: str, slot: str) -> list[str]:
    """Steps that read this: labels are for fits, and a guard takes the `Outputs` of layers as its detector does."""
    found = [name for name, stage in STAGES.items() if stage.fits or slot != "labels"]
    return [name for name in found if name != "guard.fit" or method not in WHITE]


def generated() -> list[tuple[str, str, str]]:
    """Every method × slot × array; each is tried at every stage."""
    return [
        (method, slot, name)
        for method in METHODS
        for slot, arrays in SLOTS.items()
        if slot != "features" or method in WHITE
        for name in arrays
    ]


@pytest.mark.filterwarnings("ignore:labels. class . has a single sample:igeood.errors.IgeoodWarning")
@pytest.mark.parametrize(("method", "slot", "name"), generated())
def test_an_array_is_taken_or_refused(method, slot, name):
    guard = copy.deepcopy(ready(method))
    for stage in stages(method, slot):
        at = STAGES[stage]
        case = SLOTS[slot][name](slot_of(at.clean, slot))
        whole = at.clean.like(case) if slot == "logits" and name != "fewer samples" else at.clean
        before, parts = content(case.array), whole.with_slot(slot, case.array)
        wrong = fault(method, at, slot, name, case)
        try:
            if wrong is None:
                clean = whole.with_slot(slot, case.array if case.clean is None else case.clean)
                taken(result(method, stage, parts), expected(method, stage, slot, clean), parts, at)
            else:
                subject = guard if stage.startswith("guard") else guard.detector
                refused(partial(at.run, subject, method, parts), *wrong)
            assert content(case.array) == before
        except Exception as error:
            error.add_note(f"at {stage}")
            raise
    assert answers(method, guard) == first_answers(method)


def refused(step: Callable[[], Any], argument: str, place: str) -> None:
    with pytest.raises(IgeoodError) as caught:
        step()
    check(caught.value, argument=argument, place=place)


def taken(found: Any, clean: Any, parts: Parts, stage: Stage) -> None:
    same(found, clean, 1e-9)
    if stage.run in (score, predict, explain):
        assert torch.is_tensor(found) == torch.is_tensor(parts.logits)


def test_every_method_is_tried_with_everything():
    cases = {(method, slot): 0 for method in igeood.METHODS for slot in SLOTS}
    for method, slot, _ in generated():
        cases[method, slot] += len(stages(method, slot))
    assert all(cases[method, "logits"] > 500 and cases[method, "labels"] >= 150 for method in igeood.METHODS)
    assert all(cases[method, "features"] > 500 for method in WHITE)


def same(found: Any, clean: Any, tolerance: float) -> None:
    """Assert that results are finite and agree, to a part of the largest."""
    one, other = (np.asarray(torch.as_tensor(value).detach(), dtype=np.float64) for value in (found, clean))
    assert one.shape == other.shape
    assert np.isfinite(one).all()
    assert (np.abs(one - other) <= tolerance * np.abs(other).max(initial=1e-300)).all()


# -- hard contents against formulas in float64, written without the library


def log_softmax(logits: Any, temperature: float) -> Any:
    peaked = (logits - logits.max(axis=1, keepdims=True)) / temperature
    return peaked - scipy.special.logsumexp(peaked, axis=1, keepdims=True)


def pairs(detector: Any, logits: Any) -> tuple[Any, Any]:
    """Log-probabilities (N, 1, C) of samples and (1, C, C) of centroids."""
    return log_softmax(logits, detector.temperature)[:, None], detector.centroids_.numpy()[None]


def confidence_formula(detector: Any, logits: Any) -> Any:
    return -np.exp(log_softmax(logits, detector.temperature).max(axis=1))


def energy_formula(detector: Any, logits: Any) -> Any:
    peak, t = logits.max(axis=1), detector.temperature
    return -peak - t * scipy.special.logsumexp((logits - peak[:, None]) / t, axis=1)


def kl_formula(detector: Any, logits: Any) -> Any:
    p, q = pairs(detector, logits)
    with np.errstate(invalid="ignore"):
        terms = np.where(np.exp(p) > 0, np.exp(p) * (p - q), 0.0)
    found = terms.sum(axis=2)
    return -found.sum(axis=1) if detector.reduce == "sum" else found.min(axis=1)


def fisher_rao_formula(detector: Any, logits: Any) -> Any:
    p, q = pairs(detector, logits)
    found = 2 * np.arccos(np.minimum(1.0, np.exp((p + q) / 2).sum(axis=2)))
    return -found.sum(axis=1) if detector.reduce_ == "sum" else found.min(axis=1)


FORMULAS = {
    igeood.MaxSoftmax: (confidence_formula, 1e-12),
    igeood.Odin: (confidence_formula, 1e-12),
    igeood.Energy: (energy_formula, 1e-12),
    igeood.KLDivergence: (kl_formula, 1e-9),
    igeood.IgeoodLogits: (fisher_rao_formula, 1e-7),  # an arc cosine near 1 has half the digits
}
BY_FORMULA = [name for name in METHODS if igeood.METHODS[name].kind in FORMULAS]
NUMBERS = [name for name, make in ARRAYS.items() if (case := make(TEST.logits)).clean is not None and len(case.clean)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("method", BY_FORMULA)
def test_scores_are_those_of_the_formula(method, name):
    case, detector = ARRAYS[name](TEST.logits), ready(method).detector
    formula, tolerance = FORMULAS[type(detector)]
    same(detector.score(case.array), formula(detector, case.clean), tolerance)


@pytest.mark.parametrize("name", ["identical rows", "all equal", "all zero"])
@pytest.mark.parametrize("method", METHODS)
def test_samples_that_are_alike_have_one_score(method, name):
    alike = replace(TEST, logits=ARRAYS[name](TEST.logits).array, features={k: v * 0 for k, v in TEST.features.items()})
    assert len(set(np.asarray(ready(method).score(given(method, alike))).tolist())) == 1


# -- calibration


@pytest.mark.parametrize(("tpr", "guarantee"), [(0.95, "marginal"), (0.99, "marginal"), (0.95, "tolerance")])
@pytest.mark.parametrize("method", METHODS)
def test_too_few_calibration_samples(method, tpr, guarantee):
    needed = igeood.calibration.needed_samples(tpr, guarantee)
    guard = copy.deepcopy(ready(method))
    with pytest.raises(InputError) as caught:
        guard.calibrate(given(method, HELD_OUT[: needed - 1]), tpr, guarantee=guarantee)
    check(caught.value, argument="id_data", place=rf"\b{needed - 1} samples\b.*at least {needed}\b")
    assert answers(method, guard) == first_answers(method)
    guard.calibrate(given(method, HELD_OUT[:needed]), tpr, guarantee=guarantee)
    assert guard.threshold >= np.sort(guard.score(given(method, HELD_OUT[:needed])))[-1]


@pytest.mark.parametrize("method", METHODS)
def test_tied_calibration_scores(method):
    one = HELD_OUT[:1]
    tied = Parts(
        np.repeat(one.logits, 50, axis=0), {k: np.repeat(v, 50, axis=0) for k, v in one.features.items()}, None
    )
    guard = copy.deepcopy(ready(method)).calibrate(given(method, tied))
    verdict = guard.predict(given(method, tied))
    assert not verdict.is_ood.any()
    assert (verdict.p_value == 1.0).all()
    other = guard.predict(given(method, TEST))
    assert np.array_equal(other.is_ood, other.score > guard.threshold)
    assert set(other.p_value.tolist()) <= {1 / 51, 1.0}


# -- names of layers


def with_layers(parts: Parts, names: list[str]) -> Outputs:
    return Outputs(
        parts.logits, {name: parts.features.get(name, parts.features[LAYER]) for name in names}, parts.labels
    )


@pytest.mark.parametrize("stage", ["score", "calibrate", "predict"])
@pytest.mark.parametrize("method", WHITE)
def test_layers_that_are_missing_more_or_in_another_order(method, stage):
    guard = copy.deepcopy(ready(method))
    step = getattr(guard, stage)
    for names in (["early"], [LAYER], [], ["other"]):
        missing = next(name for name in WIDTHS if name not in names)
        with pytest.raises(InputError) as caught:
            step(with_layers(TEST, names))
        check(caught.value, argument="id_data" if stage == "calibrate" else "logits", place=rf"layer '{missing}'")
        with pytest.raises(InputError) as caught:
            guard.detector.score(with_layers(TEST, names))
        check(caught.value, argument="outputs", place=rf"layer '{missing}'")
    assert answers(method, guard) == first_answers(method)
    for names in ([LAYER, "early"], ["before", "early", "between", LAYER, "after"]):
        same(guard.score(with_layers(TEST, names)), guard.score(given(method, TEST)), 0.0)


@pytest.mark.parametrize("method", WHITE)
def test_layers_that_change_between_batches(method):
    guard = copy.deepcopy(ready(method))
    for names in (["early"], [LAYER], [], ["early", LAYER, "more"], [LAYER, "early"]):
        blocks = [with_layers(TRAIN[:FIRST], list(WIDTHS)), with_layers(TRAIN[FIRST:], names)]
        for subject, step in ((guard, guard.fit), (guard.detector, guard.detector.fit_batches)):
            with pytest.raises(InputError) as caught:
                step(blocks)
            check(caught.value, argument="features", place="layers " + (", ".join(map(repr, names)) or "none"))
            assert answers(method, guard) == first_answers(method), subject


# -- probabilities


PROBABILITIES = [name for name in METHODS if "probabilities" in igeood.METHODS[name].options and name != "energy"]


@pytest.mark.parametrize(
    ("fault_at", "place"),
    [((3, -0.1), "row 3 has a negative entry"), ((3, 0.9), "row 3 sums to"), ((110, 0.9), "row 110 sums to")],
)
@pytest.mark.parametrize("method", PROBABILITIES)
def test_probabilities_that_are_none(method, fault_at, place):
    clean = scipy.special.softmax(TRAIN.logits, axis=1)
    wrong = clean.copy()
    wrong[fault_at[0], (TRAIN.labels[fault_at[0]] + 1) % CLASSES] = fault_at[1]
    guard = Guard(igeood.detector(method, probabilities=True)).fit(clean, TRAIN.labels)
    before = guard.score(clean)
    blocks = [(part, labels) for part, labels in zip(np.split(wrong, 2), np.split(TRAIN.labels, 2), strict=True)]
    for step in (
        lambda: guard.score(wrong),
        lambda: guard.fit(wrong, TRAIN.labels),
        lambda: guard.fit(blocks),
        lambda: guard.detector.fit_batches(Outputs(part, labels=labels) for part, labels in blocks),
    ):
        with pytest.raises(InputError) as caught:
            step()
        check(caught.value, argument="probabilities", place=rf"\b{place}")
        assert np.array_equal(guard.score(clean), before)


# -- vectors: every function of metrics and calibration that takes an array


def vector_functions() -> list[Any]:
    """Function and argument, for every argument that is annotated as an array."""
    found = []
    for module in (igeood.metrics, igeood.calibration):
        for name, function in vars(module).items():
            if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_"):
                found += [
                    pytest.param(function, parameter.name, id=f"{name}-{parameter.name}")
                    for parameter in inspect.signature(function).parameters.values()
                    if parameter.annotation == ArrayLike
                ]
    return found


def call(function: Any, slot: str, array: Any) -> Any:
    """The function with this array in a slot, and clean scores in the others."""
    rng = np.random.default_rng(7)
    others = {
        p.name: rng.uniform(size=N)
        for p in inspect.signature(function).parameters.values()
        if p.annotation == ArrayLike
    }
    return function(**{**others, slot: array})


def vector_fault(function: Any, slot: str, name: str, case: Case) -> str | None:
    """The place of the error that must come; None where the array is to be taken."""
    if case.verdict == "refused":
        return case.at()
    if name == "empty" and slot in ("id_scores", "ood_scores"):
        return r"\b(empty|0 calibration samples)\b"
    if name == "one score" and function.__name__ == "threshold":
        return r"\b1 calibration samples?\b"
    if slot == "p" and name in ("with +inf", "with -inf"):
        return r"\bposition 3\b"
    return None


SCORES = np.random.default_rng(3).uniform(size=N)


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize(("function", "slot"), vector_functions())
def test_a_vector_is_taken_or_refused(function, slot, name):
    case = VECTORS[name](SCORES)
    before = content(case.array)
    place = vector_fault(function, slot, name, case)
    if place is None:
        found, clean = call(function, slot, case.array), call(function, slot, case.clean)
        flat, expected_flat = (np.hstack(list(map(np.asarray, values(v)))).astype(float) for v in (found, clean))
        assert np.array_equal(flat, expected_flat)
        assert not np.isnan(flat).any()
        if isinstance(found, (np.ndarray, torch.Tensor)) and slot != "id_scores":
            assert torch.is_tensor(found) == torch.is_tensor(case.array)
    else:
        with pytest.raises(InputError) as caught:
            call(function, slot, case.array)
        check(caught.value, argument=slot, place=place)
    assert content(case.array) == before


def values(value: Any) -> list[Any]:
    return list(vars(value).values()) if hasattr(value, "__dataclass_fields__") else [value]


def test_the_functions_are_found():
    found = {param.id for param in vector_functions()}
    assert {"auroc-ood_scores", "threshold-id_scores", "p_values-scores", "benjamini_hochberg-p"} <= found


# -- tune


FAULTY = [name for name, make in ARRAYS.items() if make(TEST.logits).verdict == "refused"]
OOD = replace(TEST, logits=make_parts(8).logits * 0.2, features={k: v + 3 for k, v in make_parts(8).features.items()})


@pytest.mark.parametrize("name", [*FAULTY, "narrower", "wider", "no column", "empty", "one sample", "overlapping"])
@pytest.mark.parametrize("slot", ["id_data", "ood"])
@pytest.mark.parametrize("method", METHODS)
def test_samples_that_cannot_be_tuned_on(method, slot, name):
    guard = copy.deepcopy(ready(method))
    both = {"id_data": HELD_OUT, "ood": OOD}
    if name == "overlapping":
        both["ood"] = replace(OOD, logits=np.concatenate([OOD.logits[:-5], HELD_OUT.logits[:5]]))
        wrong = "ood", r"\b5 of 120\b"
    else:
        case = ARRAYS[name](both[slot].logits)
        both[slot] = both[slot].like(case).with_slot("logits", case.array)
        wrong = fault(method, Stage(score, both[slot], called=slot), "logits", name, case) or (
            slot,
            r"\b[01] samples?\b",
        )
    with pytest.raises(InputError) as caught:
        guard.tune(given(method, both["id_data"]), given(method, both["ood"]), share=1.0)
    check(caught.value, argument=wrong[0], place=wrong[1])
    assert answers(method, guard) == first_answers(method)
    assert guard.tuning is None


@pytest.mark.parametrize(
    "name",
    [
        "tensor bfloat16",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("negative strides", "read-only memory map", "array-like", "of 1e38", "tensor with gradient")
        ),
    ],
)
@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=[pytest.mark.slow] * (method in WHITE)) for method in METHODS]
)
def test_samples_that_can_be_tuned_on(method, name):
    found = []
    case = ARRAYS[name](OOD.logits)
    for array in (case.array, case.clean):
        guard = copy.deepcopy(ready(method))
        guard.tune(given(method, HELD_OUT), given(method, OOD.with_slot("logits", array)), share=1.0)
        found.append(np.append(guard.score(given(method, TEST)), [guard.tuning.before, guard.tuning.after]))
        told = f"{100 * guard.tuning.after:.1f}% of 120 OOD samples refused, {100 * guard.tuning.before:.1f}% before"
        assert told in repr(guard.tuning)
        assert ("temperature" in repr(guard.tuning)) == (guard.tuning.temperature is not None)
        assert len(repr(guard.tuning)) < 200
    same(*found, 1e-9)


# -- what is printed


@pytest.mark.parametrize("method", METHODS)
def test_what_is_printed_is_short(method):
    guard = copy.deepcopy(ready(method))
    verdict = guard.predict(given(method, TEST))
    assert repr(verdict) == f"Verdict(120 judged, {verdict.is_ood.sum()} out-of-distribution)"
    assert repr(guard.predict(given(method, TEST[:0]))) == "Verdict(0 judged, 0 out-of-distribution)"
    outputs = Outputs(TEST.logits, TEST.features, TEST.labels)
    assert repr(outputs) == "Outputs(120 samples, 10 classes, layers early, block.late, labels)"
    assert repr(Outputs(TEST.logits)) == "Outputs(120 samples, 10 classes)"
    for value in (guard, guard.calibration):
        assert len(repr(value)) < 400
        assert "tensor(" not in repr(value)


# -- what a message must be


@pytest.mark.parametrize(
    ("message", "argument", "place"),
    [
        ("logits: expected shape (N, C), got (3,)", "logits", r"\(3,\)"),
        ("logits: row 3 has NaN", "logits", "row 3"),
        ("row 3 has NaN; remove those rows", "logits", "row 3"),
        ("logits: row 4 has NaN; remove those rows", "logits", r"row 3\b"),
        ("logits: row 3 has NaN; remove\nthose rows", "logits", "row 3"),
        ("logits: row 3 has NaN; number of rows", "logits", "row 3"),
        (ValueError("logits: row 3 has NaN; remove those rows"), "logits", "row 3"),
    ],
)
def test_a_message_that_is_not_clear(message, argument, place):
    with pytest.raises(AssertionError):
        check(message, argument=argument, place=place)


def test_a_message_that_is_clear():
    text = "logits: row 3 has NaN (2 of 9 rows have); remove those rows"
    check(InputError(text), argument="logits", place=r"\brow 3\b")
    assert cure(text) == "remove those rows"


if __name__ == "__main__":
    n = sum(len(stages(method, slot)) for method, slot, _ in generated())
    sys.stdout.write(f"{n} cases: a method, a step and an array for one of its arguments\n")
