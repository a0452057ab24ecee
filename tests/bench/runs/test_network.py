"""Networks from files: what they say of themselves, and what the user says."""

import pytest
import torch
from safetensors.torch import save_file

from igeood.bench.networks import build
from igeood.bench.runs import load_network


@pytest.fixture
def path(tmp_path):
    """Weights that say nothing of themselves."""
    save_file(build("resnet-10-16", 7).state_dict(), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_a_network_is_what_its_file_and_the_user_say(path):
    network = load_network(f"resnet-10-16:{path}", in_distribution="cifar-10")
    assert (network.name, network.mean) == ("resnet-10-16", (0.4914, 0.4822, 0.4465))
    about = {"network": "resnet-10-16", "head": "deconf-c", "trained_on": "mine", "mean": "0.1,0.2,0.3", "std": "1,1,1"}
    save_file(build("resnet-10-16", 7, head="deconf-c").state_dict(), path, about)
    network = load_network(str(path))
    assert (network.name, network.mean) == ("resnet-10-16 deconf-c", (0.1, 0.2, 0.3))
    assert network.model(torch.zeros(1, 3, 32, 32))["h"].shape == (1, 7)


@pytest.mark.parametrize(
    ("spec", "trained_on", "argument"),
    [
        ("{}", None, "network"),
        ("resnet-10-16:{}", None, "in_distribution"),
        ("resnet-10-16:{}", "mine", "network"),  # nobody says how its inputs are normalised
        ("resnet-1016:{}", "cifar-10", "network"),
        ("resnet-34:{}", "cifar-10", "weights"),
    ],
)
def test_what_a_network_must_say(path, spec, trained_on, argument, refused):
    with refused(argument):
        load_network(spec.format(path), in_distribution=trained_on)


def test_a_network_of_ones_own(world, tmp_path, monkeypatch, refused):
    source = 'from igeood.bench.networks import build\n\nmake = lambda: build("resnet-10-16")\n'
    (tmp_path / "own_nets.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    weights = load_network(str(world / "net.safetensors")).model.state_dict()
    torch.save(weights, tmp_path / "w.pt")
    network = load_network("own_nets:make", weights=tmp_path / "w.pt", in_distribution="cifar-10")
    assert (network.name, network.file, network.size) == ("own_nets:make", "w.pt", 32)
    assert all(torch.equal(value, weights[name]) for name, value in network.model.state_dict().items())
    with refused("in_distribution"):  # what was it trained on?
        load_network("own_nets:make", weights=tmp_path / "w.pt")
