"""Training: it learns, and a run that was killed ends with the same weights to the bit."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from igeood.bench.networks import NETWORKS, Recipe, Task, build, train
from igeood.bench.networks.training import Run, accuracy, augmented
from igeood.errors import GuardFileError, InputError
from igeood.model.factory import load_weights, read_weights

SHORT = Recipe(epochs=3, batch=12, rate=0.05)


def make_task(n=48, classes=4, seed=0):
    """Squares of one colour a class, on noise: learnt in a few steps."""
    draw = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    images = draw.integers(0, 60, size=(n, 3, 32, 32), dtype=np.uint8)
    for i, label in enumerate(labels):
        images[i, label % 3, 8:24, 8:24] += np.uint8(120 + 60 * (label // 3))
    split = 3 * n // 4
    return Task("squares", classes, images[:split], labels[:split], images[split:], labels[split:])


TASK = make_task()


def test_the_file_describes_its_training_and_loads(tmp_path):
    path = tmp_path / "net.safetensors"
    share = train("resnet-10-16", TASK, path, SHORT)
    about = read_weights(path)[1]
    assert about.items() >= {"network": "resnet-10-16", "trained_on": "squares", "classes": "4"}.items()
    assert Recipe(**json.loads(about["training"])["recipe"]) == SHORT
    assert accuracy(load_weights(build("resnet-10-16", 4), path), TASK) == share
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # neither checkpoint nor lock
    with pytest.raises(InputError):
        train("resnet-10-16", TASK, path, SHORT)  # it is there


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_a_run_that_stops_anywhere_ends_with_the_same_weights(tmp_path, optimiser):
    recipe = replace(SHORT, optimiser=optimiser)
    train("resnet-10-16", TASK, tmp_path / "whole.safetensors", recipe)
    for stop in (1, 3, 5):  # within the first epoch, at its end, within the second

        def interrupt(now, stop=stop):
            if now.epoch * now.steps + now.step == stop:
                raise KeyboardInterrupt

        path = tmp_path / f"{stop}.safetensors"
        with pytest.raises(KeyboardInterrupt):
            train("resnet-10-16", TASK, path, recipe, progress=interrupt)
        assert not path.exists()
        train("resnet-10-16", TASK, path, recipe)
        torch.testing.assert_close(load_file(path), load_file(tmp_path / "whole.safetensors"), rtol=0, atol=0)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path, run = tmp_path / "net.safetensors", Run("resnet-10-16", TASK, SHORT)
    run.save(path.with_suffix(".training"))
    for other, recipe in ((TASK, replace(SHORT, seed=1)), (make_task(seed=1), SHORT)):
        with pytest.raises(InputError):
            train("resnet-10-16", other, path, recipe)
    path.with_suffix(".training").write_bytes(b"garbage")
    with pytest.raises(GuardFileError):
        train("resnet-10-16", TASK, path, SHORT)


def test_a_decomposed_head_is_trained_without_decay_of_its_cosines(tmp_path):
    run = Run("resnet-10-16", TASK, SHORT, head="deconf-c")
    bare = [group["params"] for group in run.optimiser.param_groups if group["weight_decay"] == 0]
    assert [[id(p) for p in parameters] for parameters in bare] == [[id(run.model.fc.h.weight)]]
    share = train("resnet-10-16", TASK, tmp_path / "n.safetensors", SHORT, head="deconf-c")
    model = load_weights(build("resnet-10-16", 4, head="deconf-c"), tmp_path / "n.safetensors")
    assert accuracy(model, TASK) == share


def test_it_learns_at_a_rate_that_steps_at_half_and_three_quarters(tmp_path):
    recipe = Recipe(epochs=5, batch=20, rate=0.05, augment=False)
    assert train("resnet-10-16", make_task(240), tmp_path / "n.safetensors", recipe) > 0.5  # by chance 0.25
    rates = [Recipe(epochs=300).rate_at(epoch) for epoch in (0, 149, 150, 224, 225, 299)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_augmentation_shifts_and_mirrors():
    images = np.zeros((200, 3, 32, 32), dtype=np.uint8)
    images[:, :, 16, 10] = 255
    shifted = augmented(images, np.random.default_rng(0))
    _, _, rows, columns = np.nonzero(shifted)
    assert set(rows) == set(range(12, 21))
    assert set(columns) == set(range(6, 15)) | set(range(17, 26))  # as they were, and mirrored


def test_recipes_and_networks_that_cannot_be(tmp_path, refused):
    for name, bad in {"epochs": 0, "batch": 1, "rate": float("nan"), "seed": -1, "optimiser": "adma"}.items():
        with refused(name):
            Recipe(**{name: bad})
    with refused("rate"):  # it diverges
        train("resnet-10-16", TASK, tmp_path / "n.safetensors", Recipe(epochs=30, batch=16, rate=1e12))
    assert all(build(name, 7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7) for name in NETWORKS)
