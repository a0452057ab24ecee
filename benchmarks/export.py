"""Guards as ONNX graphs beside themselves, as Markdown: how far scores are apart, verdicts that differ, CPU, sizes.

*Heads*: guards of made-up outputs without a model; the largest difference of scores over 1,000 known and 1,000 foreign
rows, in batches of 1, 7 and 1,000, relative to the score's size or the median calibration score's. *DenseNet*, with
$IGEOOD_DATA set: DenseNet-BC-100 of CIFAR-10 with its guard, on 1,000 test images and 1,000 OOD ones; statistics are
those of 2,000 training images, the threshold of 1,000 other test images. CPU is that of batches of 32, in turns.
*JavaScript*: the same graph in Node.js and in Chromium, on 300 of these images; it wants `npm ci` in examples/browser.

python benchmarks/export.py [--only heads] [--classes 10 100 1000] [--images 1000] [--out build/export]
"""

import argparse
import http.server
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

import igeood
from igeood.export.graph import graph_inputs
from igeood.outputs import Outputs

HEADS = tuple(name for name, method in igeood.METHODS.items() if method.needs.pool is None)
MODELS = ("evidence", "igeood", "mahalanobis", "igeood-logits")
EXAMPLE = Path(__file__).parent.parent / "examples" / "browser"
NEAR = 1e-4  # of the threshold's size: so near a verdict may differ
SIZES = (1, 7, 1000)
WIDTHS = {"early": 48, "block": 128, "|head": 256}


def made_up(classes: int, rows: int, seed: int, *, foreign: bool = False) -> Outputs:
    """Features about the classes' means, or about nothing; the logits are linear in the last of them, which is ≥ 0."""
    draw, labels = torch.Generator().manual_seed(seed), torch.arange(rows) % classes
    features = {}
    for block, width in WIDTHS.items():
        means = torch.randn(classes, width, generator=torch.Generator().manual_seed(width)) * 1.5
        noise = torch.randn(rows, width, generator=draw)
        values = 2.0 * noise if foreign else means[labels] + noise
        features[block] = values.clamp(min=0.0) if block == "|head" else values
    weight = torch.randn(classes, WIDTHS["|head"], generator=torch.Generator().manual_seed(256)) * 1.5
    logits = 0.05 * features["|head"] @ weight.clamp(min=0.0).T
    return Outputs(logits, features, None if foreign else labels)


def session_of(path: Path, threads: int = 0) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, given: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """What a graph says of all rows, `size` at a time."""
    names, n = [output.name for output in session.get_outputs()], len(next(iter(given.values())))
    parts = [session.run(None, {k: v[i : i + size] for k, v in given.items()}) for i in range(0, n, size)]
    return {name: np.concatenate(values) for name, values in zip(names, zip(*parts, strict=True), strict=True)}


def apart(guard: igeood.Guard, score: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of scores, relative to their size or the median calibration score's."""
    calibration: Any = guard.calibration
    return float((np.abs(score - other) / np.maximum(np.abs(score), float(calibration.scores.abs().median()))).max())


def head_guard(method: str, train: Outputs, held_out: Outputs, foreign: Outputs) -> igeood.Guard:
    entry = igeood.METHODS[method]
    kind: Any = igeood.white_box if entry.needs_layers else igeood.black_box
    guard = kind(method=method).fit(train)
    if method in ("igeood", "igeood+", "probe", "mahalanobis"):
        guard.tune(held_out, ood=foreign)
    return guard.calibrate(held_out)


def heads(classes: list[int], out: Path, methods: tuple[str, ...] = HEADS, rows: int = 1000) -> Iterator[str]:
    yield "| method | " + " | ".join(f"{n} classes | file" for n in classes) + " |"
    yield "|---|" + "---:|" * 2 * len(classes)
    sizes = {n: ((max(4000, 20 * n), 0, False), (2000, 1, False), (2000, 2, True)) for n in classes}
    parts = {n: [made_up(n, rows, seed, foreign=ood) for rows, seed, ood in these] for n, these in sizes.items()}
    for method in methods:
        cells = []
        for n in classes:
            guard = head_guard(method, *parts[n])
            guard.export(out / "head.onnx", example=parts[n][1][:4])
            test = Outputs.concat([made_up(n, rows, 3).replace(labels=None), made_up(n, rows, 4, foreign=True)])
            scores = torch.as_tensor(guard.score(test)).numpy()
            inputs = graph_inputs(test.only(guard.detector.widths_))
            given = {name: value.numpy() for name, value in inputs.items()}
            session = session_of(out / "head.onnx")
            worst = max(apart(guard, scores[: r.size], r) for r in (run(session, given, s)["score"] for s in SIZES))
            cells.append(f" {worst:.1e} | {(out / 'head.onnx').stat().st_size / 1e6:.2f} MB |")
        yield f"| `{method}` |" + "".join(cells)


def real(images: int) -> tuple[Any, dict[str, torch.Tensor], list[Any], list[Any]]:
    """The network, inputs to judge, and training and calibration batches."""
    from igeood.bench.datasets import load  # noqa: PLC0415
    from igeood.bench.runs import load_network  # noqa: PLC0415

    network = load_network(str(Path(os.environ["IGEOOD_DATA"]) / "weights" / "densenet-bc-100-cifar10.safetensors"))
    train = list(network.batches(load("cifar-10", split="train", limit=2 * images), 50))
    test = [batch[0] for batch in network.batches(load("cifar-10", split="test", limit=2 * images), 50)]
    x = torch.cat(test)
    names = ("tiny-imagenet", "chars74k")
    foreign = [b[0] for name in names for b in network.batches(load(name, split="test", limit=images // 2), 50)]
    return network.model, {"known": x[images:], "foreign": torch.cat(foreign)}, train, list(x[:images].split(50))


def verdicts(images: int, out: Path) -> Iterator[str]:
    model, inputs, train, held_out = real(images)
    x = torch.cat(list(inputs.values()))
    torch.save(x[:: max(1, len(x) // 300)][:300], out / "images.pt")
    titles = ("method", "scores apart", "verdicts differ", "not near", "labels differ", "file")
    yield f"| {' | '.join(titles)} |"
    yield "|---|---:|---:|---:|---:|---:|"
    for method in MODELS:
        kind: Any = igeood.white_box if igeood.METHODS[method].needs_layers else igeood.black_box
        guard = kind(model, method=method).fit(train).calibrate(held_out)
        path = out / f"densenet-{method}.onnx"
        guard.export(path, example=x[:8])
        guard.save(out / f"densenet-{method}.safetensors")
        verdict = guard.predict(list(x.split(50)))
        score, is_ood, label = (torch.as_tensor(v).numpy() for v in (verdict.score, verdict.is_ood, verdict.label))
        graph = run(session_of(path), {"input": x.numpy()}, 50)
        differ = graph["is_ood"] != is_ood
        far = np.abs(score - guard.threshold) > NEAR * np.maximum(abs(guard.threshold), np.abs(score))
        few = {size: run(session_of(path), {"input": x[:size].numpy()}, size)["score"] for size in SIZES}
        worst = max(apart(guard, score, graph["score"]), *(apart(guard, score[: len(s)], s) for s in few.values()))
        cells = f"{worst:.1e} | {differ.sum()} of {len(x)} | {(differ & far).sum()} | {(graph['label'] != label).sum()}"
        yield f"| `{method}` | {cells} | {path.stat().st_size / 1e6:.1f} MB |"


def cpu(out: Path, rounds: int = 11) -> Iterator[str]:
    """CPU of the graphs and of `predict` on a batch of 32 in one thread, all of them in turns: medians."""
    network, _, _, _ = real(40)
    x = torch.load(out / "images.pt")[:32]
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], object]] = {}
    for method in MODELS:
        guard = igeood.load(out / f"densenet-{method}.safetensors", network)
        session, given = session_of(out / f"densenet-{method}.onnx", 1), {"input": x.numpy()}
        calls |= {method: partial(guard.predict, x), f"{method} graph": partial(session.run, None, given)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            started = time.process_time()
            call()
            seconds[name].append(time.process_time() - started)
    yield "| method | `predict`, ms an image | graph, ms an image | ratio |"
    yield "|---|---:|---:|---:|"
    for method in MODELS:
        own, graph = (statistics.median(seconds[name][1:]) for name in (method, f"{method} graph"))
        ratios = [a / b for a, b in zip(seconds[f"{method} graph"][1:], seconds[method][1:], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        yield f"| `{method}` | {1000 * own / 32:.1f} | {1000 * graph / 32:.1f} | {ratio} |"


IN_PAGE = """async () => {
  const ort = await import("/node_modules/onnxruntime-web/dist/ort.wasm.min.mjs");
  const { judge } = await import("/judge.mjs");
  ort.env.wasm.numThreads = 1;
  const session = await ort.InferenceSession.create("/guard.onnx");
  const values = new Float32Array(await (await fetch("/inputs.f32")).arrayBuffer());
  const verdicts = [], batch = 20 * 3072;
  for (let start = 0; start < values.length; start += batch) {
    verdicts.push(...await judge(ort, session, values.slice(start, start + batch), [3, 32, 32]));
  }
  return verdicts;
}"""


def in_node(folder: Path) -> list[dict[str, Any]]:
    command = [shutil.which("node") or "node", "node.mjs", "guard.onnx", "inputs.f32", "3,32,32"]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=True)  # noqa: S603 (our own program)
    return [json.loads(line) for line in done.stdout.splitlines()]


def in_chromium(folder: Path) -> list[dict[str, Any]]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(600_000)
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/judge.mjs")
        verdicts: list[dict[str, Any]] = page.evaluate(IN_PAGE)
        browser.close()
    server.shutdown()
    return verdicts


def javascript(out: Path) -> Iterator[str]:
    """The DenseNet's graph in Node.js and in Chromium, on 300 of the images that were judged before."""
    network, _, _, _ = real(40)
    guard = igeood.load(out / f"densenet-{MODELS[0]}.safetensors", network)
    x = torch.load(out / "images.pt")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("judge.mjs", "node.mjs", "package.json", "node_modules"):
            (folder / file).symlink_to((EXAMPLE / file).resolve())
        shutil.copy(out / f"densenet-{MODELS[0]}.onnx", folder / "guard.onnx")
        x.contiguous().numpy().astype("<f4").tofile(folder / "inputs.f32")
        verdict = guard.predict(list(x.split(50)))
        score, is_ood = (torch.as_tensor(v).numpy() for v in (verdict.score, verdict.is_ood))
        yield "| runtime | samples | refused | scores apart | verdicts differ |"
        yield "|---|---:|---:|---:|---:|"
        for title, run_in in (("onnxruntime-node", in_node), ("onnxruntime-web in Chromium", in_chromium)):
            said = run_in(folder)
            differ = sum(bool(one["isOod"]) != bool(own) for one, own in zip(said, is_ood, strict=True))
            far = apart(guard, score, np.array([one["score"] for one in said]))
            yield f"| {title} | {len(said)} | {is_ood.sum()} | {far:.1e} | {differ} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("heads", "densenet", "cpu", "javascript"))
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("build/export"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], Iterator[str]]] = {"heads": lambda: heads(given.classes, given.out)}
    if "IGEOOD_DATA" in os.environ:
        parts |= {"densenet": lambda: verdicts(given.images, given.out), "cpu": lambda: cpu(given.out)}
    if "IGEOOD_DATA" in os.environ and (EXAMPLE / "node_modules").is_dir():
        parts["javascript"] = lambda: javascript(given.out)
    for name, lines in parts.items():
        for line in lines() if given.only in (None, name) else ():
            print(line, flush=True)


if __name__ == "__main__":
    main()
