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


def assert_loads(path, source):
    loaded = load_weights(build("resnet-10-16", 5), path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in source.state_dict().items())


def test_safetensors_and_files_without_batch_counts(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    assert_loads(tmp_path / "w.safetensors", source)
    older = {name: value for name, value in source.state_dict().items() if "num_batches" not in name}
    save_file(older, tmp_path / "older.safetensors")
    assert_loads(tmp_path / "older.safetensors", source)


@pytest.mark.parametrize("wrap", [
    lambda s: s, lambda s: {"state_dict": s}, lambda s: {"model": s, "epoch": 3},
    lambda s: {f"module.{name}": value for name, value in s.items()},
])  # fmt: skip
def test_state_dicts(source, tmp_path, wrap):
    torch.save(wrap(source.state_dict()), tmp_path / "w.pt")
    assert_loads(tmp_path / "w.pt", source)


def test_another_architecture_names_the_keys(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"another architecture .*Missing key.*layer1\.1.*name the network"):
        load_weights(build("resnet-34", 5), tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"size mismatch for fc\.weight"):
        load_weights(build("resnet-10-16", 6), tmp_path / "w.safetensors")


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


def test_a_pickle_is_never_executed(source, tmp_path):
    torch.save({"state_dict": Evil()}, tmp_path / "w.pt")
    (tmp_path / "w.pth").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "w.safetensors").write_bytes(pickle.dumps(Evil()))
    for name in ("w.pt", "w.pth", "w.safetensors"):
        with pytest.raises(InputError, match=r"weights: .* is damaged"):
            load_weights(source, tmp_path / name)


def test_files_that_hold_no_weights(source, tmp_path):
    (tmp_path / "w.txt").write_text("weights")
    torch.save([1, 2], tmp_path / "list.pt")
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "w.safetensors").read_bytes()[:1000])
    wrong = {"none.pt": "no file", "w.txt": "neither", "list.pt": "no state dict", "cut.safetensors": "is damaged"}
    for name, message in wrong.items():
        with pytest.raises(InputError, match=message):
            load_weights(source, tmp_path / name)
