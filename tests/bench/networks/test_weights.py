"""Weights from files."""

import pickle

import pytest
import torch
from safetensors.torch import save_file

from igeood.bench.networks import build, load_weights
from igeood.errors import InputError


@pytest.fixture
def source():
    torch.manual_seed(3)
    return build("resnet-10-16", 5)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_safetensors(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    assert same(load_weights(build("resnet-10-16", 5), tmp_path / "w.safetensors"), source)


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s}, lambda s: {"model": s, "epoch": 3}])
def test_state_dicts(source, tmp_path, wrap):
    torch.save(wrap(source.state_dict()), tmp_path / "w.pt")
    assert same(load_weights(build("resnet-10-16", 5), tmp_path / "w.pt"), source)


def test_names_of_a_data_parallel_model(source, tmp_path):
    torch.save({f"module.{name}": value for name, value in source.state_dict().items()}, tmp_path / "w.pth")
    assert same(load_weights(build("resnet-10-16", 5), tmp_path / "w.pth"), source)


def test_another_architecture_names_the_keys(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    model = build("resnet-34", 5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError) as error:
        load_weights(model, tmp_path / "w.safetensors")
    assert "missing (layer1.1.bn1.bias" in str(error.value)
    assert "bn1.bias (16,) for (64,)" in str(error.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(InputError, match=r"fc.bias \(5,\) for \(6,\)"):
        load_weights(build("resnet-10-16", 6), tmp_path / "w.safetensors")


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.safetensors"])
def test_a_pickle_is_never_executed(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(InputError, match=r"weights: .* is damaged"):
        load_weights(build("resnet-10-16", 5), tmp_path / name)
    torch.save({"state_dict": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(InputError, match="more than tensors"):
        load_weights(build("resnet-10-16", 5), tmp_path / "evil.pt")


def test_files_that_hold_no_weights(source, tmp_path):
    with pytest.raises(InputError, match="there is no file"):
        load_weights(source, tmp_path / "none.safetensors")
    (tmp_path / "w.txt").write_text("weights")
    with pytest.raises(InputError, match="neither"):
        load_weights(source, tmp_path / "w.txt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(InputError, match="no state dict"):
        load_weights(source, tmp_path / "list.pt")
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    content = (tmp_path / "w.safetensors").read_bytes()
    for cut in (0, 4, 100, len(content) // 2):
        (tmp_path / "cut.safetensors").write_bytes(content[:cut])
        with pytest.raises(InputError, match="is damaged"):
            load_weights(source, tmp_path / "cut.safetensors")
