"""A service and its client: digits over HTTP, until the camera gets dark and the monitor notices."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import igeood

try:
    import tritonclient.http as triton
except ImportError:
    triton = None


def ask(address: str, content: object = None) -> dict:
    """Post JSON, or get it."""
    body = None if content is None else json.dumps(content).encode()
    request = Request(address, body, {"Content-Type": "application/json"})  # noqa: S310 (our own service)
    with urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.load(answer)


def refused(address: str, rows: np.ndarray) -> list[bool]:
    """What the service refuses: by a client of the Open Inference Protocol if there is one, else by plain JSON."""
    if triton is None:
        return [verdict["is_ood"] for verdict in ask(f"{address}/predict", rows.tolist())["verdicts"]]
    tensor = triton.InferInput("logits", list(rows.shape), "FP64")
    tensor.set_data_from_numpy(rows)
    with triton.InferenceServerClient(address.removeprefix("http://")) as client:
        return client.infer("guard", [tensor]).as_numpy("is_ood").tolist()


def talk(address: str, known: np.ndarray, foreign: np.ndarray) -> None:
    """Send logits in small requests, and ask what the monitor says."""
    for verdict in ask(f"{address}/predict", known[:2].tolist())["verdicts"]:
        print(f"a digit: answer {verdict['label']}, p-value {verdict['p_value']:.3f}")
    for name, logits in (("digits", known), ("dark digits", foreign)):
        flags = [flag for start in range(0, len(logits), 20) for flag in refused(address, logits[start : start + 20])]
        monitor = ask(f"{address}/status")["monitor"]
        print(f"{name:<12} {100 * np.mean(flags):5.1f}% of {len(flags)} refused, alarm: {monitor['alarm']}")
    print(f"alarm at input {monitor['alarms'][0]['at']}; the change began at input {monitor['since']} or so")


def main() -> None:
    """Calibrate a guard, serve it in a process of its own, and stop that at the end."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x, y = images[order] / 16, digits[order]
    train, held_out, test = slice(0, 500), slice(500, 1500), slice(1500, None)
    logits = LogisticRegression(max_iter=1000).fit(x[train], y[train]).decision_function
    guard = igeood.black_box().fit(logits(x[train]), y[train]).calibrate(logits(x[held_out]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "guard.safetensors"
        guard.save(path)
        command = [sys.executable, "-m", "igeood.cli", "serve", str(path), "--port", "0", "--quiet"]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as service:  # noqa: S603 (our own command)
            try:
                talk(json.loads(service.stderr.readline())["address"], logits(x[test]), logits(0.4 * x[test]))
            finally:
                service.terminate()


if __name__ == "__main__":
    main()
