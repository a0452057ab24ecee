"""Weights from files."""

import pytest
import torch
from safetensors.torch import save_file

from igeood.bench.networks import build, load_weights
from igeood.errors import InputError


@pytest.fixture
def source():
    torch.manual_seed(3)
    return build("resnet-10-16", 5)


@pytest.mark.parametrize("wrap", [
    lambda s: s, lambda s: {name: value for name, value in s.items() if "num_batches" not in name},  # of older files
    lambda s: {"state_dict": s}, lambda s: {"model": s, "epoch": 3},
    lambda s: {f"module.{name}": value for name, value in s.items()},
])  # fmt: skip
def test_state_dicts(source, tmp_path, wrap):
    torch.save(wrap(source.state_dict()), tmp_path / "w.pt")
    loaded = load_weights(build("resnet-10-16", 5), tmp_path / "w.pt").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in source.state_dict().items())


def test_files_of_another_architecture_or_without_weights(source, tmp_path):
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"another architecture .*Missing key.*layer1\.1.*name the network"):
        load_weights(build("resnet-34", 5), tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"size mismatch for fc\.weight"):
        load_weights(build("resnet-10-16", 6), tmp_path / "w.safetensors")
    for name in ("w.txt", "w.pth", "x.safetensors"):
        (tmp_path / name).write_text("weights")
    torch.save([1, 2], tmp_path / "list.pt")
    wrong = {"none.pt": "no file", "w.txt": "neither", "list.pt": "no state dict"}
    for name, message in {**wrong, "w.pth": "damaged", "x.safetensors": "damaged"}.items():
        with pytest.raises(InputError, match=rf"^weights: .*{message}"):
            load_weights(source, tmp_path / name)
