"""Faults: what may go wrong with an input on its way to the classifier, by the kind of input.

Ranges and moments come from the held-out inputs themselves, so a fault looks as it would in production, however the
inputs are scaled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional

from igeood.model.batch import Batch

Kind = Literal["images", "tokens", "vectors"]
Fault = Callable[[Batch, Generator], Batch]
Change = Callable[[Tensor, "Usual", Generator], Tensor]  # of the inputs alone
WORDS = 3  # of a text of which only the first ones arrive
GRID = 4  # patches along each side of an image
COARSE = 4  # pixels along each side that become one, in a pixelated image


@dataclass(frozen=True, eq=False)
class Usual:
    """What is usual of held-out inputs: each channel's or column's least and largest value, mean and deviation.

    They have the axes of the inputs, those but the second of length 1.
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, batches: "list[Batch]") -> "Usual":
        """Of images or vectors, in batches of any shapes with as many channels."""
        x = batches[0].x
        axes = [axis for axis in range(x.ndim) if axis != 1]
        count = sum(batch.x.numel() // x.shape[1] for batch in batches)
        sums = (batch.x.sum(axes, keepdim=True, dtype=torch.float64) for batch in batches)
        mean = torch.stack([*sums]).sum(dim=0) / count
        spreads = ((batch.x.double() - mean).square().sum(axes, keepdim=True) for batch in batches)
        squares = torch.stack([*spreads]).sum(dim=0)
        low = torch.stack([batch.x.amin(axes, keepdim=True) for batch in batches]).amin(dim=0)
        high = torch.stack([batch.x.amax(axes, keepdim=True) for batch in batches]).amax(dim=0)
        return cls(low, high, mean.to(x), (squares / count).sqrt().to(x))


def kind_of(batch: Batch) -> Kind | None:
    """What a batch holds: images (N, C, H, W), token ids (N, T), or vectors (N, k); None is something else."""
    x = batch.x
    if not x.is_floating_point():
        return "tokens" if x.ndim == 2 else None
    if x.ndim == 4 and x.shape[1] <= 4:
        return "images"
    return "vectors" if x.ndim == 2 else None


def faults_for(batch: Batch, usual: Usual | None) -> dict[str, Fault]:
    """The faults of inputs such as these, without those that could change nothing; `usual` is of images and vectors."""
    if usual is None:
        has_mask = mask_name(batch) is not None
        faults = TOKENS if kind_of(batch) == "tokens" else {}
        return {name: fault for name, fault in faults.items() if has_mask or name != "everything masked"}
    changes = IMAGES if kind_of(batch) == "images" else VECTORS
    return {
        name: on_inputs(change, usual)
        for name, change in changes.items()
        if batch.x.shape[1] > 2 or name != "channels reversed"
    }


def on_inputs(change: Callable[..., Tensor], *usual: Usual) -> Fault:
    """A fault that is a function of the inputs, and of what is usual of them."""
    return lambda batch, draw: batch.with_x(change(batch.x, *usual, draw))


# -- images


def _random(x: Tensor, draw: Generator) -> Tensor:
    """Uniform numbers, as many as x has, the same on every device."""
    return torch.rand(x.shape, generator=draw).to(x)


def _normal(x: Tensor, draw: Generator) -> Tensor:
    return torch.randn(x.shape, generator=draw).to(x)


def _normalised(x: Tensor, usual: Usual, _: Generator) -> Tensor:
    """Normalised once more, by the mean and deviation that made the usual range of pixels from 0 to 1.

    Inputs in [0, 1] were not normalised: they are, by their own moments.
    """
    width = usual.high - usual.low
    is_plain = (usual.low.abs() + (width - 1.0).abs()).amax() < 0.1
    return (x - usual.mean) / usual.std.clamp(min=1e-6) if bool(is_plain) else x * width + usual.low


def _noisy(x: Tensor, usual: Usual, draw: Generator) -> Tensor:
    return x + 0.2 * (usual.high - usual.low) * _normal(x, draw)


def _blurred(x: Tensor, *_: object) -> Tensor:
    side = max(3, min(x.shape[2:]) // 8 | 1)
    return functional.avg_pool2d(functional.pad(x, (side // 2,) * 4, mode="replicate"), side, stride=1)


def _pixelated(x: Tensor, *_: object) -> Tensor:
    height, width = (max(2, side // COARSE) for side in x.shape[2:])
    coarse = functional.adaptive_avg_pool2d(x, (height, width))
    return functional.interpolate(coarse, x.shape[2:])


def _rotated(x: Tensor, *_: object) -> Tensor:
    turned = x.rot90(1, dims=(2, 3))
    return turned if turned.shape == x.shape else functional.interpolate(turned, x.shape[2:], mode="bilinear")


def _shuffled(x: Tensor, _: Usual, draw: Generator) -> Tensor:
    """Patches in another order; what is left over at the edges stays."""
    height, width = x.shape[2] // GRID, x.shape[3] // GRID
    patches = x.unfold(2, max(1, height), max(1, height)).unfold(3, max(1, width), max(1, width))
    patches = patches[:, :, :GRID, :GRID]
    rows, columns = patches.shape[2:4]
    order = torch.randperm(rows * columns, generator=draw)
    patches = patches.flatten(2, 3)[:, :, order].reshape(patches.shape).permute(0, 1, 2, 4, 3, 5)
    result = x.clone()
    inner = patches.flatten(4, 5).flatten(2, 3)
    result[:, :, : inner.shape[2], : inner.shape[3]] = inner
    return result


def _halves(x: Tensor, *_: object) -> Tensor:
    """The left half of each input beside the right half of the next."""
    middle = x.shape[3] // 2
    return torch.cat([x[..., :middle], x.roll(-1, dims=0)[..., middle:]], dim=3)


def _shifted(x: Tensor, usual: Usual, _: Generator) -> Tensor:
    """A quarter to the right, and black where nothing is."""
    by = max(1, x.shape[3] // 4)
    return torch.cat([usual.low.expand(*x.shape[:3], by), x[..., :-by]], dim=3)


IMAGES: dict[str, Change] = {
    "× 255": lambda x, *_: 255.0 * x,
    "÷ 255": lambda x, *_: x / 255.0,
    "normalised twice": _normalised,
    "channels reversed": lambda x, *_: x.flip(1),
    "inverted": lambda x, usual, _: usual.low + usual.high - x,
    "black": lambda x, usual, _: usual.low.expand_as(x).clone(),
    "white": lambda x, usual, _: usual.high.expand_as(x).clone(),
    "noise": lambda x, usual, draw: usual.low + (usual.high - usual.low) * _random(x, draw),
    "noise added": _noisy,
    "blur": _blurred,
    "pixelated": _pixelated,
    "rotated by 90°": _rotated,
    "upside down": lambda x, *_: x.flip(2),
    "patches shuffled": _shuffled,
    "halves of two inputs": _halves,
    "dark": lambda x, usual, _: usual.low + 0.2 * (x - usual.low),
    "shifted": _shifted,
}


# -- vectors, such as rows of tables


VECTORS: dict[str, Change] = {
    "units × 1,000": lambda x, *_: 1000.0 * x,
    "columns shifted by one": lambda x, *_: x.roll(1, dims=1),
    "columns shuffled across rows": lambda x, _, draw: x.gather(0, _random(x.double(), draw).argsort(dim=0)),
    "zeros for missing": lambda x, _, draw: x.masked_fill(_random(x, draw) < 0.5, 0.0),
    "noise": lambda x, usual, draw: usual.mean + usual.std * _normal(x, draw),
}


# -- token ids


def mask_name(batch: Batch) -> str | None:
    """The input that says which tokens are there, if the model takes one."""
    mask = batch.inputs.get("attention_mask")
    return "attention_mask" if isinstance(mask, Tensor) and mask.shape == batch.x.shape else None


def _are_words(batch: Batch) -> Tensor:
    """(N, T) which tokens are words: all that are there but the first and the last, where all texts share these."""
    name = mask_name(batch)
    there = torch.ones_like(batch.x, dtype=torch.bool) if name is None else batch.inputs[name].bool()
    places = torch.arange(there.shape[1], device=there.device).expand_as(there)
    first = torch.where(there, places, there.shape[1] - 1).amin(dim=1, keepdim=True)
    last = torch.where(there, places, 0).amax(dim=1, keepdim=True)
    for place in (first, last):
        tokens = batch.x.gather(1, place)
        if len(tokens) > 1 and bool((tokens == tokens[0]).all()):
            there = there & (places != place)
    return there


def tokens_there(batch: Batch, row: int) -> Tensor:
    """The input of one sample; of a text, the tokens that the mask shows."""
    name = mask_name(batch) if kind_of(batch) == "tokens" else None
    return batch.x[row] if name is None else batch.x[row][batch.inputs[name][row].bool()]


def _with_words(batch: Batch, words: Tensor) -> Batch:
    """The same texts with other words, (N, T), in the places of theirs."""
    return batch.with_x(torch.where(_are_words(batch), words, batch.x))


def _without(batch: Batch, hidden: Tensor) -> Batch:
    """The same texts with some tokens (N, T) masked; without a mask they become 0."""
    name = mask_name(batch) or batch.name
    return replace(batch, inputs={**batch.inputs, name: batch.inputs[name].masked_fill(hidden, 0)})


def _words_shuffled(batch: Batch, draw: Generator) -> Batch:
    are_words = _are_words(batch)
    order = _random(batch.x.double(), draw).masked_fill(~are_words, 2.0).argsort(dim=1)  # words at random, then others
    places = (~are_words).int().argsort(dim=1, stable=True)  # of the words, then of others
    return _with_words(batch, torch.zeros_like(batch.x).scatter(1, places, batch.x.gather(1, order)))


def _random_words(batch: Batch, draw: Generator) -> Batch:
    are_words = _are_words(batch)
    words = batch.x[are_words] if bool(are_words.any()) else batch.x.flatten()
    return _with_words(batch, words[torch.randint(len(words), batch.x.shape, generator=draw).to(words.device)])


def _one_word(batch: Batch, *_: object) -> Batch:
    first = _are_words(batch).int().argmax(dim=1, keepdim=True)
    return _with_words(batch, batch.x.gather(1, first).expand_as(batch.x))


def _first_words(batch: Batch, *_: object) -> Batch:
    are_words = _are_words(batch)
    return _without(batch, are_words & (are_words.cumsum(dim=1) > WORDS))


def _two_texts(batch: Batch, *_: object) -> Batch:
    """Each text, then the next one."""
    shape = batch.x.shape

    def join(value: object) -> object:
        is_text = isinstance(value, Tensor) and value.shape == shape
        return torch.cat([value, value.roll(-1, dims=0)], dim=1) if is_text else value  # type: ignore[attr-defined, list-item]

    return batch.mapped(join)


TOKENS: dict[str, Fault] = {
    "words shuffled": _words_shuffled,
    "random words": _random_words,
    "one word repeated": _one_word,
    "first words only": _first_words,
    "two texts joined": _two_texts,
    "everything masked": lambda batch, *_: _without(batch, _are_words(batch)),
}
