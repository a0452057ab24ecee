"""Another version of the library beside this one: `python benchmarks/against.py CHECKOUT`, a folder with its `src`.

Each job is a process for each version, and they take turns; what is printed is the CPU time of both, and what the job
reports of its result.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path

ROUNDS = 3
COMMON = """
import logging, sys, time, warnings, torch, igeood
sys.path.insert(0, "benchmarks")
from predict import guards, plain, resnet_18, small
from tuning import outputs
from side_by_side import cpu_seconds
warnings.simplefilter("ignore"), torch.set_num_threads(1), torch.manual_seed(0)
"""
TUNE = """
train = outputs(10_000, 10, (64, 128, 256))
inside, outside = (outputs(1000, 10, (64, 128, 256), scale=s, seed=7 + i) for i, s in enumerate((0.6, 0.3)))
guard = igeood.white_box().fit(train)
seconds = cpu_seconds(lambda: guard.tune(inside, outside, share=1.0))
rest = [guard.score(outputs(4000, 10, (64, 128, 256), scale=s, seed=17 + i)) for i, s in enumerate((0.6, 0.3))]
print(seconds, round(100 * igeood.metrics.tnr_at_tpr(*rest), 2))
"""
PREDICT = """
model, x = {network}(), torch.rand(1, 3, 32, 32)
guard = guards(model)["{kind}"]
jobs = [plain(model, x), lambda: guard.predict(x)]
both = [[cpu_seconds(job, 20) for job in jobs] for _ in range(30)][2:]
added = sorted(ours - bare for bare, ours in both)[len(both) // 2]
print(added, round(1 + added / sorted(bare for bare, _ in both)[len(both) // 2], 3))
"""
JOBS = {"tune, white box, 10 classes, 10,000 rows (CPU seconds, TNR on other rows)": TUNE} | {
    f"predict, {kind} box, {network} (seconds more than the network, ratio)": PREDICT.format(network=network, kind=kind)
    for network in ("small", "resnet_18")
    for kind in ("black", "white")
}


def main() -> None:
    """Print a line for each job and version."""
    folders = {"this": Path("src").resolve(), "other": Path(sys.argv[1]).resolve() / "src"}
    for title, script in JOBS.items():
        taken: dict[str, list[list[float]]] = {name: [] for name in folders}
        for _ in range(ROUNDS):
            for name, folder in folders.items():
                command, env = [sys.executable, "-c", COMMON + script], {**os.environ, "PYTHONPATH": str(folder)}
                done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)  # noqa: S603
                taken[name].append([float(value) for value in done.stdout.split()[-2:]])
        middle = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in taken.items()
        }
        values = "; ".join(f"{name} {a:.4g}, {b:g}" for name, (a, b) in middle.items())
        print(f"{title}: {values}; ratio {middle['this'][0] / middle['other'][0]:.3f}", flush=True)


if __name__ == "__main__":
    main()
