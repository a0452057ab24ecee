"""Which weights a model has, and weights from files, without running any code."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from igeood.bench.networks import build
from igeood.errors import InputError
from igeood.model.factory import load_weights
from igeood.model.fingerprint import Versions, fingerprint


def loaded(model, **options):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, **options)


CHANGES = {
    "one tensor": lambda model: nn.init.constant_(model.fc.bias, 3.0),
    "one buffer": lambda model: model.train()(torch.rand(4, 2, 5, 5)),
    "other storage": lambda model: setattr(model.fc.weight, "data", model.fc.weight.data * 2),
    "a new parameter": lambda model: setattr(model.fc, "bias", nn.Parameter(model.fc.bias.detach() + 1)),
    "a new layer": lambda model: setattr(model, "hidden", nn.Linear(6, 5)),
    "loaded": loaded,
    "assigned": lambda model: loaded(model, assign=True),
    "half precision": lambda model: model.half(),
}
SAME = {
    "evaluation mode": lambda model: model.eval(),
    "gradients": lambda model: model.eval()(torch.rand(4, 2, 5, 5)).sum().backward(),
    "frozen": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES | SAME)
def test_changes_are_noticed_and_nothing_else(net, change):
    before, versions = fingerprint(net), Versions(net)
    assert not versions.changed()
    (CHANGES | SAME)[change](net)
    assert versions.changed() == (fingerprint(net) != before) == (change in CHANGES)


def test_inference_tensors_have_no_counter_and_lazy_ones_no_values():
    with torch.inference_mode():
        model = nn.Linear(2, 3)
    lazy = nn.LazyLinear(3)
    before, versions, lazy_versions = fingerprint(lazy), Versions(model), Versions(lazy)
    assert not versions.changed() | lazy_versions.changed()
    model.weight = nn.Parameter(torch.ones(3, 2))
    lazy(torch.rand(2, 4))
    assert versions.changed() & lazy_versions.changed()
    assert fingerprint(lazy) != before


def test_the_fingerprint_is_the_same_in_every_process():
    model = nn.Module()
    model.a = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    model.b = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    model.c = nn.Parameter(torch.zeros(0, 2, dtype=torch.bfloat16))
    model.register_buffer("d", torch.tensor([True, False]))
    model.register_buffer("e", torch.tensor(7))
    model.register_buffer("f", torch.zeros(3), persistent=False)
    assert fingerprint(model) == "6bfbc82443b2cb7e"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrap", [lambda frozen: frozen, nn.Sequential, nn.DataParallel])
def test_frozen_graphs_count_by_their_constants_through_files_and_in_wrappers(net, tmp_path, wrap):
    other = copy.deepcopy(net)
    nn.init.constant_(other.fc.bias, 3.0)
    one, changed = (torch.jit.freeze(torch.jit.script(each.eval())) for each in (net, other))
    torch.jit.save(one, tmp_path / "frozen.pt")
    loaded = torch.jit.load(tmp_path / "frozen.pt")
    assert fingerprint(wrap(one)) == fingerprint(wrap(loaded)) != fingerprint(wrap(changed))
    assert fingerprint(torch.jit.script(net)) == fingerprint(net)


STATES = {
    "sparse": lambda a: torch.tensor([[0.0, a], [1.0, 0.0]]).to_sparse(),
    "float8": lambda a: torch.tensor([a]).to(torch.float8_e4m3fn),
    "complex, conjugate": lambda a: torch.tensor([1j * a]).conj(),
    "packed": lambda a: (torch.tensor([a]), None),
}


def holding(value):
    """A model with this in its state."""
    model = nn.Module()
    if isinstance(value, torch.Tensor):
        model.register_buffer("more", value)
    else:
        model.__class__ = type("Extra", (nn.Module,), {"get_extra_state": lambda _: value})
    return model


@pytest.mark.parametrize("state", STATES)
def test_state_of_every_kind_counts_by_its_values_or_its_type(state):
    one, same, other = (holding(STATES[state](value)) for value in (2.0, 2.0, 3.0))
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
    assert not Versions(one).changed()
    for value in (object(), torch.empty(3, device="meta")):
        assert fingerprint(holding(value)) == fingerprint(holding(value)) != fingerprint(holding(3.5))


FORMS = {
    "plain": lambda state: state,
    "older": lambda state: {name: value for name, value in state.items() if "num_batches" not in name},
    "state_dict": lambda state: {"state_dict": state},
    "model": lambda state: {"model": state, "epoch": 3},
    "module": lambda state: {f"module.{name}": value for name, value in state.items()},
}


@pytest.fixture
def source():
    torch.manual_seed(3)
    return build("resnet-10-16", 5)


@pytest.mark.parametrize("form", FORMS)
def test_state_dicts(source, tmp_path, form):
    torch.save(FORMS[form](source.state_dict()), tmp_path / "w.pt")
    loaded = load_weights(build("resnet-10-16", 5), tmp_path / "w.pt").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in source.state_dict().items())


def test_files_of_another_architecture_or_without_weights(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    for other, key in ((build("resnet-34", 5), r"layer1\.1"), (build("resnet-10-16", 6), r"fc\.weight")):
        with pytest.raises(InputError, match=key):
            load_weights(other, tmp_path / "w.safetensors")
    for name in ("w.txt", "w.pth", "x.safetensors"):
        (tmp_path / name).write_text("weights")
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("none.pt", "w.txt", "list.pt", "w.pth", "x.safetensors"):
        with pytest.raises(InputError, match=name) as caught:
            load_weights(source, tmp_path / name)
        assert caught.value.argument == "weights"
