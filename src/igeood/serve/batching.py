"""Requests that wait are judged together, by one thread; a request that finds it idle never waits."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from igeood.serve.protocol import Problem

log = logging.getLogger("igeood")


@dataclass(eq=False)
class Job:
    """Inputs of one request, and who waits for them."""

    data: Any
    rows: int
    key: Hashable  # jobs of equal keys can be judged together
    refuses: bool
    future: "asyncio.Future[Any]"
    arrived: float = field(default_factory=time.monotonic)


class Batcher:
    """A queue of jobs with a limit, and the thread that works on it.

    Parameters
    ----------
    judge : callable
        Gets jobs of one key; returns a result or an exception for each, and what is to be done after the answers.
    max_waiting : int
        Requests that may wait; further ones are told to come again.
    max_batch : int
        Inputs that are judged together at most; a larger request is judged alone.
    max_delay : float
        Seconds that a request may wait for others, while requests come faster than they are judged.
    """

    def __init__(
        self, judge: Callable[[Sequence[Job]], tuple[Sequence[Any], Callable[[], None]]], *, max_waiting: int,
        max_batch: int, max_delay: float,
    ) -> None:  # fmt: skip
        self._judge, self.max_waiting, self._max_batch, self._max_delay = judge, max_waiting, max_batch, max_delay
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._joined, self._ended, self._is_closed = 0, 0.0, False  # jobs of the last batch, and when it was judged
        self._thread = threading.Thread(target=self._work, name="igeood-judge", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Put a job into the queue."""
        with self._changed:
            if self._is_closed:
                raise Problem(503, "the service is stopping; send it to another one", {"retry-after": "1"})
            if len(self._waiting) >= self.max_waiting:
                self._waiting = deque(waiting for waiting in self._waiting if not waiting.future.done())
            if len(self._waiting) >= self.max_waiting:
                problem = f"{self.max_waiting} requests are waiting already; send it again in a second"
                raise Problem(503, problem, {"retry-after": "1"})
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Finish what waits, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _take(self) -> list[Job]:
        """The next jobs of one key, in order; none at the end."""
        with self._changed:
            while True:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                if self._joined > 1 and self._waiting and self._waiting[0].arrived < self._ended + self._max_delay:
                    self._await_others(self._waiting[0].arrived + self._max_delay)
                jobs = self._first_jobs()
                if jobs or (self._is_closed and not self._waiting):
                    self._joined = len(jobs)
                    return jobs

    def _first_jobs(self) -> list[Job]:
        """Jobs that can be judged together, taken from the queue; those that nobody waits for any more are dropped."""
        jobs: list[Job] = []
        rows, others = 0, deque[Job]()
        for job in self._waiting:
            if job.future.done():
                continue
            if jobs and (job.key != jobs[0].key or rows + job.rows > self._max_batch):
                others.append(job)
            else:
                jobs.append(job)
                rows += job.rows
        self._waiting = others
        return jobs

    def _await_others(self, end: float) -> None:
        """Let further jobs come, up to a moment: the last ones were several, just now."""
        while len(self._waiting) < self._max_batch and not self._is_closed and (left := end - time.monotonic()) > 0:
            self._changed.wait(left)

    def _work(self) -> None:
        while jobs := self._take():
            results: Sequence[Any] = []
            afterwards: Callable[[], None] = _nothing
            try:
                results, afterwards = self._judge(jobs)
            except Exception as error:  # noqa: BLE001 (whatever it is, those who wait have to know)
                results = [error] * len(jobs)
            with suppress(RuntimeError):  # the loop was closed under it
                jobs[0].future.get_loop().call_soon_threadsafe(_deliver, jobs, results)
            self._ended = time.monotonic()
            try:
                afterwards()
            except Exception:  # (a full disk, for example: judging goes on)
                log.exception("what was judged could not be noted")


def _nothing() -> None:
    """What is to be done after a failure."""


def _deliver(jobs: Sequence[Job], results: Sequence[Any]) -> None:
    for job, result in zip(jobs, results, strict=True):
        if job.future.done():  # its client has gone
            continue
        if isinstance(result, Exception):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)
