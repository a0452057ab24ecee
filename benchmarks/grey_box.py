"""The grey box beside a plain forward pass of the same network: one step (Eq. 6), and a grid of 21 of them.

The plain pass is `model(x)` without gradients, the model and its input as the user has them. "by backward()" is the
step as it is often written: the gradient of everything, the parameters too, and a second pass. "folded" is
`grey_box(model, fold=True)`. DenseNet has the trained weights where $IGEOOD_DATA has them.

python benchmarks/grey_box.py
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import igeood
from igeood.guard import EPSILONS, Guard
from igeood.networks import build, load_weights
from igeood.networks.resnet import ResNet
from side_by_side import Job, Row, compare, main, threads

WEIGHTS = Path(os.environ.get("IGEOOD_DATA", ".")) / "weights" / "densenet-bc-100-cifar10.safetensors"


def settled(net: nn.Module) -> nn.Module:
    """Random weights, with normalisations that do something, as after training."""
    generator = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0.0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    return net.eval()


def by_backward(guard: Guard, x: Tensor) -> Tensor:
    """Eq. 6 with the parameters' gradients computed as well."""
    net, leaf = guard.inputs.model, x.clone().requires_grad_()
    guard.detector.score(net(leaf)).sum().backward()
    with torch.no_grad():
        found = guard.detector.score(net(x - guard.epsilon * leaf.grad.sign()))
    net.zero_grad()
    return found


def plain(net: nn.Module, x: Tensor) -> Job:
    def job() -> Tensor:
        with torch.no_grad():
            return net(x)

    return job


def guards(net: nn.Module, x: Tensor) -> Iterator[tuple[str, Guard]]:
    for name, fold in (("folded", True), ("as it is", False)):
        yield name, igeood.grey_box(net, fold=fold).fit((x, torch.arange(len(x)) % 10))


def cases() -> Iterator[Row]:
    torch.manual_seed(0)
    dense = build("densenet-bc-100")
    trained = "trained" if WEIGHTS.exists() else "random weights"
    networks = {
        "ResNet-18, width 32, N=32": (settled(ResNet((2, 2, 2, 2), 10, width=32)), 32),
        "ResNet-10, width 16, N=64": (settled(build("resnet-10-16")), 64),
        f"DenseNet-BC-100 {trained}, N=10": (load_weights(dense, WEIGHTS) if WEIGHTS.exists() else settled(dense), 10),
    }
    for _ in threads():
        for name, (net, n) in networks.items():
            x = torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))
            for kind, guard in guards(net, x):
                folded, small = kind == "folded", "ResNet" in name
                others = {"plain forward": (plain(net, x), "most", 2.6 if small else None)}
                if not folded:
                    others["by backward()"] = (lambda g=guard, x=x: by_backward(g, x), "least", None)
                yield from compare(f"{name}, {kind}", lambda g=guard, x=x: g.score(x), others)
        net, n = networks["ResNet-10, width 16, N=64"]
        x = torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        for kind, guard in guards(net, x):
            ours = lambda g=guard, x=x: list(g.inputs.see(x, g.detector, epsilons=EPSILONS))  # noqa: E731
            yield from compare(f"21 steps, ResNet-10, {kind}", ours, {"plain forward": (plain(net, x), "most", 25.0)})


if __name__ == "__main__":
    main("Grey box", cases)
