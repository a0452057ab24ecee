"""Ways to guard a model, the same by hand, and all that must stay as it was meanwhile."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from models import Case, images
from torch import Tensor, nn

import igeood
from igeood.guard import Guard
from igeood.outputs import Outputs

EPSILON = 0.02


@dataclass(frozen=True)
class Access:
    """A way to guard a model: what builds the guard, and whether it moves its inputs."""

    build: Callable[[nn.Module, tuple[str, ...]], Guard]
    method: str
    step: bool = False
    white: bool = False
    fold: bool = False


def _accesses() -> Iterator[tuple[str, Access]]:
    """Every method of the catalogue, by every access that takes a model."""
    for method, line in igeood.METHODS.items():
        options = {"method": method}
        if line.needs_layers:
            for step in (0.0, EPSILON):

                def white(
                    model: nn.Module, layers: tuple[str, ...], step: float = step, options: Any = options
                ) -> Guard:
                    return igeood.white_box(model, layers=layers, epsilon=step, **options)

                yield f"white box, {method}, step {step:g}", Access(white, method, step > 0, white=True)
            continue

        def black(model: nn.Module, _: object, options: Any = options) -> Guard:
            return igeood.black_box(model, **options)

        yield f"black box, {method}", Access(black, method)
        for fold in (False, True):

            def grey(model: nn.Module, _: object, fold: bool = fold, options: Any = options) -> Guard:
                return igeood.grey_box(model, epsilon=EPSILON, fold=fold, **options)

            yield f"grey box, {method}{', folded' * fold}", Access(grey, method, True, fold=fold)


ACCESSES = dict(_accesses())


class Plain:
    """A model run by hand: evaluation mode, own hooks, own gradients. The library's guards must say the same."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, case.make().eval()
        self.model.zero_grad()

    def outputs(self, x: Tensor, layers: tuple[str, ...], labels: Tensor | None = None) -> Outputs:
        """Logits, and the mean over positions of each layer's output; differentiable where gradients are on."""
        seen: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[nn.Module, object, Any], None]:
            def hook(_: nn.Module, __: object, output: Any) -> None:
                output = output[0] if isinstance(output, tuple) else output
                output = output.float() if output.dtype.itemsize < 4 else output
                seen[name] = {2: lambda o: o.clone(), 3: lambda o: o.mean(1), 4: lambda o: o.mean((2, 3))}[output.ndim](
                    output
                )

            return hook

        modules = dict(self.model.named_modules())
        handles = [modules[name].register_forward_hook(keep(name)) for name in layers]
        try:
            logits = self.case.logits(self.model(x.clone()))
        finally:
            for handle in handles:
                handle.remove()
        return Outputs(logits, {name: seen[name] for name in layers}, labels)

    def ready(self, x: Tensor) -> Tensor:
        kinds = {p.dtype for p in self.model.parameters()}
        return x.to(kinds.pop()) if len(kinds) == 1 else x

    def clean(self, x: Tensor, layers: tuple[str, ...], labels: Tensor | None = None) -> Outputs:
        with torch.inference_mode(False), torch.no_grad():
            return self.outputs(self.ready(x), layers, labels)

    def stepped(
        self, x: Tensor, layers: tuple[str, ...], detector: igeood.detectors.Detector, epsilon: float
    ) -> Outputs:
        """After one step against the sign of the gradient of what the detector would lower."""
        if not epsilon:
            return self.clean(x, layers)
        x = self.ready(x)
        with torch.inference_mode(False), torch.enable_grad():
            leaf = x.clone().requires_grad_()
            steps = detector.step_scores(self.outputs(leaf, layers))
            moved = [
                (x - epsilon * torch.autograd.grad(score.sum(), leaf, retain_graph=True)[0].sign(), names)
                for score, names in steps
            ]
        if moved[0][1] is None:
            return self.clean(moved[0][0], layers)
        features = {name: self.clean(z, layers).features[name] for z, names in moved for name in names}
        return Outputs(self.clean(x, layers).logits, features)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def _bits(tensor: Tensor | None) -> bytes | None:
    if tensor is None:
        return None
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def found(model: nn.Module) -> dict[str, Any]:
    """Everything of a model, and of the world around it, that must not change."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "modes": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [[(k, id(v)) for k, v in getattr(m, kind, {}).items()] for m in model.modules() for kind in HOOKS],
        "values": {name: _bits(tensor) for name, tensor in tensors.items()},
        "tensors": {name: (id(t), t.data_ptr(), t.dtype, t.device, t.requires_grad) for name, t in tensors.items()},
        "layout": {name: t.stride() for name, t in tensors.items()},
        "gradients": {name: (id(p.grad), _bits(p.grad)) for name, p in model.named_parameters()},
        "random": (random.getstate(), np.random.get_state()[1].tobytes(), _bits(torch.get_rng_state())),
        "modes of torch": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
    }


@contextmanager
def left_as_found(model: nn.Module, *, random_too: bool = True) -> Iterator[None]:
    """Assert that what is done inside, even if it fails, leaves everything as it was."""
    before = found(model)
    try:
        yield
    finally:
        after = found(model)
        different = [what for what, value in before.items() if after[what] != value]
        assert not [what for what in different if random_too or what != "random"], f"changed: {different}"


def kinds() -> dict[str, list[str]]:
    """The accesses by kind: which of them share all but their method."""
    found: dict[str, list[str]] = {}
    for name, access in ACCESSES.items():
        kind = ("white" if access.white else "grey" if access.step else "black") + ", step" * access.step
        found.setdefault(kind + ", folded" * access.fold, []).append(name)
    return found


KINDS = kinds()


def turns(names: Iterable[str], often: int = 3) -> list[Any]:
    """Every name with every kind of access: with `often` of them, in turn, at once; with the others in the slow run."""
    return [
        pytest.param(name, kind, id=f"{name}-{kind}", marks=() if (i + j) % len(KINDS) < often else pytest.mark.slow)
        for i, name in enumerate(names)
        for j, kind in enumerate(KINDS)
    ]


def split(pair: tuple[Tensor, Tensor], size: int = 10) -> list[tuple[Tensor, Tensor]]:
    """A loader of batches `(x, y)`, the last of them smaller."""
    return list(zip(*(part.split(size) for part in pair), strict=True))


TRAIN, TUNE, HELD_OUT, TEST = images(30, 0), images(44, 1), images(24, 2), images(11, 3)
OOD = images(12, 4, shift=3.0)
