"""CPU seconds of a rank's `fit` at two ranks over one process's; 0.6 is wanted: python benchmarks/ranks.py."""

import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import igeood

ROWS = 4000


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [
            nn.Conv2d(before, after, 3, stride, 1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()


def work(rank: int, size: int, store: str, times: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    x, y = torch.randn(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(ROWS) % 10
    guards = [igeood.white_box(network()) for _ in range(2)]
    guards[0].fit((x[:200], y[:200]), group=False)  # what is imported and prepared once
    dist.barrier()
    start = time.process_time()
    guards[1].fit((x[rank::size], y[rank::size]))
    times.put(time.process_time() - start)
    dist.destroy_process_group()


def seconds(size: int) -> float:
    """The slowest rank's."""
    context = multiprocessing.get_context("spawn")
    times = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(rank, size, f"{folder}/store", times)) for rank in range(size)]
        for process in ranks:
            process.start()
        spent = [times.get(timeout=600) for _ in ranks]
        [process.join() for process in ranks]
    return max(spent)


if __name__ == "__main__":
    pairs = [(seconds(1), seconds(2)) for _ in range(3)]
    for alone, together in pairs:
        print(f"alone {alone:.2f} s, a rank of two {together:.2f} s, ratio {together / alone:.2f}")
    print(f"median ratio {statistics.median(together / alone for alone, together in pairs):.2f} (at most 0.6)")
