"""Layers that are chosen, on networks of many kinds."""

import pytest
import torch
from torch import nn

import igeood
from igeood import extract
from igeood.bench.networks import DenseNet, ResNet
from igeood.model.batch import as_batch
from igeood.model.reader import reader_for

IMAGES = torch.zeros(2, 3, 32, 32)


class Does(nn.Module):
    """A module of these parts with this forward pass."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.does = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.does(self, x)


def auto(model, x=IMAGES):
    """Layers that are chosen, with the widths of their features."""
    return {layer: features.shape[1] for layer, features in extract(model, x).features.items()}


def test_densenet_and_resnet_have_the_papers_layers_also_inside_another_module():
    assert auto(DenseNet()) == {"conv1": 24, "trans1": 108, "trans2": 150, "relu": 342}
    for prefix, model in (("", ResNet()), ("1.", nn.Sequential(nn.Identity(), ResNet()))):
        layers = auto(model)
        assert list(layers.values()) == [64, 64, 128, 256, 512]
        assert list(layers)[1:] == [f"{prefix}layer{i}" for i in (1, 2, 3, 4)]


def vit_block(block, x):
    h = block.norm1(x)
    x = x + block.attention(h, h, h)[0]
    return x + block.mlp(block.norm2(x))


def make_vit(depth, *, in_a_list, width=16):
    def make_block():
        mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        attention = nn.MultiheadAttention(width, 2, batch_first=True)
        return Does(vit_block, norm1=nn.LayerNorm(width), attention=attention, norm2=nn.LayerNorm(width), mlp=mlp)

    def forward(model, x):
        x = model.patch(x).flatten(2).transpose(1, 2)
        for block in model.blocks:
            x = block(x)
        return model.head(model.norm(x).mean(1))

    blocks, patch = [make_block() for _ in range(depth)], nn.Conv2d(3, width, 8, 8)
    blocks = nn.ModuleList(blocks) if in_a_list else nn.Sequential(*blocks)
    return Does(forward, patch=patch, blocks=blocks, norm=nn.LayerNorm(width), head=nn.Linear(width, 5))


@pytest.mark.parametrize(("depth", "in_a_list"), [(2, True), (4, False), (12, True), (12, False)])
def test_vision_transformers_have_blocks_spread_over_the_depth(depth, in_a_list):
    layers = auto(make_vit(depth, in_a_list=in_a_list))
    assert 2 <= len(layers) <= 6
    assert set(layers.values()) == {16}
    assert not any("attention" in name or "mlp" in name for name in layers)
    assert any(name.startswith("blocks") for name in layers)


def test_a_bert_like_classifier():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 32, "num_labels": 4}
    config = transformers.BertConfig(num_hidden_layers=3, num_attention_heads=2, **sizes)
    model = transformers.BertForSequenceClassification(config)
    batch = {"input_ids": torch.randint(50, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.int64)}
    layers = auto(model, batch)
    assert 3 <= len(layers) <= 6
    assert set(layers.values()) == {24}
    assert sum(".layer." in name for name in layers) >= 2


PATCHES = Does(lambda module, x: module.conv(x).flatten(2).transpose(1, 2), conv=nn.Conv2d(3, 24, 8, 8))
CHANNELS_LAST = Does(lambda module, x: module.norm(x.permute(0, 2, 3, 1)), norm=nn.LayerNorm(3))


def chain(*parts, width):
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(width, 3))


SIGNALS = chain(nn.Conv1d(2, 12, 1), nn.ReLU(), nn.InstanceNorm1d(12), width=144)
WORDS = torch.ones(2, 4, dtype=torch.int64)
LAYOUTS = {
    "as long as it is wide": (SIGNALS, torch.rand(6, 2, 12), {"0": "second", "1": "second", "2": "second"}),
    "tokens": (chain(PATCHES, nn.Linear(24, 10), width=160), IMAGES, {"0": "last", "1": "last", "2": "flat"}),
    "channels last": (chain(CHANNELS_LAST, width=3072), IMAGES, {"0": "last"}),
    "as many words as channels": (chain(nn.Embedding(9, 4), nn.GELU(), width=16), WORDS, {"0": "last", "1": "last"}),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case):
    model, x, layouts = LAYOUTS[case]
    reader = reader_for(model, as_batch(x), igeood.Needs(layers="all"), list(layouts))
    outputs = reader(as_batch(x))
    assert reader.layouts == layouts
    for layer, layout in layouts.items():
        raw = model[: int(layer) + 1].eval()(x).detach()
        axes = {"flat": [], "second": range(2, raw.ndim), "last": range(1, raw.ndim - 1)}[layout]
        expected = raw.mean(tuple(axes)) if axes else raw
        torch.testing.assert_close(outputs.features[layer].detach(), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_layers_that_cannot_be_read(images, left_as_found, refused):
    def forward(model, x):
        x = model.twice(model.twice(model.conv(x))).mean((2, 3))
        model.text(x), model.scalar(x), model.nan(x)
        return model.fc(x)

    nan = Does(lambda _, x: torch.where(torch.arange(len(x))[:, None] == 3, torch.nan, x))
    parts = {"text": Does(lambda *_: "text"), "scalar": Does(lambda _, x: x.sum()), "nan": nan, "twice": nn.ReLU()}
    model = Does(forward, conv=nn.Conv2d(2, 4, 1), fc=nn.Linear(4, 4), never=nn.Linear(4, 4), **parts)
    for layer in ("twice", "never", "text", "scalar"):
        with left_as_found(model), refused("layers", "loader: batch 0"):
            extract(model, images, [layer])
    with left_as_found(model), refused("features['nan']", "loader: batch 0"):
        extract(model, images, ["nan"])
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 32), nn.Flatten(), nn.Linear(8, 5)).eval())
    assert extract(scripted, IMAGES, ()).n_classes == 5
    with refused("layers"):
        extract(scripted, IMAGES, ["0"])


def test_half_precision_is_averaged_in_float32():
    large = Does(lambda _, x: torch.full((len(x), 3, 64, 64), 6e4, dtype=torch.float16))  # whose sum is infinite
    model = nn.Sequential(large, nn.AdaptiveMaxPool2d(1), nn.Flatten())
    assert extract(model, torch.zeros(1, 2), ["0"]).features["0"].tolist() == [[6e4] * 3]
