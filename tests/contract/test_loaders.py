"""Every kind of loader, and models that fail in the middle of one, against every stage of every access."""

from functools import cache

import messages
import numpy as np
import pytest
import torch
from loaders import BAD, FAULTS, GOOD, RAISING, Faulty, Stops, marked
from models import images, net
from runs import ACCESSES, HELD_OUT, KINDS, OOD, TEST, TRAIN, TUNE, left_as_found, split, turns
from torch.utils.data import DataLoader, TensorDataset

import igeood
from igeood.errors import IgeoodWarning, InputError

LAYERS = ("act", "hidden")
# what errors call the source, and the call
STAGES = {
    "fit": ("x", lambda guard, source: guard.fit(source)),
    "tune": ("id_data", lambda guard, source: guard.tune(source, split(OOD), epsilons=(0.0,))),
    "tune, ood": ("ood", lambda guard, source: guard.tune(split(TUNE), source, epsilons=(0.0,))),
    "calibrate": ("id_data", lambda guard, source: guard.calibrate(source)),
    "score": ("x", lambda guard, source: guard.score(source)),
    "predict": ("x", lambda guard, source: guard.predict(source)),
    "explain": ("x", lambda guard, source: guard.explain(source)),
    "diagnose": ("x", lambda guard, source: guard.diagnose(source)),
    "extract": ("loader", lambda guard, source: igeood.extract(guard.inputs.model, source, guard.layers)),
}
TWENTY = images(20, 6)  # two batches, for each stage


def access_of(kind, turn):
    """An access of this kind; its methods take turns."""
    return ACCESSES[KINDS[kind][turn % len(KINDS[kind])]]


def ready(access, model):
    """A guard that is fitted and calibrated."""
    return access.build(model, LAYERS if access.white else ()).fit(split(TRAIN)).calibrate(split(HELD_OUT))


@cache
def standing(access):
    """A guard of a model that goes wrong at marked batches only, and what it says; no test may change it."""
    guard = ready(access, net(Faulty).train())
    return guard, guard.predict(split(TEST)), kept(guard)


def kept(guard):
    """What makes a guard's verdicts, as the objects that they are."""
    return guard.detector, guard.calibration, guard.tuning, list(guard.layers), guard.epsilon, guard.fitted_on.tobytes()


def each_stage(access, source, check, *, stages=tuple(STAGES)):
    """Give a source that fails to each stage; check the error; the model and the guard must be as they were."""
    guard, verdict, before = standing(access)
    model = guard.inputs.model
    for stage, (argument, call) in STAGES.items():
        if stage not in stages or (stage == "diagnose" and not access.white):
            continue
        with left_as_found(model), pytest.raises(BaseException) as raised:  # noqa: PT011
            call(guard, source())
        check(raised.value, argument)
        assert kept(guard) == before, stage
    again = guard.predict(split(TEST))
    assert all(torch.equal(getattr(again, name), value) for name, value in vars(verdict).items())


@cache
def expected(access):
    """What a guard of plain batches says."""
    guard = ready(access, net().train())
    return guard, guard.predict(split(TEST)), guard.explain(split(TEST))


@pytest.mark.parametrize(("name", "kind"), turns(GOOD))
def test_a_loader_gives_what_its_samples_give(name, kind):
    make, access, model = GOOD[name], access_of(kind, list(GOOD).index(name)), net().train()
    plain, verdict, reasons = expected(access)
    close = {"rtol": 1e-3, "atol": 1e-3} if access.step else {"rtol": 1e-5, "atol": 1e-6}
    with left_as_found(model):
        guard = access.build(model, LAYERS if access.white else ()).fit(make(TRAIN)).calibrate(make(HELD_OUT))
        found = guard.predict(make(TEST))
        why = guard.explain(make(TEST))
    assert np.array_equal(guard.fitted_on, plain.fitted_on)
    torch.testing.assert_close(guard.calibration.scores, plain.calibration.scores, **close)
    for one, other in ((found.score, verdict.score), (why.contributions, reasons.contributions)):
        torch.testing.assert_close(torch.as_tensor(one), other, **close)
    assert np.array_equal(np.asarray(found.label), verdict.label.numpy())


@pytest.mark.parametrize("name", GOOD)
def test_a_loader_is_read_whole_while_layers_are_found(name):
    model = net().train()
    named = igeood.extract(model, split(TRAIN), "auto")
    with left_as_found(model):
        outputs = igeood.extract(model, GOOD[name](TRAIN), "auto")
        guard = igeood.white_box(model).fit(GOOD[name](TRAIN))
    assert guard.layers == list(outputs.features) == list(named.features)
    assert len(guard.fitted_on) == len(TRAIN[0])
    assert torch.equal(outputs.labels, TRAIN[1])
    torch.testing.assert_close(outputs.logits, named.logits, rtol=1e-5, atol=1e-6)
    for layer in guard.layers:
        torch.testing.assert_close(outputs.features[layer], named.features[layer], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), turns(BAD))
def test_a_loader_that_cannot_be_used_is_an_error_with_its_place(name, kind):
    bad = BAD[name]

    def check(error, argument):
        messages.check(error, argument=argument, place=bad.place)

    stages = ("fit", "diagnose", "extract") if bad.labels else tuple(STAGES)
    each_stage(access_of(kind, list(BAD).index(name)), lambda: bad.make(TWENTY), check, stages=stages)


@pytest.mark.parametrize(("name", "kind"), turns(RAISING))
def test_what_a_loader_raises_reaches_the_user(name, kind):
    make, kind_of_error = RAISING[name]

    def check(error, _):
        assert type(error) is kind_of_error

    each_stage(access_of(kind, list(RAISING).index(name)), lambda: make(TWENTY), check)


@pytest.mark.parametrize(("name", "kind"), turns(FAULTS))
def test_a_model_that_goes_wrong_in_the_middle(name, kind):
    fault, access = FAULTS[name], access_of(kind, list(FAULTS).index(name))
    standing(access)[0].inputs.model.fault = fault

    def check(error, argument):
        if fault.passes:
            assert type(error) is fault.passes
        else:
            messages.check(error, argument=argument, place=f"batch 1: .*{fault.place}")
        assert type(error.__cause__) is (fault.cause or type(None))

    each_stage(access, lambda: marked(TWENTY), check)


def test_missing_labels_are_named():
    for method, line in igeood.METHODS.items():
        if not line.kind.needs_labels:
            continue
        build = igeood.white_box if line.needs_layers else igeood.black_box
        guard = build(net(), method=method)
        with pytest.raises(InputError) as raised:
            guard.fit([x for x, _ in split(TRAIN)])
        messages.check(raised.value, argument="labels", place="true class of each sample")
        with pytest.raises(InputError, match="labels"):
            guard.fit(TRAIN[0], TRAIN[1][:-1])


def test_labels_of_half_the_samples_are_not_used_twice():
    """A tensor is cut into pieces of 256: labels for the first piece must not serve the second."""
    x, y = images(512, 0)
    for labels in (y[:256], y[:255], y[:511]):
        with pytest.raises(InputError, match=f"labels: {len(labels)} of them for 512 samples"):
            igeood.black_box(net()).fit(x, labels)
    listed = igeood.black_box(net()).fit(x, y.tolist())
    assert torch.equal(listed.score(x[:9]), igeood.black_box(net()).fit(x, y).score(x[:9]))


def test_a_dropped_last_batch_is_dropped():
    guard = igeood.black_box(net(), method="energy").fit(split(TRAIN))
    loader = DataLoader(TensorDataset(*TEST), batch_size=4, drop_last=True)
    torch.testing.assert_close(guard.score(loader), guard.score(TEST[0][:8]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_loader_that_ends_early_is_a_warning(stage):
    argument, call = STAGES[stage]
    data = {"tune": TUNE, "tune, ood": images(40, 4, shift=3.0), "calibrate": images(40, 2)}.get(stage, TRAIN)
    guard = ready(ACCESSES[KINDS["white"][0]], net().train())
    after = len(data[0]) - 6
    source = DataLoader(Stops(data, after), batch_size=4 if stage.startswith("tune") else 10)
    with left_as_found(guard.inputs.model), pytest.warns(IgeoodWarning) as told:
        call(guard, source)
    batches = after // source.batch_size
    assert f"{argument}: the loader ended after {batches} of its {len(source)} batches" in str(told[0].message)


class _NoLength:
    def __iter__(self):
        return iter(split(TRAIN))

    def __len__(self):
        raise NotImplementedError


class _CountsSamples(_NoLength):
    def __len__(self):
        return len(TRAIN[0])


@pytest.mark.parametrize("kind", [_NoLength, _CountsSamples])
def test_a_loaders_length_is_a_courtesy(kind):
    pieces = split(TRAIN)
    guard = igeood.black_box(net(), method="energy").fit(kind())
    assert torch.equal(guard.score(TEST[0]), igeood.black_box(net(), method="energy").fit(pieces).score(TEST[0]))


@pytest.mark.parametrize("stage", ["fit", "score"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_loader_runs_with_gradients_as_its_user_has_them(stage, mode):
    modes = []

    def loader():
        for item in split(TRAIN):
            modes.append(torch.is_grad_enabled())
            yield item

    def own():
        with torch.no_grad():
            for item in split(TRAIN):
                modes.append(not torch.is_grad_enabled())
                yield item

    guard = igeood.black_box(net(), method="energy").fit(split(TRAIN))
    with mode():
        getattr(guard, stage)(loader())
    assert set(modes) == {mode is torch.enable_grad}
    modes.clear()
    getattr(guard, stage)(own())
    assert all(modes)
    assert torch.is_grad_enabled()


def test_a_loader_that_changes_from_reading_to_reading_cannot_be_tuned_on():
    class Augmenting:
        def __iter__(self):
            return iter([x + 0.01 * torch.randn_like(x) for x, _ in split(TUNE)])

    guard = igeood.grey_box(net(), method="msp").fit(split(TRAIN))
    with pytest.raises(InputError) as raised:
        guard.tune(Augmenting(), split(OOD), epsilons=(0.0, 0.01))
    messages.check(raised.value, argument="id_data", place="each time it is read")


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_may_use_the_model_as_in_a_loop_of_the_users_own(kind):
    """Such as one that attacks its images: gradients are on while it works, and the model is as the user left it."""
    access, model = access_of(kind, 0), net().train()
    modes = []

    def attacks(pair):
        for x, y in split(pair):
            modes.append((torch.is_grad_enabled(), model.training))
            leaf = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(model.fc(model.hidden(leaf.mean((2, 3)).repeat(1, 3))).sum(), leaf)
            yield x + 0.1 * gradient.sign(), y

    with left_as_found(model):
        guard = access.build(model, LAYERS if access.white else ()).fit(attacks(TRAIN)).calibrate(attacks(HELD_OUT))
        found = guard.predict(attacks(TEST))
    assert set(modes) == {(True, True)}
    plain = access.build(model, LAYERS if access.white else ()).fit(list(attacks(TRAIN)))
    assert torch.equal(found.score, plain.score(list(attacks(TEST))))


def test_diagnosing_does_not_choose_the_layers(known):
    guard = igeood.white_box().fit(known.train)
    layers = list(guard.layers)
    more = igeood.Outputs(known.test.logits, {**known.test.features, "third": known.test.logits}, known.test.labels)
    assert list(guard.diagnose(more)) == layers
    assert guard.layers == layers
    assert len(guard.score(known.test)) == len(known.test)
