"""The ranks of a process group: each has its own shard, all get the same result. Tensors travel, never pickles."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from igeood.errors import IgeoodError, InputError
from igeood.model.batches import NoRowsError

Group = dist.ProcessGroup | Literal[False] | None


class Ranks:
    """The processes that share a step's data: those of a `torch.distributed` group, or this one alone.

    Parameters
    ----------
    group : ProcessGroup, False or None
        None is the default group, where one is initialised; False is this process alone.
    """

    def __init__(self, group: Group = None) -> None:
        self.group: Any = group or None
        self.rank, self.size, self.device = 0, 1, torch.device("cpu")
        is_group = dist.is_available() and isinstance(group, dist.ProcessGroup)
        if not (group is None or group is False or is_group):
            raise InputError(f"group: expected a ProcessGroup that has this rank, False or None; got {group!r}")
        if is_group or (group is None and dist.is_available() and dist.is_initialized()):
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
            if "cpu:" not in dist.get_backend_config(self.group):  # as NCCL, which has no other device
                self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def alone(self) -> bool:
        """Whether there is nobody to exchange anything with."""
        return self.size == 1

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Work of each rank on its own: if it fails on one, that rank raises its error, and the others name it.

        Among several ranks a source without any batch is no failure: the work ends there, and changes nothing.
        """
        if self.alone:
            yield
            return
        try:
            with suppress(NoRowsError):
                yield
        except BaseException as error:
            with suppress(IgeoodError):  # the rank's own error is the one to see
                self.texts(" ".join(f"{type(error).__name__}: {error}".split()))
            raise
        for rank, problem in enumerate(self.texts("")):
            if problem:
                raise IgeoodError(f"rank {rank}: {problem}")

    def check_same(self, mine: str, what: str) -> None:
        """Raise on all ranks unless they give the same text."""
        texts = [mine] if self.alone else self.texts(mine)
        other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
        if other is not None:
            raise InputError(f"group: rank {other} has other {what} than rank 0; give all ranks the same")

    def each(self, mine: Tensor) -> Iterator[Tensor]:
        """Every rank's tensor (n,), in the order of the ranks, of one type and any lengths; held one at a time."""
        if self.alone:
            yield mine
            return
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        self._run(dist.all_gather, lengths, torch.tensor([len(mine)], device=self.device))
        for rank, length in enumerate(lengths):
            part = mine.detach() if rank == self.rank else mine.new_empty(int(length))
            part = part.to(self.device).contiguous()
            if len(part):
                self._run(dist.broadcast, part, group_src=rank)
            yield part.to(mine.device)

    def joined(self, mine: Tensor) -> Tensor:
        """The tensors (n,) of all ranks, one after the other."""
        return mine if self.alone else torch.cat([*self.each(mine)])

    def each_bytes(self, mine: bytes) -> Iterator[bytes]:
        """Every rank's bytes, in the order of the ranks."""
        for part in self.each(torch.from_numpy(np.frombuffer(mine, dtype=np.uint8).copy())):
            yield part.numpy().tobytes()

    def texts(self, mine: str) -> list[str]:
        """Every rank's text."""
        return [part.decode() for part in self.each_bytes(mine.encode(errors="replace"))]

    def first(self, mine: Any) -> Any:
        """The first rank's JSON value that is not empty."""
        return mine if self.alone else next(filter(None, map(json.loads, self.texts(json.dumps(mine)))), mine)

    def _run(self, operation: Callable[..., Any], *tensors: Any, **options: Any) -> None:
        try:
            operation(*tensors, group=self.group, **options)
        except RuntimeError as error:
            cure = "look at what the other ranks printed; slow ones need init_process_group(timeout=...)"
            reason = str(error).partition("\n")[0]
            raise IgeoodError(f"group: another rank has died, or was too slow ({reason}); {cure}") from error
