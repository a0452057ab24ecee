"""A bounded sample of refused inputs, for people to look at: those with the smallest seeded hashes of their content.

It is the same sample whatever the order of inputs, equal inputs are one, and a restart goes on with what is there.
"""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from igeood.errors import MissingExtraError
from igeood.files import record_head, write_record
from igeood.guard import Verdict
from igeood.images import as_pixels, picture
from igeood.keys import row_keys
from igeood.serve.log import say
from igeood.serve.served import Served, Tensors

ENDING = ".safetensors"
SHOWN = 10
FIELDS = ("time", "score", "p_value", "label", "name", "explanation", "reason", "picture")


class Flagged:
    """A folder of refused inputs, each in a file with its score, p-value, explanation and, for an image, picture.

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
        self._salt = np.random.default_rng(seed).integers(1 << 63, dtype=np.uint64)
        self._waiting: dict[int, tuple[Served, Tensors, dict[str, Any]]] = {}  # to be explained and written
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "igeood-flagged")
        self._choose([])

    def _paths(self) -> list[Path]:
        return list(self.folder.glob(f"{'[0-9a-f]' * 16}{ENDING}"))

    def offer(self, served: Served, tensors: Tensors, verdict: Verdict) -> None:
        """Keep the refused inputs of a batch that belong to the sample."""
        rows = np.flatnonzero(np.array(verdict.to_dict()["is_ood"]) & verdict.is_read).tolist()
        if not rows:
            return
        keys = row_keys(*(tensor[rows].double() for tensor in tensors.values())) ^ self._salt
        places = dict(zip(keys.tolist(), rows, strict=True))
        with self._lock:
            for key in self._choose(places):
                row = places[key]
                sample = {name: tensor[row : row + 1].clone() for name, tensor in tensors.items()}
                self._waiting[key] = served, sample, {"time": time.time(), **verdict[row]._asdict()}
                self._writer.submit(self._write, key)

    def _choose(self, offered: Iterable[int]) -> set[int]:
        """The offered keys that are new to the sample; those that leave it for them are removed."""
        before = {int(path.stem, 16) for path in self._paths()} | self._waiting.keys()  # people may empty the folder
        sample = {*sorted(before.union(offered))[: self.keep]}
        for key in before - sample:
            self._waiting.pop(key, None)
            self._file(key).unlink(missing_ok=True)
        return sample - before

    def _file(self, key: int) -> Path:
        return self.folder / f"{key:016x}{ENDING}"

    def _write(self, key: int) -> None:
        job = self._waiting.get(key)
        if job is None:  # others have taken its place
            return
        served, tensors, about = job
        try:
            explanation = served.guard.explain(served.as_data(tensors))
            about["explanation"] = str(explanation).removeprefix("sample 0: ")
            about["reason"] = explanation.reason(0)
            about["picture"] = None if served.model is None else _picture(tensors)
            record = {name: about[name] for name in FIELDS}
            write_record(self._file(key), {"kind": "flagged", **record}, tensors)
            self._file(key).chmod(0o600)  # the folder may be one that others read
        except Exception as error:  # noqa: BLE001 (a full disk, a model that fails: the service goes on)
            say("flagged input not kept", error=str(error))
        with self._lock:
            if self._waiting.pop(key, None) is None:
                self._file(key).unlink(missing_ok=True)

    def record(self) -> dict[str, Any]:
        """What the page shows: how many there are, and the latest."""
        with self._lock:
            paths = sorted(self._paths(), key=lambda path: -path.stat().st_mtime)
            heads = {path.name: record_head(path) for path in paths[:SHOWN]}
        shown = [{"file": name, **{field: head.get(field) for field in FIELDS}} for name, head in heads.items() if head]
        return {"folder": str(self.folder), "kept": len(paths), "limit": self.keep, "latest": shown}

    def close(self) -> None:
        """Write what waits."""
        self._writer.shutdown()


def _picture(tensors: Tensors) -> str | None:
    """The picture of a model's input that is one image (1, C, H, W), if Pillow is there to draw it."""
    x = next(iter(tensors.values()))
    if len(tensors) == 1 and x.ndim == 4 and x.shape[1] <= 4:
        image = x[0].double()
        with suppress(MissingExtraError):
            return picture(as_pixels(image, image.min(), image.max()))
    return None
