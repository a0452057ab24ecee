"""Weights from files, without running any code."""

import pytest
import torch
from safetensors.torch import save_file

from igeood.bench.networks import build
from igeood.errors import InputError
from igeood.model.factory import load_weights

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
