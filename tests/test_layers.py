"""`layers="auto"` on networks of many kinds."""

import pytest
import torch
from torch import nn

import igeood
from igeood.errors import InputError
from igeood.extraction import resolve_layers
from igeood.layers import layout_of, pooled

IMAGES = torch.zeros(2, 3, 32, 32)


def auto(model, x=IMAGES):
    """Layers that are found, with the widths of their features."""
    model.eval()
    layers = resolve_layers(model, x, "auto")
    outputs = igeood.extract(model, x, layers)
    return {layer: outputs.features[layer].shape[1] for layer in layers}


def test_densenet_has_the_papers_layers():
    assert auto(igeood.networks.densenet_bc_100()) == {"conv1": 24, "trans1": 108, "trans2": 150, "relu": 342}


def test_resnet_has_the_papers_layers():
    found = auto(igeood.networks.resnet_34())
    assert list(found.values()) == [64, 64, 128, 256, 512]
    assert list(found)[1:] == ["layer1", "layer2", "layer3", "layer4"]


def test_a_wrapped_network_is_looked_into():
    found = auto(nn.Sequential(nn.Identity(), igeood.networks.resnet_34()))
    assert list(found.values()) == [64, 64, 128, 256, 512]


def test_plain_cnn_and_mlp():
    cnn = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5),
    )  # fmt: skip
    assert list(auto(cnn).values()) == [8, 16, 12]
    mlp = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    assert auto(mlp, torch.zeros(2, 20)) == {"1": 16, "3": 8}


def test_a_classifier_of_several_layers_keeps_its_hidden_ones():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU())
            self.classifier = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))

        def forward(self, x):
            return self.classifier(self.features(x).mean((2, 3)))

    assert list(auto(Net()).values()) == [8, 16, 12]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, depth, *, in_a_list, width=16):
        super().__init__()
        blocks = [Block(width) for _ in range(depth)]
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.ModuleList(blocks) if in_a_list else nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


@pytest.mark.parametrize("in_a_list", [True, False])
@pytest.mark.parametrize("depth", [2, 4, 12])
def test_vision_transformers_have_blocks_spread_over_the_depth(depth, in_a_list):
    found = auto(ViT(depth, in_a_list=in_a_list))
    assert 2 <= len(found) <= 6
    assert set(found.values()) == {16}
    assert not any("attention" in name or "mlp" in name for name in found)
    assert sum(name.startswith("blocks") for name in found) >= 1
    assert list(found)[-1] == "norm"


def test_a_bert_like_classifier():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, num_labels=4
    )
    model = transformers.BertForSequenceClassification(config)
    batch = {"input_ids": torch.randint(50, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.int64)}
    found = auto(model, batch)
    assert 3 <= len(found) <= 6
    assert set(found.values()) == {24}
    assert sum(".layer." in name for name in found) >= 2


def test_what_is_averaged():
    image, tokens = torch.arange(24.0).reshape(1, 2, 3, 4), torch.arange(6.0).reshape(1, 3, 2)
    assert pooled(image, layout_of(nn.Conv2d(2, 2, 1))).tolist() == [[5.5, 17.5]]
    assert pooled(image, None).tolist() == [[5.5, 17.5]]
    assert pooled(tokens, layout_of(nn.Linear(2, 2))).tolist() == [[2.0, 3.0]]
    assert pooled(tokens, None).tolist() == [[2.0, 3.0]]
    assert pooled(tokens, layout_of(nn.Conv1d(3, 3, 1))).tolist() == [[0.5, 2.5, 4.5]]
    channels_last = torch.arange(24.0).reshape(1, 3, 4, 2)
    assert pooled(channels_last, layout_of(nn.LayerNorm(2))).tolist() == [[11.0, 12.0]]
    assert pooled(tokens[:, 0], None).tolist() == [[0.0, 1.0]]
    video = torch.ones(1, 2, 3, 4, 5)
    assert pooled(video, layout_of(nn.Conv3d(2, 2, 1))).tolist() == [[1.0, 1.0]]


def widths(model, x, layers):
    outputs = igeood.extract(model.eval(), x, layers)
    return [outputs.features[layer].shape[1] for layer in layers]


def test_channels_are_found_where_the_module_before_has_put_them():
    body = (nn.Conv1d(2, 12, 1), nn.ReLU(), nn.InstanceNorm1d(12), nn.AdaptiveAvgPool1d(12))
    signal = nn.Sequential(*body, nn.Flatten(), nn.Linear(144, 3))
    assert widths(signal, torch.zeros(6, 2, 50), ["0", "1", "2", "3"]) == [12, 12, 12, 12]
    x = torch.randn(6, 2, 12, generator=torch.Generator().manual_seed(0))  # as long as it is wide
    expected = torch.relu(signal[0](x)).mean(dim=2)
    torch.testing.assert_close(igeood.extract(signal, x, ["1"]).features["1"], expected)

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 24, 8, 8)

        def forward(self, x):
            return self.conv(x).flatten(2).transpose(1, 2)

    class Squeeze(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.gate = nn.Conv2d(3, 12, 3), nn.Linear(12, 12)

        def forward(self, x):
            x = self.conv(x)
            return x * self.gate(x.mean((2, 3)))[:, :, None, None]

    tokens = nn.Sequential(Patches(), nn.Linear(24, 10), nn.Flatten(), nn.Linear(160, 3))
    assert widths(tokens, IMAGES, ["0", "1"]) == [24, 10]
    gated = nn.Sequential(Squeeze(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3))
    assert widths(gated, IMAGES, ["0", "1"]) == [12, 12]


def test_layers_whose_first_axis_is_time_are_not_picked_and_not_read():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.fc = nn.Embedding(9, 5), nn.LSTM(5, 7), nn.Linear(7, 3)

        def forward(self, ids):
            return self.fc(self.rnn(self.embed(ids).transpose(0, 1))[0][-1])

    ids = torch.randint(9, (6, 4))
    assert "rnn" not in auto(Recurrent(), ids)
    with pytest.raises(InputError, match=r"'rnn' returns a tensor of shape \(4, 6, 7\)"):
        igeood.extract(Recurrent(), ids, ["rnn"])


def test_features_are_not_touched_by_what_comes_after():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(igeood.extract(model, x, ["0"]).features["0"], model[0](x).detach())


def test_half_precision_is_averaged_in_float32():
    big = torch.full((1, 2, 64, 64), 60000.0, dtype=torch.float16)  # a sum in float16 is infinite
    assert pooled(big, None).tolist() == [[60000.0, 60000.0]]


def test_names_that_are_none():
    model = igeood.networks.resnet_34()
    with pytest.raises(InputError, match="the model has no 'layer5'; near names: 'layer"):
        resolve_layers(model, IMAGES, ["conv1", "layer5"])
    with pytest.raises(InputError, match="names a layer twice"):
        resolve_layers(model, IMAGES, ["conv1", "conv1"])
    with pytest.raises(InputError, match="loader: empty"):
        resolve_layers(model, [], "auto")
    with pytest.raises(InputError, match="must be re-iterable"):
        resolve_layers(model, iter([IMAGES]), "auto")
    with pytest.raises(InputError, match="found no layer"):
        resolve_layers(nn.Sequential(nn.Flatten(), nn.Linear(3072, 3)), IMAGES, "auto")
