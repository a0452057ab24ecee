"""The real network on real images: runs where $IGEOOD_DATA has them."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import igeood
from igeood.bench.networks import build, load_weights
from igeood.metrics import evaluate
from igeood.model.batches import as_batch

DATA = Path(os.environ.get("IGEOOD_DATA", ""))
WEIGHTS = DATA / "weights" / "densenet-bc-100-cifar10.safetensors"
pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(
        not (os.environ.get("IGEOOD_DATA") and WEIGHTS.exists()), reason="set IGEOOD_DATA to the folder of real data"
    ),
]


def normalised(images):
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)))
    return (torch.as_tensor(images).float() / 255 - mean) / std


def cifar(name, n):
    records = np.fromfile(DATA / "cifar-10-batches-bin" / name, dtype=np.uint8, count=n * 3073).reshape(n, 3073)
    return normalised(records[:, 1:].reshape(n, 3, 32, 32)), torch.from_numpy(records[:, 0].astype(np.int64))


def pictures(folder, pattern, n):
    found = []
    for path in sorted((DATA / folder).rglob(pattern))[:: max(1, 1500 // n)][:n]:
        image = Image.open(path).convert("RGB")
        scale = 32 / min(image.size)
        image = image.resize([max(32, round(scale * s)) for s in image.size], Image.Resampling.BILINEAR)
        left, top = ((s - 32) // 2 for s in image.size)
        found.append(np.asarray(image.crop((left, top, left + 32, top + 32))).transpose(2, 0, 1))
    return normalised(np.stack(found))


@pytest.fixture(scope="module")
def network():
    return load_weights(build("densenet-bc-100"), WEIGHTS).to(memory_format=torch.channels_last)


@pytest.fixture(scope="module")
def outputs(network):
    """Outputs of training, test and OOD images: one forward pass for all tests."""
    sources = {
        "train": cifar("data_batch_1.bin", 1500),
        "test": cifar("test_batch.bin", 1000),
        "tiny": pictures("tiny-imagenet-200/test/images", "*.JPEG", 400),
        "chars": pictures("English/Img/GoodImg/Bmp", "*.png", 400),
    }
    layers = ["conv1", "trans1", "trans2", "relu"]
    return {name: igeood.extract(network, source, layers) for name, source in sources.items()}


def test_the_checkpoint_loads_as_it_is_and_is_as_good_as_it_says(outputs):
    right = (outputs["test"].logits.argmax(1) == outputs["test"].labels).double().mean()
    assert 0.92 < right < 0.97  # 94.54% on the whole test set; these are a tenth of it
    assert [f.shape[1] for f in outputs["test"].features.values()] == [24, 108, 150, 342]


def test_black_box_figures(outputs):
    """An independent reference found MSP at 37 and 38, Energy at 54 and 44, IGEOOD at 54 and 50; 400 images: ± 5."""
    found = {}
    for name in ("msp", "energy", "igeood-logits"):
        detector = igeood.detector(name).fit(outputs["train"])
        inside = detector.score(outputs["test"])
        found[name] = [100 * evaluate(inside, detector.score(outputs[o])).tnr_at_tpr for o in ("tiny", "chars")]
    for name, expected in {"msp": (37, 38), "energy": (54, 44), "igeood-logits": (54, 50)}.items():
        assert found[name] == pytest.approx(expected, abs=9), name
    assert np.mean(found["igeood-logits"]) > np.mean(found["msp"])


def test_igeood_plus_is_ahead_of_mahalanobis(outputs):
    gains = []
    for name in ("tiny", "chars"):
        rates = {}
        for method in ("mahalanobis", "igeood+"):
            detector = igeood.detector(method).fit(outputs["train"])
            detector.learn_weights(outputs["test"][:300], outputs[name][:200])
            found = evaluate(detector.score(outputs["test"][300:]), detector.score(outputs[name][200:]))
            rates[method] = found.tnr_at_tpr
        gains.append(100 * (rates["igeood+"] - rates["mahalanobis"]))
    assert np.mean(gains) >= 11


def test_fgsm_leaves_about_14_percent(network):
    x, y = cifar("test_batch.bin", 200)
    guard = igeood.white_box(network, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010), layers=["conv1"])
    _, attack = guard.inputs.attacked(as_batch((x, y)), guard.detector, 0.05, (0.0,))
    assert attack.linf == pytest.approx(0.25, abs=0.01)
    assert 0.07 < attack.accuracy < 0.22


@pytest.mark.parametrize("size", [1, 7, 64])
def test_images_in_batches_and_shards_give_one_guard(network, size):
    """The same sample to the row, and scores that differ by rounding in the network only."""
    (x, y), held_out = cifar("data_batch_1.bin", 150), cifar("test_batch.bin", 60)[0]
    whole = igeood.white_box(network).fit((x, y), budget=100_000)
    batches = list(zip(x.split(size), y.split(size), strict=True))
    shards = [igeood.summarise(whole, batches[i::2], budget=100_000) for i in range(2)]
    merged = igeood.white_box(network).fit(shards[1] + shards[0])
    for kind, sample in whole.summary.samples.items():
        assert np.array_equal(sample.keys, merged.summary.samples[kind].keys)
    assert len(whole.summary.samples["features"]) < 150
    scores = merged.score(list(held_out.split(size)))
    torch.testing.assert_close(scores, whole.score(held_out), rtol=1e-4, atol=1e-4)
