"""A model's outputs, and the model as it was."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import igeood
from igeood.batches import as_batch, batches
from igeood.errors import InputError
from igeood.extraction import extract, reading, stream


class Net(nn.Module):
    """A small network with all that can be disturbed: batch normalisation, dropout, frozen parameters."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.5)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(self.drop(self.relu(self.norm(self.conv(x)))).mean((2, 3)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(30, 3, 8, 8, generator=generator), torch.arange(30) % 4


def state_of(model):
    """Everything that must not change."""
    return {
        "training": [m.training for m in model.modules()],
        "tensors": {k: v.clone() for k, v in model.state_dict().items()},
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
    }


def assert_as_found(model, before):
    after = state_of(model)
    for key in ("training", "requires_grad", "hooks", "random", "torch"):
        assert after[key] == before[key], key
    assert all(torch.equal(after["tensors"][k], v) for k, v in before["tensors"].items())
    assert [g is None for g in after["grad"]] == [g is None for g in before["grad"]]
    assert all(torch.equal(a, b) for a, b in zip(after["grad"], before["grad"], strict=True) if a is not None)


@pytest.mark.parametrize("mode", ["training", "evaluation", "mixed"])
def test_the_model_is_left_as_found(net, images, mode):
    net.train(mode != "evaluation")
    if mode == "mixed":
        net.norm.eval()
    net.conv.weight.requires_grad_(False)
    net.fc.weight.grad = torch.ones_like(net.fc.weight)
    before = state_of(net)
    loader = DataLoader(TensorDataset(*images), batch_size=7, shuffle=True)
    extract(net, loader, ["conv", "relu"])
    assert_as_found(net, before)
    named = igeood.white_box(net, layers=["relu"], epsilon=0.01)
    for guard in (igeood.grey_box(net, epsilon=0.01), named, igeood.white_box(net)):
        guard.fit(loader)
        guard.score(loader)
        guard.score(images[0])
        guard.explain(loader)
        if guard.layers:
            guard.diagnose(loader)
        assert_as_found(net, before)


def test_the_model_is_left_as_found_when_something_fails(net, images):
    net.train()
    before = state_of(net)

    def broken():
        yield images
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        extract(net, broken(), ["conv"])
    assert_as_found(net, before)
    for guard in (igeood.black_box(net), igeood.white_box(net, layers=["conv"])):
        with pytest.raises(OSError, match="disk"):
            guard.fit(broken())
        assert_as_found(net, before)
        with pytest.raises(InputError):
            guard.fit([(images[0] * torch.nan, images[1])])
        assert_as_found(net, before)
        with pytest.raises(InputError):
            guard.fit([(images[0], images[1] + 1)])
        assert_as_found(net, before)
    with pytest.raises(InputError, match=r"x: batch 0: the model fails on .* \(30, 2, 8, 8\)") as raised:
        igeood.grey_box(net).fit((images[0][:, :2], images[1]))
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert_as_found(net, before)


def test_outputs_are_those_of_evaluation_mode(net, images):
    net.eval()
    with torch.no_grad():
        expected = net(images[0])
        feature = net.relu(net.norm(net.conv(images[0]))).mean((2, 3))
    net.train()
    outputs = extract(net, DataLoader(TensorDataset(*images), batch_size=4), ["relu"])
    torch.testing.assert_close(outputs.logits, expected)
    torch.testing.assert_close(outputs.features["relu"], feature)
    assert torch.equal(outputs.labels, images[1])
    assert not outputs.logits.requires_grad


@pytest.mark.parametrize("size", [1, 7, 30])
def test_batches_do_not_matter(net, images, size):
    whole = extract(net, images, ["conv"])
    parts = extract(net, DataLoader(TensorDataset(*images), batch_size=size), ["conv"])
    torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(parts.features["conv"], whole.features["conv"], rtol=1e-4, atol=1e-6)


def test_one_forward_pass_serves_every_detector(net, images):
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    outputs = extract(net, DataLoader(TensorDataset(*images), batch_size=10), ["conv", "relu"])
    assert len(calls) == 3
    for name in igeood.METHODS:
        assert igeood.detector(name).fit(outputs).score(outputs).isfinite().all()
    assert len(calls) == 3


def wrapped(net, wrap):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x=None, *, pixel_values=None):
            return wrap(self.net(pixel_values if x is None else x))

    return Wrapped()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: (f, f.sum()),
        lambda f: [f],
        lambda f: {"loss": f.sum(), "logits": f},
        lambda f: {"out": f},
        lambda f: SimpleNamespace(loss=None, logits=f),
    ],
)
def test_what_models_return(net, images, wrap):
    outputs = extract(wrapped(net, wrap), images, ["net.conv"])
    torch.testing.assert_close(outputs.logits, extract(net, images, ()).logits)


def test_models_that_return_no_logits(net, images):
    with pytest.raises(InputError, match="model: returned NoneType"):
        extract(wrapped(net, lambda _: None), images, ())
    with pytest.raises(InputError, match=r"logits: expected shape \(N, C\)"):
        extract(wrapped(net, lambda f: f[:, 0]), images, ())


def test_kinds_of_batches(net, images):
    x, y = images
    model = wrapped(net, lambda f: f)
    expected = extract(net, x, ()).logits
    sources = [x, x.numpy(), (x, y), [x], [(x, y)], [[x, y]], [(x, y, "extra")], {"pixel_values": x, "labels": y}]
    for source in [*sources, [{"pixel_values": x.numpy(), "label": y.numpy()}], x.double()]:
        torch.testing.assert_close(extract(model, source, ()).logits, expected)
    assert extract(model, {"pixel_values": x, "labels": y}, ()).labels.tolist() == y.tolist()
    assert len(list(batches(torch.zeros(600, 2)))) == 3


@pytest.mark.parametrize("source", [3, None, [3], ["text"], [{"labels": [1]}], [()]])
def test_what_is_no_batch(net, source):
    with pytest.raises(InputError, match=r"^loader: (batch 0: )?(expected|the mapping)"):
        extract(net, source, ())


def test_layers_that_cannot_be_read(images):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc, self.never = nn.Conv2d(3, 4, 1), nn.Linear(4, 4), nn.Linear(4, 4)
            self.twice, self.text, self.scalar = nn.ReLU(), Text(), Scalar()

        def forward(self, x):
            x = self.twice(self.twice(self.conv(x))).mean((2, 3))
            self.text(x)
            self.scalar(x)
            return self.fc(x)

    class Text(nn.Module):
        def forward(self, _):
            return "nothing"

    class Scalar(nn.Module):
        def forward(self, x):
            return x.sum()

    model = Odd()
    for layer, message in (
        ("twice", "is called twice"),
        ("never", "is not called"),
        ("text", "returns str"),
        ("scalar", r"returns a tensor of shape \(\)"),
    ):
        with pytest.raises(InputError, match=f"layers: '{layer}' {message}"):
            extract(model, images, [layer])


def test_half_precision_models(net, images):
    outputs = extract(net.to(torch.bfloat16), images, ["conv"])
    assert outputs.logits.dtype == outputs.features["conv"].dtype == torch.float32


def test_nan_features_name_layer_and_sample(net, images):
    class Breaks(nn.Module):
        def forward(self, x):
            return torch.where(torch.arange(len(x))[:, None, None, None] == 3, torch.nan, x)

    net.relu = Breaks()
    with pytest.raises(InputError, match=r"features\['net.relu'\]: sample 3 has NaN"):
        igeood.extract(wrapped(net, torch.nan_to_num), images, ["net.relu"])


def test_an_input_that_cannot_go_to_the_models_device(net):
    with pytest.raises(InputError, match="x: is on meta and cannot go to the model's cpu"):
        extract(net, torch.zeros(2, 3, 8, 8, device="meta"), ())
    guard = igeood.black_box(net, method="energy").fit(torch.rand(5, 3, 8, 8))
    with pytest.raises(InputError, match="x: batch 0: is on the meta device"):
        guard.score(torch.zeros(2, 3, 8, 8, device="meta"))
    with pytest.raises(InputError, match="model: its weights are on the meta device"):
        extract(Net().to("meta"), torch.zeros(2, 3, 8, 8), ())


def test_no_module_no_reading():
    with pytest.raises(InputError, match=r"model: expected a torch.nn.Module, got str"), reading("resnet"):
        pass


def test_labels_are_looked_at_only_where_they_are_wanted(net, images):
    """An OOD loader may have labels of its own kind, or things that are no labels at all."""
    x, y = images
    guard = igeood.white_box(net, layers=["relu"]).fit(images)
    expected = guard.score(x)
    for labels in (y + 50, y.float(), ["cat"] * 30, {"a": 1}, torch.rand(30, 4)):
        assert torch.equal(guard.score([(x, labels)]), expected)
    with pytest.raises(InputError, match="labels: "):
        guard.fit([(x, y + 50)])
    with pytest.raises(InputError, match="labels: "):
        guard.fit([(x, ["cat"] * 30)])


def test_a_list_as_a_loader_gives_it_is_one_batch(net, images):
    guard = igeood.white_box(net, layers=["relu"]).fit(images)
    for batch in DataLoader(TensorDataset(*images), batch_size=30):
        assert isinstance(batch, list)
        assert torch.equal(guard.score(batch), guard.score(images[0]))


def test_keys_cover_all_tensors_and_the_step_moves_the_values():
    ids, mask = torch.randint(50, (20, 6)), torch.ones(20, 6)
    batch = as_batch({"attention_mask": mask, "input_ids": ids})
    assert len(np.unique(batch.keys)) == 20
    assert batch.x is ids
    pixels = torch.rand(20, 3, 2, 2)
    batch = as_batch({"bool_masked_pos": mask, "pixel_values": pixels})
    assert batch.x is pixels
    assert batch.with_x(pixels * 2).keywords["bool_masked_pos"] is mask


def test_scoring_does_not_rewind_the_random_state_of_others(net, images):
    guard = igeood.white_box(net, layers=["relu"]).fit(images)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            guard.score(images[0])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        drawn = [random.random() for _ in range(3000)]
    finally:
        stop.set()
        thread.join()
    assert len(set(drawn)) == 3000


def test_between_the_batches_of_a_stream_everything_is_the_users(net, images):
    net.train()
    for _ in stream(net, list(images[0].split(10)), ["conv"]):
        assert torch.is_grad_enabled()
        assert net.training
        assert net(images[0][:2]).requires_grad
    first, second = (stream(net, list(images[0].split(10)), ["conv"]) for _ in "12")
    next(first), next(second)
    first.close()
    second.close()
    assert torch.is_grad_enabled()


def test_a_refit_that_fails_keeps_the_layers(net, images):
    guard = igeood.white_box(net).fit(images)
    before, layers = guard.score(images[0]), list(guard.layers)
    smaller = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.ReLU(), nn.Linear(5, 4))
    guard.inputs.model = smaller
    with pytest.raises(InputError):
        guard.fit((images[0], images[1] + 9))
    guard.inputs.model = net
    assert guard.layers == layers
    assert torch.equal(guard.score(images[0]), before)


def test_fitting_in_inference_mode(net, images):
    with torch.inference_mode():
        guard = igeood.white_box(net, layers=["relu"], method="mahalanobis", epsilon=0.01).fit(images)
        inside = guard.score(images[0])
    torch.testing.assert_close(guard.score(images[0]), inside)


def test_parameters_of_several_precisions(images):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float16))
            self.net = Net()

        def forward(self, x):
            return self.net(x) * self.scale.float()

    assert igeood.extract(Mixed(), images, ()).logits.dtype == torch.float32


def test_streams_hold_one_batch_at_a_time(net):
    drawn = []

    def source():
        for i in range(5):
            drawn.append(i)
            yield torch.rand(2, 3, 8, 8)

    outputs = stream(net, source(), ["conv"])
    next(outputs)
    assert drawn == [0]
    outputs.close()
    assert all(len(m._forward_hooks) == 0 for m in net.modules())


def test_threads_do_not_see_each_others_features_and_training_mode_comes_back(net, images):
    net.train()
    guard = igeood.white_box(net, layers=["conv", "relu"]).fit(images).calibrate(images[0].flip(-1))
    alone = guard.predict(images[0]).score
    buffers = {k: v.clone() for k, v in net.state_dict().items()}
    barrier = threading.Barrier(8)

    def work(_):
        barrier.wait()
        return [guard.predict(images[0]).score for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        for scores in pool.map(work, range(8)):
            for score in scores:
                torch.testing.assert_close(score, alone, rtol=1e-6, atol=1e-6)
    assert all(m.training for m in net.modules())
    assert all(torch.equal(v, buffers[k]) for k, v in net.state_dict().items())
    assert all(len(m._forward_hooks) == 0 for m in net.modules())
