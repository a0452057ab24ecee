"""The ranks of a process group: each has its own shard, all get the same result. Bytes travel, never pickles."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from igeood.errors import IgeoodError, InputError, NoRowsError

Group = dist.ProcessGroup | Literal[False] | None


class Ranks:
    """The processes that share a step's data: those of a `torch.distributed` group, or this one alone.

    Parameters
    ----------
    group : ProcessGroup, False or None
        None is the default group, where one is initialised; False is this process alone.
    """

    def __init__(self, group: Group = None) -> None:
        is_group = dist.is_available() and isinstance(group, dist.ProcessGroup)
        if not (group is None or group is False or is_group):
            raise InputError(f"expected a ProcessGroup, False or None; got {group!r}", argument="group")
        self.alone = not (is_group or (group is None and dist.is_available() and dist.is_initialized()))
        self._group: Any = group or None
        self.rank = 0 if self.alone else dist.get_rank(self._group)
        self._device = torch.device("cpu")
        if not self.alone and "cpu:" not in dist.get_backend_config(self._group):  # as NCCL, which has no other device
            self._device = torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Work of each rank on its own: if it fails on one, that rank raises its error, and the others name it.

        Among several ranks a source without samples is no failure: the work ends there.
        """
        if self.alone:
            yield
            return
        try:
            with suppress(NoRowsError):
                yield
        except BaseException as error:
            with suppress(IgeoodError):  # the rank's own error is the one to see
                self.gather(f"{type(error).__name__}: {error}".encode(errors="replace"))
            raise
        for rank, problem in enumerate(self.gather(b"")):
            if problem:
                raise IgeoodError(f"rank {rank}: {problem.decode()}")

    def check_same(self, text: str, what: str) -> None:
        """Raise on all ranks unless they give the same text."""
        texts = self.gather(text.encode())
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise InputError(f"rank {rank} has another {what} than rank 0", argument="group", cure="give the same")

    def gather_rows(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows of all ranks, in the order of the ranks; a rank without rows may have no columns."""
        parts = [load(part) for part in self.gather(save({name: value.cpu() for name, value in columns.items()}))]
        names = max(parts, key=len)
        return {name: torch.cat([part[name] for part in parts if part]) for name in names}

    def gather(self, content: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of the ranks."""
        if self.alone:
            return [content]
        mine = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()).to(self._device)
        parts = []
        try:
            ranks = range(dist.get_world_size(self._group))
            lengths = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in ranks]
            dist.all_gather(lengths, torch.tensor([len(mine)], device=self._device), group=self._group)
            for rank, length in enumerate(lengths):
                part = mine if rank == self.rank else mine.new_empty(int(length))
                if int(length):
                    dist.broadcast(part, group=self._group, group_src=rank)
                parts.append(part.cpu().numpy().tobytes())
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            problem = f"another rank has died, or was too slow ({reason})"
            raise IgeoodError(problem, argument="group", cure="look at what the other ranks printed") from error
        return parts
