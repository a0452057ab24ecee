"""A bounded sample of refused inputs, for people to look at: those with the smallest seeded hashes of their content.

Half of it is of the last hour, or since the last alarm within it. Of equal times it is the same sample whatever the
order of inputs, equal inputs are one, and a restart goes on with what is there.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
SHOWN = 10
RECENT = 3600.0  # seconds: half of the sample is of these, or since an alarm within them
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
        self.folder, self.keep, self._is_closed, self._looked = folder, keep, False, 0.0
        self._salt = np.random.default_rng(seed).integers(1 << 63, dtype=np.uint64)
        self._kept: dict[int, dict[str, Any]] = {}  # in files
        self._waiting: dict[int, tuple[Guard, Any, dict[str, Any]]] = {}  # to be explained and written
        self._changed = threading.Condition()
        self._look()
        self.changed = 0.0  # when the monitor last gave an alarm
        self._choose([])
        self._thread = threading.Thread(target=self._work, name="igeood-flagged", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        """Note which inputs are there."""
        known, self._kept, self._looked = self._kept, {}, time.monotonic()
        for path in self.folder.glob(f"{'[0-9a-f]' * 16}{ENDING}"):
            key = int(path.stem, 16)
            with suppress(OSError):  # it was removed meanwhile
                if about := known.get(key) or record_head(path):  # else it is damaged
                    self._kept[key] = about

    def offer(self, guard: Guard, data: Any, verdict: Verdict) -> None:
        """Keep the refused inputs of a batch that belong to the sample."""
        rows = np.flatnonzero(np.asarray(verdict.is_ood) & verdict.is_read)
        if not len(rows):
            return
        keys = data[torch.from_numpy(rows)].keys ^ self._salt
        with self._changed:
            if time.monotonic() - self._looked > LOOKED_EVERY:
                self._look()
            places = dict(zip(keys.tolist(), rows.tolist(), strict=True))
            for key in self._choose(places):
                judgement = verdict[places[key]]._asdict()
                record = {name: value for name, value in judgement.items() if name not in ("is_ood", "reason")}
                sample = data[torch.tensor([places[key]])]  # a copy: the batch may be large
                self._waiting[key] = guard, sample, {"time": time.time(), **record}
            self._changed.notify()

    def _choose(self, offered: Iterable[int]) -> set[int]:
        """Those of the keys offered that belong to the sample, and are new to it; others leave it for them."""
        known, since = {*self._kept, *self._waiting}, max(self.changed, time.time() - RECENT)
        late = {key for key, about in self._records() if about.get("time", 0.0) >= since}
        every = sorted(known.union(offered))
        sample = {*sorted(late.union(offered))[: self.keep // 2]}
        sample |= {*[key for key in every if key not in sample][: self.keep - len(sample)]}
        for gone in known - sample:
            self._waiting.pop(gone, None)
            if self._kept.pop(gone, None) is not None:
                self._remove(gone)
        return sample - known

    def _records(self) -> list[tuple[int, dict[str, Any]]]:
        return [*self._kept.items(), *((key, about) for key, (_, _, about) in self._waiting.items())]

    def _file(self, key: int) -> Path:
        return self.folder / f"{key:016x}{ENDING}"

    def _remove(self, key: int) -> None:
        with suppress(OSError):  # gone already, or not ours to remove
            self._file(key).unlink()

    def _next(self) -> Iterator[tuple[int, Guard, Any, dict[str, Any]]]:
        """Inputs to write, as they come; each waits until it is written."""
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                key = min(self._waiting)
                job = self._waiting[key]
            yield key, *job

    def _work(self) -> None:
        for key, guard, sample, record in self._next():
            try:
                record["explanation"] = str(guard.explain(sample)).removeprefix("sample 0: ")
                write_record(self._file(key), {"kind": "flagged", **record}, _tensors(sample))
                self._file(key).chmod(0o600)  # the folder may be one that others read
            except Exception as error:  # noqa: BLE001 (a full disk, a model that fails: judging goes on)
                say("flagged input not kept", error=str(error))
                record.clear()
            with self._changed:
                if self._waiting.pop(key, None) is None:  # a smaller one has come since
                    self._remove(key)
                elif record:
                    self._kept[key] = record

    def record(self) -> dict[str, Any]:
        """What the page shows: how many there are, and the latest."""
        with self._changed:
            kept = [{"file": self._file(key).name, **about} for key, about in self._kept.items() if about]
        latest = sorted(kept, key=lambda about: -float(about.get("time", 0.0)))[:SHOWN]
        names = ("file", "time", "score", "p_value", "label", "name", "explanation")
        shown = [{"reason": None, **{name: about.get(name) for name in names}} for about in latest]
        return {"folder": str(self.folder), "kept": len(kept), "limit": self.keep, "latest": shown}

    def close(self) -> None:
        """Write what waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()


def _tensors(sample: Any) -> dict[str, Tensor]:
    """What was sent, by the names of the service's inputs."""
    if isinstance(sample, Outputs):
        return {"logits": sample.logits, **{FEATURE + layer: value for layer, value in sample.features.items()}}
    return {name or "x": value for name, value in sample.inputs.items() if isinstance(value, Tensor)}
