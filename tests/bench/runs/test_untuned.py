"""Every method as it is, on networks of the user's own and on aliased images."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import save_file

import igeood
from igeood.bench.datasets import load
from igeood.bench.methods.deconf import EPSILONS
from igeood.bench.networks import build
from igeood.bench.runs import load_network, run
from igeood.bench.runs.plan import cells as planned
from igeood.cli import main
from igeood.detectors import METHODS
from igeood.errors import InputError

NETS = """
from igeood.bench.networks import build

def make():
    return build("resnet-10-16")
"""


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_every_method_is_measured_on_all_test_images(world, network, plan, tmp_path):
    names = ("msp", "fisher-rao-product", "react", "she", "gram", "batch-norm")
    results = run([network], plan(settings=("untuned",), methods=names), tmp_path, root=world)
    cells = results.cells.records
    assert {(c["method"], c["validation"], c["id_images"]) for c in cells} == {(name, "none", 80) for name in names}
    untuned = {name for name, method in METHODS.items() if method.tunes != "only"}
    assert {cell.method for cell in planned(plan(settings=("untuned",)), "cifar-10")} == untuned
    train, test = (load("cifar-10", root=world, split=split) for split in ("train", "test"))
    guard = igeood.white_box(network.model, method="fisher-rao-product").fit(network.batches(train, 25))
    red = load(plan().ood[0], root=world)
    inside, outside = (guard.score(network.batches(images, 25)) for images in (test.limited(80), red))
    (tnr,) = [c["tnr"] for c in cells if c["method"] == "fisher-rao-product" and c["ood"] != "gaussian"]
    assert tnr == pytest.approx(igeood.metrics.tnr_at_tpr(inside, outside), abs=0.02)


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


def test_a_network_of_ones_own(world, tmp_path, monkeypatch):
    (tmp_path / "own_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    torch.save(load_network(str(world / "net.safetensors")).model.state_dict(), tmp_path / "w.pt")
    common = ["--ood", "gaussian", "--setting", "untuned", "--method", "msp", "--images", 40, "--root", world, "--json"]
    own = ["--network", "own_nets:make", "--weights", tmp_path / "w.pt"]
    results = [
        bench(*own, "--in-distribution", "cifar-10", *common, "--out", tmp_path / "a"),
        bench("--network", world / "net.safetensors", *common, "--out", tmp_path / "b"),
    ]
    ours, theirs = (json.loads(result.stdout) for result in results)
    assert ours["tnr"] == theirs["tnr"]
    assert bench(*own, *common, "--out", tmp_path / "c").exit_code == 2  # what was it trained on?


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
