"""False alarms and delays of the monitor, as Markdown: how often it alarms where nothing changes, how soon otherwise.

*False alarms*: each stream has a calibration set of its own; the share of streams with an alarm among the first T
inputs stands beside its bound, T / run length. *Delays*: inputs from the change to the next alarm, beside river's ADWIN
on the flags of the same streams. Made-up scores are N(0, 1), of OOD inputs N(3, 1). Real ones are those of
`igeood-logits` on DenseNet-BC-100 of CIFAR-10, with $IGEOOD_DATA set: each stream has 1,000 of 2,000 test images as
calibration set and draws its inputs from the others; the network's outputs are kept in --out.

python benchmarks/monitor.py
"""

import argparse
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from river.drift import ADWIN
from safetensors.torch import load_file

import igeood
from igeood.bench.datasets import load
from igeood.bench.runs import load_network
from igeood.bench.runs.observing import Observer
from igeood.calibration import Calibration
from igeood.guard import Verdict
from igeood.monitor import Monitor

FROZEN = Path(__file__).parent.parent / "tests" / "frozen" / "real_outputs.safetensors"
SHARES = (0.02, 0.05, 0.1, 0.3, 1.0)
BAR, JUDGED = 0.8, (0.05, 0.1, 0.3)  # of ADWIN's delay, at these shares
SET, CLEAN, LIMIT, CHUNK = 1000, 10_000, 30_000, 500  # calibration samples; inputs before the change, after it, at once
Draw = Callable[[np.random.Generator, int], np.ndarray]
Drawn = tuple[np.ndarray, Draw, Draw]  # calibration scores; inputs as before, and OOD ones


def verdicts(scores: np.ndarray, flags: np.ndarray) -> Verdict:
    return Verdict(flags, scores, np.ones(len(scores)), np.zeros(len(scores), int))


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(size=n)


def tied(rng: np.random.Generator, n: int) -> np.ndarray:
    """Five values, as votes of four trees give: the largest has a share of 3%."""
    return rng.binomial(4, 0.42, size=n).astype(float)


def alarmed(draw: Draw, n: int, length: int, run_length: float, kind: str, seed: int, share: float = 0.0) -> bool:
    """Whether a stream has an alarm; a share of its inputs scores 3 more."""
    rng = np.random.default_rng([seed, n])
    guarantee = "tolerance" if kind == "flags" else "marginal"
    calibration = Calibration(torch.from_numpy(draw(rng, n)), 0.95, guarantee)  # type: ignore[arg-type]
    watcher, scores = Monitor(calibration, run_length, kind, seed=seed), draw(rng, length)  # type: ignore[arg-type]
    scores += 3.0 * (rng.random(length) < share)
    watcher.update(verdicts(scores, scores > calibration.threshold))
    return watcher.alarm


def false_alarms(streams: int, length: int, run_length: float) -> None:
    bound = length / run_length
    print(f"\nStreams with a false alarm, of {streams:,}; T = {length:,}, run length {run_length:,.0f}:\n")
    print("| calibration samples | streams with an alarm | bound T / run length | bound + 3 s.e. | held |")
    print("|---|---:|---:|---:|---|")
    cases = [(f"{n:,}{ties}", draw, n, "p-values") for ties, draw in (("", normal), (", heavy ties", tied))
             for n in (19, 100, 1000)]  # fmt: skip
    cases += [("100, flags (95% confidence)", normal, 100, "flags"), ("1,000, flags", normal, 1000, "flags")]
    for name, draw, n, kind in cases:
        share = np.mean([alarmed(draw, n, length, run_length, kind, seed) for seed in range(streams)])
        allowed = bound + (0.05 if kind == "flags" else 0.0)
        upper = allowed + 3 * math.sqrt(allowed * (1 - allowed) / streams)
        told = "yes" if share <= upper else "NO"
        print(f"| {name} | {100 * share:.2f}% | {100 * allowed:.2f}% | {100 * upper:.2f}% | {told} |", flush=True)


def from_the_start(streams: int, length: int) -> None:
    print(
        f"\n10% OOD inputs from the first input on: streams with an alarm among {length:,} inputs, of {streams:,}; ",
        end="",
    )
    print("run length 1,000,000:\n\n| calibration samples | p-values | flags |\n|---|---:|---:|")
    for n in (100, 300, 1000):
        shares = [np.mean([alarmed(normal, n, length, 1e6, kind, seed, 0.1) for seed in range(streams)])
                  for kind in ("p-values", "flags")]  # fmt: skip
        print(f"| {n:,} | {100 * shares[0]:.0f}% | {100 * shares[1]:.0f}% |", flush=True)


def made_up(rng: np.random.Generator) -> Drawn:
    return normal(rng, SET), normal, lambda rng, n: rng.normal(3.0, 1.0, size=n)


def chunks(drawn: Drawn, share: float, clean: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Scores of a stream: the clean inputs, then OOD ones among others."""
    _, inside, outside = drawn
    yield inside(rng, clean)
    for _ in range(LIMIT // CHUNK):
        yield np.where(rng.random(CHUNK) < share, outside(rng, CHUNK), inside(rng, CHUNK))


def delays(drawn: Drawn, share: float, clean: int, seed: int) -> tuple[float, float, bool]:
    """Inputs from the change to the next alarm, of the monitor and of ADWIN; and whether the monitor alarmed before."""
    calibration = Calibration(torch.from_numpy(drawn[0]), 0.95)
    watcher, adwin, was_early = Monitor(calibration, seed=seed), ADWIN(delta=0.002), False
    found, done = {"monitor": math.inf, "adwin": math.inf}, -clean
    for scores in chunks(drawn, share, clean, np.random.default_rng([seed, round(100 * share)])):
        flags = scores > calibration.threshold
        if found["monitor"] == math.inf:
            reached = np.flatnonzero(watcher.update(verdicts(scores, flags)) >= watcher.run_length)
            was_early |= done < 0 and len(reached) > 0
            found["monitor"] = done + 1.0 + reached[0] if len(reached) and done >= 0 else math.inf
        for number, flag in enumerate(flags.tolist(), done + 1) if found["adwin"] == math.inf else ():
            adwin.update(int(flag))
            if adwin.drift_detected and number > 0:
                found["adwin"] = float(number)
                break
        done += len(scores)
        if math.inf not in found.values():
            break
    return found["monitor"], found["adwin"], was_early


def print_delays(title: str, source: Callable[[np.random.Generator], Drawn], streams: int, clean: int) -> None:
    print(
        f"\n{title}: median delay in inputs of {streams:,} streams, {SET:,} calibration samples, after {clean:,} ",
        end="",
    )
    print("clean inputs, run length 1,000,000:\n")
    print("| OOD inputs | monitor | ADWIN(0.002) | ratio | ≤ 0.8 | alarms of the monitor before the change |")
    print("|---|---:|---:|---:|---|---:|")
    for share in SHARES:
        rows = np.array([
            delays(source(np.random.default_rng([7, seed])), share, clean, seed) for seed in range(streams)
        ])  # fmt: skip
        ours, theirs = (float(np.median(rows[:, column])) for column in (0, 1))
        met = ("yes" if ours <= BAR * theirs else "NO") if share in JUDGED else ""
        early = int(rows[:, 2].sum())
        cells = [f"{value:,.0f}" if value < math.inf else f"> {LIMIT:,}" for value in (ours, theirs)]
        ratio = f"{ours / theirs:.2f}" if theirs < math.inf else "—"
        print(f"| {share:.0%} | {' | '.join(cells)} | {ratio} | {met} | {early} |", flush=True)


def real_scores(out: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Scores of 2,000 test images of CIFAR-10, and of 500 images of each OOD set."""
    network = load_network(str(Path(os.environ["IGEOOD_DATA"]) / "weights" / "densenet-bc-100-cifar10.safetensors"))
    observer = Observer(network, out, lambda *done: print(*done, flush=True))
    frozen = load_file(FROZEN)
    detector = igeood.detector("igeood-logits").fit(frozen["train/logits"], frozen["train/labels"])
    needs = igeood.METHODS["igeood-logits"].needs

    def scores(name: str, n: int) -> np.ndarray:
        return detector.score(observer.outputs(load(name, split="test", limit=n), needs)).double().numpy()

    return scores("cifar-10", 2000), {name: scores(name, 500) for name in ("tiny-imagenet", "chars74k")}


def split(inside: np.ndarray, outside: np.ndarray) -> Callable[[np.random.Generator], Drawn]:
    """Calibration scores, and pools of others from which inputs are drawn."""

    def drawn(rng: np.random.Generator) -> Drawn:
        order = rng.permutation(inside)
        return order[:SET], lambda r, n: r.choice(order[SET:], n), lambda r, n: r.choice(outside, n)

    return drawn


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/monitor"), help="where the network's outputs are kept")
    parser.add_argument("--quick", action="store_true", help="few and short streams of made-up scores")
    given = parser.parse_args(words)
    false_alarms(*(20, 200, 2000.0) if given.quick else (2000, 10_000, 100_000.0))
    streams, clean = (3, 500) if given.quick else (200, CLEAN)
    from_the_start(streams, clean)
    print_delays("Made-up scores", made_up, streams, clean)
    if "IGEOOD_DATA" in os.environ and not given.quick:
        inside, foreign = real_scores(given.out)
        for name, outside in foreign.items():
            print_delays(f"DenseNet, CIFAR-10 and {name}", split(inside, outside), streams, clean)


if __name__ == "__main__":
    logging.getLogger("igeood").setLevel(logging.ERROR)  # few calibration samples are meant
    main()
