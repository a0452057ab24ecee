"""A small network and its images."""

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
