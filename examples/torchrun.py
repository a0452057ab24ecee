"""A guard of several processes, each with its shard: `torchrun --nproc_per_node 2 examples/torchrun.py`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import igeood


def loader(rows: int, shift: float, seed: int) -> DataLoader:
    """Made-up samples of three classes: the shard of this rank. A DistributedSampler would repeat some of them."""
    draw = torch.Generator().manual_seed(seed)
    classes = torch.arange(rows) % 3
    samples = torch.randn(rows, 8, generator=draw) + 4.0 * nn.functional.one_hot(classes, 8) + shift
    shard = Subset(TensorDataset(samples, classes), range(dist.get_rank(), rows, dist.get_world_size()))
    return DataLoader(shard, batch_size=64)


def main() -> None:
    """Fit and calibrate together: every rank gets the same guard, and judges its own shard."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model everywhere: load its weights here
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    with torch.no_grad():
        model[0].weight[:8], model[2].weight[:, :8] = torch.eye(8), torch.eye(8)[:3]

    guard = igeood.white_box(model).fit(loader(2001, 0.0, seed=1)).calibrate(loader(999, 0.0, seed=2))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks fitted {guard.summary.rows} rows; {guard.promise}")
    for name, rows, shift in (("known", 500, 0.0), ("foreign", 301, 3.0)):
        is_ood = guard.predict(loader(rows, shift, seed=3)).is_ood
        counts = torch.tensor([is_ood.sum(), len(is_ood)])
        dist.all_reduce(counts)
        if dist.get_rank() == 0:
            print(f"{name:<8} {counts[1]} samples, {100 * counts[0] / counts[1]:5.1f}% refused")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
