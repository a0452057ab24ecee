"""A bounded sample of refused inputs, for people to look at: those with the smallest seeded hashes of their content.

It is the same sample whatever the order of inputs, equal inputs are one, and a restart goes on with what is there.
"""

import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from igeood.files import record_head, write_record
from igeood.guard import Guard, Verdict
from igeood.outputs import Outputs
from igeood.serve.log import say
from igeood.tables import FEATURE

ENDING = ".safetensors"
WAITING = 64  # inputs that wait to be explained and written; more are left out
SHOWN = 10
LOOKED_EVERY = 5.0  # seconds between two looks at the folder: people may empty it


class Flagged:
    """A folder of refused inputs, each in a file with its score, p-value and explanation.

    Parameters
    ----------
    folder : Path
        Made if it is missing, for its owner's eyes only.
    keep : int
        Inputs to keep at most.
    seed : int
        Of the sample.
    """

    def __init__(self, folder: Path, keep: int, seed: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self.keep, self.left_out = folder, keep, 0
        self._salt = np.random.default_rng(seed).integers(1 << 63, dtype=np.uint64)
        self._kept: dict[int, dict[str, Any]] = {}
        self._lock, self._looked = threading.Lock(), 0.0
        self._jobs: queue.Queue[tuple[int, Guard, Any, dict[str, Any]] | None] = queue.Queue(WAITING)
        self._look()
        self._thread = threading.Thread(target=self._work, name="igeood-flagged", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        """Note which inputs are there."""
        there = {int(path.stem, 16): path for path in self.folder.glob(f"{'[0-9a-f]' * 16}{ENDING}")}
        known = self._kept
        waiting = {key: about for key, about in known.items() if not about}  # they have no file yet
        self._kept = {key: known.get(key) or record_head(path) for key, path in there.items()} | waiting
        self._looked = time.monotonic()

    def offer(self, guard: Guard, data: Any, verdict: Verdict) -> None:
        """Keep the refused inputs of a batch that belong to the sample."""
        read = True if verdict.reason is None else np.array([why is None for why in verdict.reason])
        rows = np.flatnonzero(np.asarray(verdict.is_ood) & read)
        if not len(rows):
            return
        keys = data[torch.from_numpy(rows)].keys ^ self._salt
        with self._lock:
            if time.monotonic() - self._looked > LOOKED_EVERY:
                self._look()
            for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
                if key in self._kept or (len(self._kept) >= self.keep and key > max(self._kept)):
                    continue
                judgement = {k: v for k, v in verdict[row]._asdict().items() if k not in ("is_ood", "reason")}
                try:
                    self._jobs.put_nowait((key, guard, data[row : row + 1], {"time": time.time(), **judgement}))
                except queue.Full:
                    self.left_out += 1
                    continue
                self._kept[key] = {}
                while len(self._kept) > self.keep:
                    gone = max(self._kept)
                    del self._kept[gone]
                    self._file(gone).unlink(missing_ok=True)

    def _file(self, key: int) -> Path:
        return self.folder / f"{key:016x}{ENDING}"

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            key, guard, sample, record = job
            try:
                record["explanation"] = str(guard.explain(sample)).removeprefix("sample 0: ")
                write_record(self._file(key), {"kind": "flagged", **record}, _tensors(sample))
            except Exception as error:  # noqa: BLE001 (a full disk, a model that fails: judging goes on)
                say("flagged input not kept", error=str(error))
                record = {}
            with self._lock:
                if key not in self._kept:  # a smaller one has come since
                    self._file(key).unlink(missing_ok=True)
                elif record:
                    self._kept[key] = record
                else:
                    del self._kept[key]

    def record(self) -> dict[str, Any]:
        """What the page shows: how many there are, and the latest."""
        with self._lock:
            kept = [{"file": self._file(key).name, **about} for key, about in self._kept.items() if about]
        latest = sorted(kept, key=lambda about: -float(about.get("time", 0.0)))[:SHOWN]
        names = ("file", "time", "score", "p_value", "label", "name", "explanation")
        shown = [{"reason": None, **{name: about.get(name) for name in names}} for about in latest]
        return {"folder": str(self.folder), "kept": len(kept), "limit": self.keep, "latest": shown}

    def close(self) -> None:
        """Write what waits."""
        self._jobs.put(None)
        self._thread.join()


def _tensors(sample: Any) -> dict[str, Tensor]:
    """What was sent, by the names of the service's inputs."""
    if isinstance(sample, Outputs):
        return {"logits": sample.logits, **{FEATURE + layer: value for layer, value in sample.features.items()}}
    return {name or "x": value for name, value in sample.inputs.items() if isinstance(value, Tensor)}
