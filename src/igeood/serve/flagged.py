"""A bounded sample of refused inputs, for people to look at: those with the smallest seeded hashes of their content.

Half of it is of the last hour, or since the last alarm within it. Of equal times it is the same sample whatever the
order of inputs, equal inputs are one, and a restart goes on with what is there.
"""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from igeood.files import record_head, write_record
from igeood.guard import Verdict
from igeood.keys import row_keys
from igeood.serve.log import say
from igeood.serve.served import Served, Tensors

ENDING = ".safetensors"
SHOWN = 10
RECENT = 3600.0  # seconds: half of the sample is of these, or since an alarm within them
LOOKED_EVERY = 5.0  # seconds between two looks at the folder: people may empty it
FIELDS = ("file", "time", "score", "p_value", "label", "name", "reason", "explanation")


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
        self.folder = folder
        self.keep = keep
        self.alarmed = 0.0  # when the monitor last gave an alarm
        self._salt = np.random.default_rng(seed).integers(1 << 63, dtype=np.uint64)
        self._kept: dict[int, dict[str, Any]] = {}  # records of files
        self._waiting: dict[int, tuple[Served, Tensors, dict[str, Any]]] = {}  # to be explained and written
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "igeood-flagged")
        self._looked = time.monotonic()
        for path in folder.glob(f"{'[0-9a-f]' * 16}{ENDING}"):
            record = record_head(path)
            if record:  # else it is damaged
                self._kept[int(path.stem, 16)] = record
        self._choose([])

    def offer(self, served: Served, tensors: Tensors, verdict: Verdict) -> None:
        """Keep the refused inputs of a batch that belong to the sample."""
        rows = np.flatnonzero(np.array(verdict.to_dict()["is_ood"]) & verdict.is_read).tolist()
        if not rows:
            return
        keys = row_keys(*(tensor[rows].double() for tensor in tensors.values())) ^ self._salt
        places = dict(zip(keys.tolist(), rows, strict=True))
        with self._lock:
            if time.monotonic() - self._looked > LOOKED_EVERY:
                self._looked = time.monotonic()
                self._kept = {key: record for key, record in self._kept.items() if self._file(key).exists()}
            for key in self._choose(places):
                row = places[key]
                sample = {name: tensor[row : row + 1].clone() for name, tensor in tensors.items()}
                record = {"time": time.time(), **verdict[row]._asdict()}
                del record["is_ood"], record["reason"]
                self._waiting[key] = served, sample, record
                self._writer.submit(self._write, key)

    def _choose(self, offered: Iterable[int]) -> set[int]:
        """The offered keys that are new to the sample; those that leave it for them are removed."""
        since = max(self.alarmed, time.time() - RECENT)
        times = {key: record.get("time", 0.0) for key, record in self._kept.items()}
        times |= {key: record["time"] for key, (_, _, record) in self._waiting.items()}
        late = {key for key, moment in times.items() if moment >= since}
        sample = {*sorted(late.union(offered))[: self.keep // 2]}
        others = sorted({*times, *offered} - sample)
        sample.update(others[: self.keep - len(sample)])
        for key in times.keys() - sample:
            self._waiting.pop(key, None)
            if self._kept.pop(key, None) is not None:
                self._remove(key)
        return sample - times.keys()

    def _file(self, key: int) -> Path:
        return self.folder / f"{key:016x}{ENDING}"

    def _remove(self, key: int) -> None:
        with suppress(OSError):  # gone already, or not ours to remove
            self._file(key).unlink()

    def _write(self, key: int) -> None:
        with self._lock:
            job = self._waiting.get(key)
        if job is None:  # others have taken its place
            return
        served, tensors, record = job
        try:
            explanation = str(served.guard.explain(served.as_data(tensors))).removeprefix("sample 0: ")
            record = {**record, "explanation": explanation}
            write_record(self._file(key), {"kind": "flagged", **record}, tensors)
            self._file(key).chmod(0o600)  # the folder may be one that others read
        except Exception as error:  # noqa: BLE001 (a full disk, a model that fails: judging goes on)
            say("flagged input not kept", error=str(error))
            record = {}
        with self._lock:
            if self._waiting.pop(key, None) is None:
                self._remove(key)
            elif record:
                self._kept[key] = record

    def record(self) -> dict[str, Any]:
        """What the page shows: how many there are, and the latest."""
        with self._lock:
            kept = [{**record, "file": self._file(key).name} for key, record in self._kept.items()]
        latest = sorted(kept, key=lambda record: -float(record.get("time", 0.0)))[:SHOWN]
        shown = [{name: record.get(name) for name in FIELDS} for record in latest]
        return {"folder": str(self.folder), "kept": len(kept), "limit": self.keep, "latest": shown}

    def close(self) -> None:
        """Write what waits."""
        self._writer.shutdown()
