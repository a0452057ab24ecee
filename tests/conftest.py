"""Data that many tests share: small, made here, seeded."""

import os
import random
import shutil
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small work is quicker so, and two workers share two cores

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import igeood.bench.methods  # noqa: F401 (the laboratory's methods are held to the same laws)
from igeood.errors import InputError
from igeood.outputs import HEAD, Outputs

settings.register_profile("igeood", deadline=None, derandomize=True)  # the same examples, whatever the clock says
settings.load_profile("igeood")
pytest.register_assert_rewrite("tests.contract.laws")

# Files that take longest start first, so that two workers end together.
LONG = (
    "contract",
    "test_units",
    "test_export",
    "test_docs",
    "test_tables",
    "test_paper",
    "test_cells",
    "test_real_network",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))


def make_classifier(n_classes=10, n=400, margin=8.0, seed=0):
    """Logits of a pretend classifier: confident where it knows, unsure where it does not."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % n_classes

    def known():
        logits = torch.randn(n, n_classes, generator=generator)
        logits[torch.arange(n), labels] += margin * (0.6 + 0.4 * torch.rand(n, generator=generator))
        return logits

    train, ood = known(), torch.randn(n, n_classes, generator=generator) * 1.5
    return SimpleNamespace(train=train, labels=labels, ood=ood, held_out=known(), test=known())


def make_known(n_classes=10, n=400, seed=0):
    """A classifier's outputs with two layers of features: about the class's mean, or about nothing for OOD samples."""
    c, parts = make_classifier(n_classes, n, seed=seed), {}
    for part, offset in (("train", 0), ("held_out", 1), ("test", 2), ("ood", 9)):
        generator, features = torch.Generator().manual_seed(10 * seed + offset), {}
        for layer, width in (("early", 6), ("block.late", 9)):
            means = torch.randn(n_classes, width, generator=torch.Generator().manual_seed(width)) * 2
            noise = torch.randn(n, width, generator=generator)
            features[layer] = noise * 1.5 + 3.0 if part == "ood" else means[c.labels] + noise
        parts[part] = Outputs(getattr(c, part), features, None if part == "ood" else c.labels)
    return SimpleNamespace(**parts)


def suit(outputs, needs):
    """The same samples with the blocks that a method needs: another statistic of the layers, the input of the head."""
    layers = {layer: value for layer, value in outputs.features.items() if "|" not in layer}
    if needs.ending == "|moments":  # means, which are near 0 for known values near 1 and 7; and deviations
        means = {layer: (v.clamp(min=1) - 1) * (7 - v.clamp(max=7)) / 6 for layer, v in layers.items()}
        layers = {layer: torch.cat([m, 1 + 0.2 * torch.tanh(m)], dim=1) for layer, m in means.items()}
    if needs.ending == "|h":  # cosines
        layers = {"": (outputs.logits / 10).tanh()}
    features = {f"{layer}{needs.ending}": value for layer, value in layers.items()}
    if needs.head:  # the logits are linear in it, and it is ≥ 0
        features[HEAD] = torch.cat([outputs.logits.clamp(min=0), -outputs.logits.clamp(max=0)], dim=1)
    return Outputs(outputs.logits, features, outputs.labels)


make = pytest.fixture(lambda: make_classifier, scope="session")
make_known_ = pytest.fixture(lambda: make_known, scope="session")
suited = pytest.fixture(lambda: suit, scope="session")
classifier = pytest.fixture(make_classifier, scope="session")
known = pytest.fixture(make_known, scope="session")


def images(n, seed, *, flipped=False):
    """Noisy prototypes of four classes; those that are half flipped are out-of-distribution."""
    prototypes = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=generator)
    chosen = prototypes[labels] if not flipped else 0.4 * prototypes[labels] + 0.6 * prototypes[labels].flip(-1)
    return (0.2 + 0.6 * chosen + 0.15 * torch.randn(n, 3, 8, 8, generator=generator)).clamp(0, 1), labels


def loader(n, seed, **options):
    return DataLoader(TensorDataset(*images(n, seed, **options)), batch_size=64)


@pytest.fixture(scope="session")
def model():
    """A small trained classifier of images."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
    second = nn.Conv2d(8, 16, 3, 2, padding=1), nn.BatchNorm2d(16), nn.ReLU()
    net = nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4))
    x, y = images(800, 1)
    for _ in range(25):  # by hand: torch.optim takes seconds to import
        gradients = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.data.sub_(gradient, alpha=0.3)
    return net.eval()


@pytest.fixture(scope="session")
def data():
    """Loaders and tensors: training, held-out, OOD validation, test and foreign images; makers of more."""
    loaders = {"train": loader(800, 1), "held_out": loader(400, 2), "ood": loader(200, 5, flipped=True)}
    return SimpleNamespace(images=images, test=images(300, 3)[0], foreign=images(200, 4, flipped=True)[0], **loaders)


@pytest.fixture
def reader_names(classifier, model, data):
    """What a reader of the README or of a page of the documentation is taken to have: a model, loaders, arrays."""
    noise = [torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))]
    loaders = {"train": data.train, "held_out": data.held_out, "ood": data.ood, "noise": noise, "test": [data.test]}
    names = {"model": model, "x": data.test[:3], "torch": torch, "train_labels": classifier.labels.numpy()}
    names |= {f"{part}_loader": loader for part, loader in loaders.items()}
    names |= {f"{part}_logits": getattr(classifier, part).numpy() for part in ("train", "held_out", "test")}
    return names | {"id_scores": torch.arange(30.0), "ood_scores": torch.arange(20.0, 40.0)}


def state_of(model):
    """Everything that must not change."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "modes": [module.training for module in model.modules()],
        "hooks": [[len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)] for m in model.modules()],
        "values": {name: value.detach().float().tolist() for name, value in tensors.items()},
        "tensors": {name: (value.data_ptr(), value.requires_grad, value.dtype) for name, value in tensors.items()},
        "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "modes of torch": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    }


@contextmanager
def unchanged(model):
    """A model may be used here, but not changed."""
    before = state_of(model)
    yield
    assert state_of(model) == before


@contextmanager
def refusing(argument, place=None):
    """An `InputError` of this argument must be raised here, at this place if one is given."""
    with pytest.raises(InputError) as raised:
        yield raised
    assert raised.value.argument == argument, raised.value
    assert place is None or raised.value.place == place, raised.value


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""


@contextmanager
def served_files(folder):
    """The address of a server of a folder's files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def skip_without(there, what):
    """Skip without something that is not ours to install; where a browser is required, fail."""
    if not there and os.environ.get("IGEOOD_BROWSER") != "required":
        pytest.skip(f"{what} is missing: nothing is tried in a browser")
    assert there, f"{what} is missing, and IGEOOD_BROWSER=required"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 (few tests need it)

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    skip_without(path, "Chromium")
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-quic"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """Opens pages; whatever goes wrong there, or is asked of others, fails the test."""
    troubles = []

    def opened(url, width=1280, *, own=(), prepare=lambda _: None, is_strict=True, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        page.on("console", lambda said: troubles.append(said.text) if is_strict or said.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        allowed = (url, "blob:", "data:", *own)
        page.on("request", lambda asked: None if asked.url.startswith(allowed) else troubles.append(asked.url))
        prepare(page)
        page.goto(url)
        return page

    opened.troubles = troubles
    yield opened
    for context in browser.contexts:
        context.close()
    assert troubles == []


left_as_found = pytest.fixture(lambda: unchanged, scope="session")
file_server = pytest.fixture(lambda: served_files, scope="session")
needs = pytest.fixture(lambda: skip_without, scope="session")
refused = pytest.fixture(lambda: refusing, scope="session")
