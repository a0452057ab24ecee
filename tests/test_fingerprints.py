"""A guard notices that its model's weights are others than those it was fitted with."""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import igeood
from igeood import fingerprints
from igeood.errors import IgeoodWarning, InputError
from igeood.fingerprints import WeightWatch, fingerprint

sys.path.insert(0, str(Path(__file__).parent / "contract"))

from models import net
from runs import ACCESSES, HELD_OUT, KINDS, TEST, TRAIN, split, turns

LAYERS = ("act", "hidden")


def stepped(optimizer, **options):
    def change(model):
        used = optimizer(model.parameters(), lr=0.1, **options)
        nn.functional.cross_entropy(model(TRAIN[0]), TRAIN[1]).backward()
        used.step()

    return change


@torch.no_grad()
def one_value(model):
    model.fc.weight[0, 0] += 1.0


def one_buffer(model):
    model.train()(TRAIN[0])
    model.eval()


def by_data(model):
    model.conv.weight.data.mul_(1.5)


def other_storage(model):
    model.fc.weight.data = model.fc.weight.data * 2


def new_parameter(model):
    model.fc.bias = nn.Parameter(model.fc.bias.detach() + 1)


def new_layer(model):
    model.hidden = nn.Linear(6, 5)


def loaded(model):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def assigned(model):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


def half(model):
    model.half()


CHANGES = {
    "SGD": stepped(torch.optim.SGD),
    "SGD, fused": stepped(torch.optim.SGD, fused=True),
    "Adam, one by one": stepped(torch.optim.Adam, foreach=False),
    "Adam, together": stepped(torch.optim.Adam, foreach=True),
    "AdamW, fused": stepped(torch.optim.AdamW, fused=True),
    **{
        f.__name__: f
        for f in (one_value, one_buffer, by_data, other_storage, new_parameter, new_layer, loaded, assigned, half)
    },
}
SAME = {
    "training mode": lambda model: model.train(),
    "gradients": lambda model: model(TRAIN[0]).sum().backward(),
    "frozen": lambda model: model.requires_grad_(False),
    "loaded again": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "there and back": lambda model: model.double().float(),
    "the same values elsewhere": lambda model: setattr(model.fc.weight, "data", model.fc.weight.data.clone()),
    "added nothing": lambda model: model.fc.weight.data.add_(0.0),
}


def ready(kind, model):
    access = ACCESSES[KINDS[kind][0]]
    return access.build(model, LAYERS if access.white else ()).fit(split(TRAIN)).calibrate(split(HELD_OUT))


@pytest.mark.parametrize(("change", "kind"), turns(CHANGES, often=2))
def test_weights_that_changed_after_fit_are_a_warning_once(change, kind):
    model = net()
    guard = ready(kind, model)
    guard.predict(TEST[0])
    CHANGES[change](model)
    with pytest.warns(IgeoodWarning, match=r"^model: its weights have changed .*; fit and calibrate again$") as told:
        guard.predict(TEST[0])
    assert len(told) == 1
    assert told[0].filename == __file__
    guard.predict(TEST[0])  # warnings are errors here: it is told once
    guard.fit(split(TRAIN)).calibrate(split(HELD_OUT)).predict(TEST[0])


@pytest.mark.parametrize(("change", "kind"), turns(SAME, often=2))
def test_weights_that_are_the_same_are_none(change, kind):
    model = net()
    guard = ready(kind, model)
    SAME[change](model)
    guard.predict(TEST[0])


@pytest.mark.parametrize("stage", ["score", "predict", "explain", "calibrate"])
def test_each_stage_tells(stage):
    model = net()
    guard = ready("white", model)
    one_value(model)
    with pytest.warns(IgeoodWarning, match="its weights have changed"):
        getattr(guard, stage)(split(HELD_OUT))


def test_weights_that_came_back_are_no_warning():
    model = net()
    guard = ready("black", model)
    before = copy.deepcopy(model.state_dict())
    loaded(model)
    model.load_state_dict(before)
    guard.predict(TEST[0])


def test_a_fit_that_fails_does_not_settle_for_the_new_weights():
    model = net()
    guard = ready("black", model)
    one_value(model)
    with pytest.raises(InputError):
        guard.fit([(TRAIN[0], TRAIN[1] + 9)])
    with pytest.warns(IgeoodWarning, match="its weights have changed"):
        guard.predict(TEST[0])


def test_a_saved_guard_belongs_to_the_weights_of_its_fit(tmp_path):
    model = net()
    guard = ready("black", model)
    one_value(model)
    guard.save(tmp_path / "guard.safetensors")
    with pytest.raises(InputError, match=f"was made with {fingerprint(net())}"):
        igeood.load(tmp_path / "guard.safetensors", model)
    loaded_guard = igeood.load(tmp_path / "guard.safetensors", net())
    loaded_guard.predict(TEST[0])
    one_value(loaded_guard.inputs.model)
    with pytest.warns(IgeoodWarning, match="its weights have changed"):
        loaded_guard.predict(TEST[0])


def test_a_copy_of_a_guard_watches_its_own_model():
    guard = ready("black", net())
    other = copy.deepcopy(guard)
    one_value(guard.inputs.model)
    other.predict(TEST[0])
    one_value(other.inputs.model)
    with pytest.warns(IgeoodWarning, match="its weights have changed"):
        other.predict(TEST[0])


def test_a_look_at_weights_that_stay_takes_no_fingerprint(monkeypatch):
    model = net()
    watch = WeightWatch(model)
    monkeypatch.setattr(fingerprints, "fingerprint", lambda _: pytest.fail("a pass over all weights"))
    assert not watch.changed(model)


def test_weights_of_several_precisions_and_kinds():
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(3, 4, dtype=torch.float16))
    model.b = nn.Parameter(torch.zeros((), dtype=torch.float64))
    model.c = nn.Parameter(torch.zeros(0, 2))
    model.d = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    model.register_buffer("e", torch.zeros(2, dtype=torch.int64))
    watch = WeightWatch(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not watch.changed(model)
    for name in "abd":
        getattr(model, name).data.add_(1.0)
        assert watch.changed(model)
        getattr(model, name).data.sub_(1.0)
        assert not watch.changed(model)
