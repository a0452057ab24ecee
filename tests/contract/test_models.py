"""Every kind of model against every access: the scores of a plain run, and the model as it was."""

import messages
import numpy as np
import pytest
import torch
from models import CASES
from runs import ACCESSES, EPSILON, HELD_OUT, KINDS, OOD, TEST, TRAIN, TUNE, Plain, left_as_found, split

import igeood
from igeood.errors import InputError
from igeood.outputs import Outputs


def by_hand(plain, layers, detector, epsilon, pair):
    return Outputs.concat(plain.stepped(x, layers, detector, epsilon) for x, _ in split(pair))


def stages(case, access, tmp_path, *, tune, model, plain):
    """All that a guard does, one after the other; after each the model must be as it was."""
    layers = case.layers if access.white else ()
    close = {"rtol": case.tolerance, "atol": case.tolerance} if not access.fold else {"rtol": 1e-3, "atol": 1e-3}
    kept = {"rtol": 1e-9, "atol": 1e-9}
    guard = access.build(model, layers)
    with torch.inference_mode(False):
        seen = Outputs.concat(plain.clean(x, layers, y) for x, y in split(TRAIN))
        reference = igeood.detector(access.method).fit(seen)
    with left_as_found(model):
        guard.fit(split(TRAIN))
    expected = reference.score(by_hand(plain, layers, reference, guard.epsilon, TEST))
    with left_as_found(model):
        score = guard.score(split(TEST))
    torch.testing.assert_close(score, expected, **close)
    if tune:
        with left_as_found(model):
            guard.tune(split(TUNE), split(OOD), epsilons=(0.0, EPSILON) if access.step else None)
        expected = guard.detector.score(by_hand(plain, layers, guard.detector, guard.epsilon, TEST))
        with left_as_found(model):
            score = guard.score(split(TEST))
        torch.testing.assert_close(score, expected, **close)
    with left_as_found(model):
        guard.calibrate(split(HELD_OUT))
    held_out = guard.detector.score(by_hand(plain, layers, guard.detector, guard.epsilon, HELD_OUT))
    torch.testing.assert_close(guard.calibration.scores, held_out.sort().values, **close)
    with left_as_found(model):
        verdict = guard.predict(split(TEST))
    torch.testing.assert_close(verdict.score, score, **kept)
    assert torch.equal(verdict.is_ood, verdict.score > guard.threshold)
    labels = torch.cat([plain.clean(x, ()).logits.argmax(1) for x, _ in split(TEST)])
    assert torch.equal(verdict.label, labels)
    with left_as_found(model):
        reasons = guard.explain(split(TEST))
    torch.testing.assert_close(reasons.contributions.sum(1), score, **kept)
    if access.white:
        with left_as_found(model):
            assert list(guard.diagnose(split(TRAIN))) == list(layers)
    with left_as_found(model):
        guard.save(tmp_path / "guard.safetensors")
        again = igeood.load(tmp_path / "guard.safetensors", model).predict(split(TEST))
    assert torch.equal(again.score, verdict.score)
    assert torch.equal(again.is_ood, verdict.is_ood)


HARDEST = "training mode"


def some():
    """Every model with three of the five kinds of access, methods taking turns; every method with the hardest model."""
    chosen = {(HARDEST, access) for access in ACCESSES}
    for i, case in enumerate(CASES):
        chosen |= {(case, names[i % len(names)]) for j, names in enumerate(KINDS.values()) if (i + j) % 5 < 3}
    return chosen


SOME = some()
PAIRS = [
    pytest.param(case, access, id=f"{case}-{access}", marks=() if (case, access) in SOME else pytest.mark.slow)
    for case in CASES
    for access in ACCESSES
]


@pytest.mark.parametrize(("case", "access"), PAIRS)
def test_the_scores_are_those_of_a_plain_run_and_the_model_stays_as_it_was(case, access, tmp_path):
    case, access = CASES[case], ACCESSES[access]
    model, plain = case.make(), Plain(case)
    problem = (access.white and case.no_layers) or (access.step and case.no_step)
    with case.around():
        if problem:
            refused(case, access, model, problem)
        else:
            stages(case, access, tmp_path, tune=False, model=model, plain=plain)


@pytest.mark.parametrize("access", [names[0] for names in KINDS.values()])
def test_after_tuning_too(access, tmp_path):
    case = CASES[HARDEST]
    stages(case, ACCESSES[access], tmp_path, tune=True, model=case.make(), plain=Plain(case))


@pytest.mark.slow
@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not (case.no_step or case.no_layers)])
def test_after_tuning_too_with_every_model(case, access, tmp_path):
    case, access = CASES[case], ACCESSES[access]
    model, plain = case.make(), Plain(case)  # made before: what is made in inference mode has no gradient
    with case.around():
        stages(case, access, tmp_path, tune=True, model=model, plain=plain)


def refused(case, access, model, problem):
    """What a model cannot do is an error that says so, at the first stage that needs it; nothing is left behind."""

    def use():
        access.build(model, case.layers).fit(split(TRAIN)).score(split(TEST))

    with left_as_found(model), pytest.raises(InputError, match=problem) as raised:
        use()
    messages.check(raised.value, argument=str(raised.value).split(":")[0], place="batch 0|'act'")


def test_every_method_has_its_accesses():
    """The catalogue is covered by itself: nothing here is a list of names."""
    assert {access.method for access in ACCESSES.values()} == set(igeood.METHODS)
    assert len(ACCESSES) == sum(2 if line.needs_layers else 3 for line in igeood.METHODS.values())
    assert len(KINDS) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_the_users_fire_on_the_users_modules(kind):
    case = CASES["hooks that change outputs"]
    access, model = ACCESSES[KINDS[kind][0]], case.make()
    guard = access.build(model, case.layers if access.white else ()).fit(split(TRAIN))
    model.recorder.calls.clear()
    guard.score(split(TEST))
    forward, before = ("forward", id(model.conv)), ("before", id(model))
    passes = model.recorder.calls.count(forward)
    assert passes >= len(split(TEST)) * (2 if access.step else 1)
    assert model.recorder.calls.count(before) == passes
    assert (("backward", id(model.norm)) in model.recorder.calls) == access.step
    assert {module for _, module in model.recorder.calls} <= {id(module) for module in model.modules()}


@pytest.mark.parametrize("kind", KINDS)
def test_reasons_come_in_the_kind_that_went_in(kind):
    access, model = ACCESSES[KINDS[kind][-1]], CASES[HARDEST].make()
    guard = access.build(model, CASES[HARDEST].layers if access.white else ()).fit(split(TRAIN))
    tensors, arrays = guard.explain(TEST[0]), guard.explain(TEST[0].numpy())
    assert str(arrays) == str(tensors)
    for name, value in vars(arrays).items():
        other = getattr(tensors, name)
        pairs = [(value[layer], other[layer]) for layer in other] if isinstance(other, dict) else [(value, other)]
        for array, tensor in pairs:
            assert isinstance(array, np.ndarray) == isinstance(tensor, torch.Tensor)
            assert np.array_equal(array, tensor)


def test_layers_that_cannot_be_read():
    model = CASES["a layer called twice"].make()
    for layer, what in (("first", "called twice"), ("norn", "has no 'norn'; near names: 'norm'")):
        with left_as_found(model), pytest.raises(InputError, match=f"layers: .*{what}"):
            igeood.white_box(model, layers=[layer]).fit(split(TRAIN))
