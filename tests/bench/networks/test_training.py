"""Training: it learns, and a run that was killed ends with the same weights to the bit."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from igeood.bench.networks import NETWORKS, Recipe, Task, build, load_weights, read_weights, train
from igeood.bench.networks.training import Run, accuracies, augmented, normalised
from igeood.errors import IgeoodError, InputError

SHORT = Recipe(epochs=2, batch=16, rate=0.05)


def make_task(n=80, classes=4, seed=0):
    """Squares of one colour a class, on noise: learnt in a few steps."""
    draw = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    images = draw.integers(0, 60, size=(n, 3, 32, 32), dtype=np.uint8)
    for i, label in enumerate(labels):
        images[i, label % 3, 8:24, 8:24] += np.uint8(120 + 60 * (label // 3))
    split = 3 * n // 4
    return Task("squares", classes, images[:split], labels[:split], images[split:], labels[split:])


@pytest.fixture(scope="module")
def task():
    return make_task()


@pytest.fixture(scope="module")
def trained(task, tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "net.safetensors"
    return path, train("resnet-10-16", task, path, SHORT)


def test_the_file_says_how_it_was_made_and_loads(trained, task):
    path, found = trained
    _, about = read_weights(path)
    assert about["network"] == "resnet-10-16"
    assert about["trained_on"] == "squares"
    assert float(about["test_accuracy"]) == pytest.approx(found.softmax, abs=1e-4)
    model = load_weights(build("resnet-10-16", 4), path)
    assert not model.training
    assert accuracies(model, task) == found
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert (about["train_images"], about["test_images"]) == ("60", "20")


def test_it_learns(tmp_path):
    task = make_task(400)
    found = train(
        "resnet-10-16", task, tmp_path / "n.safetensors", Recipe(epochs=6, batch=25, rate=0.05, augment=False)
    )
    assert found.softmax > 0.9
    assert found.fisher_rao > 0.9


def test_a_run_that_stops_anywhere_ends_with_the_same_weights(trained, task, tmp_path):
    whole = load_file(trained[0])
    for stop in (1, 3, 4, 6):  # within the first epoch, before its end, at its end, within the second
        path = tmp_path / f"{stop}.safetensors"

        def interrupt(now, stop=stop):
            if now.epoch * now.steps + now.step == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train("resnet-10-16", task, path, SHORT, progress=interrupt, every=0.0)
        assert not path.exists()
        train("resnet-10-16", task, path, SHORT, every=0.0)
        again = load_file(path)
        assert all(torch.equal(whole[name], again[name]) for name in whole)


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from test_training import SHORT, make_task
from igeood.bench.networks import train
train("resnet-10-16", make_task(), sys.argv[1], SHORT, every=0.0)
"""


def test_a_run_that_is_killed_ends_with_the_same_weights(trained, tmp_path):
    path = tmp_path / "net.safetensors"
    command = [sys.executable, "-c", KILLED, str(path), str(Path(__file__).parent)]
    for _ in range(2):
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        checkpoint = path.with_suffix(".training")
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        while process.poll() is None and (not checkpoint.exists() or checkpoint.stat().st_mtime_ns == before):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    train("resnet-10-16", make_task(), path, SHORT)
    whole, again = load_file(trained[0]), load_file(path)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_checkpoint_of_another_run_is_refused(task, tmp_path):
    path = tmp_path / "net.safetensors"
    run = Run("resnet-10-16", task, SHORT)
    run.advance()
    run.save(path.with_suffix(".training"))
    with pytest.raises(InputError, match=r"another recipe: seed 0 there, 1 here.*delete it to start anew"):
        train("resnet-10-16", task, path, replace(SHORT, seed=1))
    with pytest.raises(InputError, match="data"):
        train("resnet-10-16", make_task(seed=1), path, SHORT)
    path.with_suffix(".training").write_bytes(b"garbage")
    with pytest.raises(IgeoodError, match="checkpoint"):
        train("resnet-10-16", task, path, SHORT)


def test_what_is_there_is_not_overwritten(trained, task):
    before = trained[0].read_bytes()
    with pytest.raises(InputError, match="is there already"):
        train("resnet-10-16", task, trained[0], SHORT)
    assert trained[0].read_bytes() == before


def test_seeds_differ_and_repeat(task):
    first, again, other = (Run("resnet-10-16", task, replace(SHORT, seed=seed)) for seed in (0, 0, 1))
    for run in (first, again, other):
        run.advance()
    a, b, c = (run.model.state_dict()["fc.weight"] for run in (first, again, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_training_leaves_the_random_state(task):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    Run("resnet-10-16", task, SHORT).advance()
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_the_rate_steps_at_half_and_three_quarters():
    rates = [Recipe(epochs=300).rate_at(epoch) for epoch in (0, 149, 150, 224, 225, 299)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_augmentation_shifts_and_mirrors():
    images = np.zeros((200, 3, 32, 32), dtype=np.uint8)
    images[:, :, 16, 10] = 255
    found = augmented(images, np.random.default_rng(0))
    assert found.shape == images.shape
    _, _, rows, columns = np.nonzero(found)
    assert set(rows) == set(range(12, 21))
    assert set(columns) == set(range(6, 15)) | set(range(17, 26))  # as they were, and mirrored
    assert (found.reshape(200, -1).max(axis=1) == 255).all()


def test_statistics_of_the_channels(task):
    pixels = task.images.astype(np.float64) / 255
    assert task.mean == pytest.approx(tuple(pixels.mean(axis=(0, 2, 3))), abs=5e-5)
    assert task.std == pytest.approx(tuple(pixels.std(axis=(0, 2, 3))), abs=5e-5)


def test_normalised():
    images = np.full((1, 3, 2, 2), 255, dtype=np.uint8)
    assert normalised(images, (0.5, 0.5, 0.0), (0.5, 0.25, 1.0))[0, :, 0, 0].tolist() == [1.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("options", "name"),
    [({"epochs": 0}, "epochs"), ({"batch": 1}, "batch"), ({"rate": float("nan")}, "rate"), ({"seed": True}, "seed")],
)
def test_recipes_that_cannot_be(options, name):
    with pytest.raises(InputError, match=f"^{name}: "):
        Recipe(**options)


def test_a_loss_that_blows_up_is_said(task, tmp_path):
    with pytest.raises(InputError, match=r"^rate: the loss is no longer finite"):
        train("resnet-10-16", task, tmp_path / "n.safetensors", Recipe(epochs=30, batch=16, rate=1e12))


def test_a_class_without_images():
    with pytest.raises(InputError, match=r"labels: no training image of class 2 \(1 of 3 have none\)"):
        Task(
            "x",
            3,
            np.zeros((2, 3, 32, 32), np.uint8),
            np.arange(2),
            np.zeros((1, 3, 32, 32), np.uint8),
            np.zeros(1, int),
        )


def test_images_without_labels():
    with pytest.raises(InputError, match="images: 3 images and 2 labels"):
        Task("x", 2, np.zeros((3, 3, 32, 32), np.uint8), np.zeros(2, int), *(np.zeros((1, 3, 32, 32), np.uint8),) * 2)


def test_every_network_has_the_papers_features():
    assert sum(p.numel() for p in build("densenet-bc-100").parameters()) == 769_162
    assert all(build(name, 7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7) for name in NETWORKS)
    with pytest.raises(InputError, match="did you mean 'resnet-34'"):
        build("resnet34")
