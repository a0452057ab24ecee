"""Requests that wait are judged together, by one thread; a request that finds it idle never waits."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException

from igeood.serve.log import log

AGAIN = {"retry-after": "1"}


@dataclass(eq=False)
class Job:
    """Inputs of one request, and the future of its answer."""

    data: Any
    rows: int
    key: Hashable  # jobs of equal keys can be judged together
    future: "Future[Any]" = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)


class Batcher:
    """A queue of jobs with a limit, and the thread that works on it.

    Parameters
    ----------
    judge : callable
        Gets jobs of one key, and sets the results of their futures.
    max_waiting : int
        Longest queue; further requests are answered with 503.
    max_batch : int
        Most inputs judged together; a larger request is judged alone.
    max_delay : float
        Maximum batching delay under load, in seconds.
    """

    def __init__(self, judge: Callable[[list[Job]], None], max_waiting: int, max_batch: int, max_delay: float) -> None:
        self.judge = judge
        self.max_waiting = max_waiting
        self._max_batch = max_batch
        self._max_delay = max_delay
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._busy_until = 0.0  # jobs that arrive before this moment wait for others
        self._thread = threading.Thread(target=self._work, name="igeood-judge", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, job: Job) -> None:
        """Put a job into the queue."""
        with self._changed:
            if self._is_closed:
                raise HTTPException(503, "the service is stopping; send it to another one", AGAIN)
            if len(self._waiting) >= self.max_waiting:
                self._waiting = deque(waiting for waiting in self._waiting if not waiting.future.cancelled())
            if len(self._waiting) >= self.max_waiting:
                raise HTTPException(503, f"{self.max_waiting} requests are waiting; send it again in a second", AGAIN)
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Finish what waits, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                arrived = self._waiting[0].arrived
                if arrived < self._busy_until:
                    self._changed.wait_for(self._is_full, arrived + self._max_delay - time.monotonic())
                jobs = self._take()
            if jobs:
                self._finish(jobs)
            self._busy_until = time.monotonic() + self._max_delay if len(jobs) > 1 else 0.0

    def _is_full(self) -> bool:
        return self._is_closed or len(self._waiting) >= self._max_batch

    def _take(self) -> list[Job]:
        """The next jobs of one key, in order; jobs of clients that have gone are dropped."""
        jobs: list[Job] = []
        others: deque[Job] = deque()
        rows = 0
        for job in self._waiting:
            if jobs and (job.key != jobs[0].key or rows + job.rows > self._max_batch):
                others.append(job)
            elif job.future.set_running_or_notify_cancel():
                jobs.append(job)
                rows += job.rows
        self._waiting = others
        return jobs

    def _finish(self, jobs: list[Job]) -> None:
        """Judge jobs together; if that fails, each alone, so that none spoils another."""
        try:
            self.judge(jobs)
        except Exception as error:  # noqa: BLE001 (those who wait have to know, and judging goes on)
            pending = [job for job in jobs if not job.future.done()]
            if not pending:
                log.exception("what was judged could not be counted")
            elif len(jobs) == 1:
                jobs[0].future.set_exception(error)
            else:
                for job in pending:
                    self._finish([job])
