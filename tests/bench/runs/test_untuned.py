"""Every method as it is, on networks of the user's own and on aliased images."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from igeood.bench.datasets import load
from igeood.bench.methods.deconf import EPSILONS
from igeood.bench.networks import build
from igeood.bench.runs import load_network, run
from igeood.bench.runs.plan import cells as planned
from igeood.detectors import METHODS
from igeood.errors import InputError


def test_every_method_is_measured_on_all_test_images(world, network, plan, tmp_path):
    names = ("msp", "fisher-rao-product", "react", "gram")
    cells = run([network], plan(settings=("untuned",), methods=names), tmp_path, root=world).cells.records
    assert {(c["method"], c["validation"], c["id_images"]) for c in cells} == {(name, "none", 80) for name in names}
    untuned = {name for name, method in METHODS.items() if method.tunes != "only"}
    assert {cell.method for cell in planned(plan(settings=("untuned",)), "cifar-10")} == untuned


def test_deconf_chooses_its_step_on_in_distribution_images(world, network, plan, tmp_path):
    torch.manual_seed(0)
    about = {"network": "resnet-10-16", "head": "deconf-c", "trained_on": "cifar-10"}
    save_file(build("resnet-10-16", head="deconf-c").state_dict(), tmp_path / "net.safetensors", about)
    deconf = load_network(str(tmp_path / "net.safetensors"))
    grey = plan(settings=("grey-box", "untuned"), methods=("deconf-c", "energy"), validation=("none",))
    results = run([deconf], grey, tmp_path / "out", root=world)
    assert {c["network"] for c in results.cells.records} == {"resnet-10-16 deconf-c"}
    record = next(t for t in results.tunings.records if (t["setting"], t["method"]) == ("grey-box", "deconf-c"))
    means = {step["epsilon"]: step["mean_score"] for step in record["tuning"]["steps"]}
    assert tuple(means) == EPSILONS
    assert means[record["epsilon"]] == min(means.values())
    with pytest.raises(InputError):  # a network without the head
        run([network], grey, tmp_path / "other", root=world)


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


def test_images_by_the_nearest_pixel(tmp_path, refused):
    (tmp_path / "sets").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "sets" / "one.png")
    name = f"folder:{tmp_path / 'sets'}"
    smooth, nearest = load(name), load(f"{name}-nearest")
    np.testing.assert_array_equal(nearest.images()[0], pixels[1::2, 1::2].transpose(2, 0, 1))
    assert smooth.digest != nearest.digest
    assert smooth.contents() == nearest.contents()  # what was tuned on is still recognised
    with refused("name"):
        load("gaussian-nearest")
