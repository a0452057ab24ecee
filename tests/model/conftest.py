"""A small network, its images, and all that must stay as it was while somebody runs it."""

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn


class Net(nn.Module):
    """All that can be disturbed: batch normalisation, dropout, in-place activations."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.drop, self.hidden, self.fc = nn.Dropout(0.5), nn.Linear(6, 5), nn.Linear(5, 3)

    def features(self, x):
        return self.drop(self.act(self.norm(self.conv(x)))).mean((2, 3))

    def forward(self, x):
        return self.finish(self.fc(torch.tanh(self.hidden(self.features(x)))))

    def finish(self, logits):
        return logits


@pytest.fixture
def net():
    """A network whose normalisation has seen something, in training mode."""
    torch.manual_seed(3)
    model = Net()
    with torch.no_grad():
        model.norm.running_mean.uniform_(-0.2, 0.2)
        model.norm.running_var.uniform_(0.5, 2.0)
    return model.train()


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(20, 2, 5, 5, generator=generator), torch.arange(20) % 3


def state_of(model):
    """Everything that must not change."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return {
        "modes": [module.training for module in model.modules()],
        "hooks": [len(getattr(module, kind)) for module in model.modules() for kind in hooks],
        "values": {name: value.detach().float().tolist() for name, value in tensors.items()},
        "tensors": {name: (value.data_ptr(), value.requires_grad, value.dtype) for name, value in tensors.items()},
        "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "modes of torch": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    }


@pytest.fixture(scope="session")
def left_as_found():
    """A context in which a model may be used, but not changed."""

    @contextmanager
    def check(model):
        before = state_of(model)
        yield
        assert state_of(model) == before

    return check
