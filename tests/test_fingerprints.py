"""A guard notices that its model's weights are others than those it was fitted with."""

import copy
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import igeood
from igeood import fingerprints
from igeood.errors import IgeoodWarning, InputError
from igeood.fingerprints import WeightWatch, fingerprint

sys.path.insert(0, str(Path(__file__).parent / "contract"))

from models import CASES, Net, net
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


@pytest.mark.parametrize("kind", KINDS)
def test_no_threshold_is_set_with_other_weights(kind):
    model = net()
    guard = ready(kind, model)
    threshold = guard.threshold
    one_value(model)
    with pytest.warns(IgeoodWarning, match="its weights have changed"):
        guard.predict(TEST[0])
    for step in (guard.calibrate, lambda known: guard.tune(known, split(TEST))):
        with pytest.raises(InputError, match=r"^model: its weights have changed since .*; fit it again first$"):
            step(split(HELD_OUT))
    assert guard.threshold == threshold


@pytest.mark.parametrize("stage", ["score", "predict", "explain"])
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


def no_pass_over_all(monkeypatch):
    for name in ("fingerprint", "_sums"):
        monkeypatch.setattr(fingerprints, name, lambda _: pytest.fail("a pass over all weights"))


def test_a_look_at_weights_that_stay_takes_no_fingerprint(monkeypatch):
    model = net()
    watch = WeightWatch(model)
    no_pass_over_all(monkeypatch)
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


def test_the_fingerprint_is_that_of_guards_already_saved():
    model = nn.Module()
    model.a = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    model.b = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    model.c = nn.Parameter(torch.zeros(0, 2, dtype=torch.bfloat16))
    model.register_buffer("d", torch.tensor([True, False]))
    model.register_buffer("e", torch.tensor(7))
    model.register_buffer("f", torch.zeros(3), persistent=False)
    assert fingerprint(model) == "6bfbc82443b2cb7e"


def holding(value):
    """A model with this in its state."""
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    if isinstance(value, torch.Tensor):
        model.register_buffer("more", value)
    else:
        model.__class__ = type("Extra", (nn.Linear,), {"get_extra_state": lambda _: value})
    return model


def quantised(*values):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on its way out, and still met
        return torch.quantize_per_tensor(torch.tensor(values), 0.1, 0, torch.qint8)


STATES = {
    "sparse": lambda a: torch.tensor([[0.0, a], [1.0, 0.0]]).to_sparse(),
    "sparse, by rows": lambda a: torch.tensor([[0.0, a], [1.0, 0.0]]).to_sparse_csr(),
    "quantised": lambda a: quantised(1.0, a),
    "float8": lambda a: torch.tensor([a]).to(torch.float8_e4m3fn),
    "complex, conjugate": lambda a: torch.tensor([1j * a]).conj(),
    "packed": lambda a: (quantised(1.0, a), nn.Parameter(torch.ones(2))),
    "mapping": lambda a: {"a": [None, a], "b": {"c": "d"}},
    "array": lambda a: np.full(3, a),
    "tensors inside": lambda a: [{"a": torch.full((2,), a)}],
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("state", STATES)
def test_whatever_a_state_holds_counts_by_its_values(state):
    make = STATES[state]
    assert fingerprint(holding(make(2.0))) == fingerprint(holding(make(2.0)))
    assert fingerprint(holding(make(2.0))) != fingerprint(holding(make(3.0)))
    model = holding(make(2.0))
    watch = WeightWatch(model)
    assert not watch.changed(model)
    one_more = holding(make(2.0))
    assert not watch.changed(one_more)
    nn.init.zeros_(one_more.bias)
    assert watch.changed(one_more)


@pytest.mark.parametrize("value", [object(), torch.empty(3, device="meta"), {"a": object(), "b": threading.Lock()}])
def test_what_cannot_be_told_counts_by_its_kind(value):
    assert fingerprint(holding(value)) == fingerprint(holding(value)) != fingerprint(holding({}))


def with_buffer(forward, value, persistent=True):
    """A network with one more buffer, and what its forward pass does first."""

    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", value.clone(), persistent=persistent)

        def forward(self, x):
            forward(self)
            return super().forward(x)

    return net(Counting)


def in_place(model):
    model.steps += 1


def another(model):
    model.steps = model.steps + 1


def other_data(model):
    model.steps.data = model.steps.data + 1


COUNTERS = {
    f"{forward.__name__}, {value.dtype}, {value.ndim} axes": (forward, value)
    for forward in (in_place, another, other_data)
    for value in (torch.zeros(()), torch.zeros((), dtype=torch.int64), torch.zeros(1, 2))
}


@pytest.mark.parametrize(("counter", "kind"), turns(COUNTERS, often=2))
def test_what_the_forward_pass_counts_is_no_change(counter, kind, tmp_path):
    model = with_buffer(*COUNTERS[counter])
    guard = ready(kind, model)
    guard.save(tmp_path / "guard.safetensors")
    for used in (guard, igeood.load(tmp_path / "guard.safetensors", model, strict=False)):
        for _ in range(3):
            used.predict(TEST[0])
        used.calibrate(split(HELD_OUT)).predict(TEST[0])
    assert model.steps.sum() > 0
    loaded(model)
    with pytest.warns(IgeoodWarning, match="its weights have changed"):
        guard.predict(TEST[0])


def test_normalisation_that_never_stops_training_is_no_change():
    class Restless(Net):
        def forward(self, x):
            self.norm.train()
            return super().forward(x)

    guard = ready("black", net(Restless))
    for _ in range(2):
        guard.predict(TEST[0])


def test_what_is_not_in_the_state_costs_no_pass_over_all(monkeypatch):
    guard = ready("black", with_buffer(another, torch.zeros(()), persistent=False))
    no_pass_over_all(monkeypatch)
    for _ in range(3):
        guard.predict(TEST[0])


def test_a_weight_that_is_nan_costs_no_pass_over_all(monkeypatch):
    model = net()
    model.unused = nn.Parameter(torch.full((3,), torch.nan))
    watch = WeightWatch(model)
    no_pass_over_all(monkeypatch)
    assert not watch.changed(model)


def test_weights_that_moved_are_not_kept_alive():
    model = net()
    watch = WeightWatch(model)
    before = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    model.double()
    assert all(storage.expired() for storage in before)
    assert watch.changed(model)


def test_a_warning_that_is_an_error_comes_again():
    model = net()
    guard = ready("black", model)
    one_value(model)
    for _ in range(2):
        with pytest.raises(IgeoodWarning, match="its weights have changed"):
            guard.predict(TEST[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_a_sparse_buffer(kind, tmp_path):
    model = with_buffer(lambda _: None, torch.eye(3).to_sparse())
    guard = ready(kind, model)
    guard.save(tmp_path / "guard.safetensors")
    verdict = guard.predict(TEST[0])
    assert torch.equal(igeood.load(tmp_path / "guard.safetensors", model).predict(TEST[0]).score, verdict.score)
    one_value(model)
    with pytest.warns(IgeoodWarning, match="its weights have changed"):
        guard.predict(TEST[0])


def test_a_model_whose_state_cannot_be_told_is_not_watched(tmp_path):
    class Secret(Net):
        def state_dict(self, *_, **__):
            raise NotImplementedError("not here")

    guard = ready("black", net(Secret))
    guard.predict(TEST[0])
    one_value(guard.inputs.model)
    guard.predict(TEST[0])
    with pytest.raises(InputError, match=r"^model: its state_dict\(\) fails.*not here.*; mend it$"):
        guard.save(tmp_path / "guard.safetensors")


def test_weights_of_a_lazy_model_are_watched():
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    guard = ready("black", model)
    guard.predict(TEST[0])
    model[1].weight.data.mul_(2.0)
    with pytest.warns(IgeoodWarning, match="its weights have changed"):
        guard.predict(TEST[0])


@pytest.mark.parametrize("case", CASES)
def test_no_kind_of_model_has_weights_that_change_by_themselves(case):
    model = CASES[case].make()
    guard = igeood.black_box(model).fit(split(TRAIN)).calibrate(split(HELD_OUT))
    for _ in range(2):
        guard.predict(TEST[0])
    assert guard.inputs._moving == set()
