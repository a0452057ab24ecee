"""Where units of work run: in this process, in several, or on a Ray cluster. A worker that dies is replaced."""

import logging
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from contextlib import redirect_stdout
from functools import partial
from threading import Thread
from typing import Any

import torch

from igeood.errors import IgeoodError, InputError, import_extra

Work = Callable[..., Any]  # of a module, or a partial one, so that a worker can import it
Units = Mapping[str, tuple[Any, ...]]  # arguments by name
Engine = Callable[[Work, Units], Iterator[tuple[str, Any]]]  # what each unit returned, or its error, as they end
TRIES = 10  # for one unit whose workers die


def choose(engine: str | None, workers: int | None, address: str | None) -> Engine:
    """The engine that the options name."""
    if engine == "ray":
        import_extra("ray", "ray")
        return partial(on_ray, address, workers)
    if address is not None:
        raise InputError("is a Ray cluster's", argument="address", cure="give {engine=ray} too")
    return here if workers is None else partial(in_processes, workers)


def attempt(work: Work, *arguments: Any) -> Any:
    """What a unit of work returns, or the error by which it failed: one file does not stop the others."""
    try:
        return work(*arguments)
    except IgeoodError as error:
        return error
    except Exception as error:  # noqa: BLE001
        return InputError(str(error) if isinstance(error, OSError) else repr(error))


def here(work: Work, units: Units) -> Iterator[tuple[str, Any]]:
    """Run units in this process, one after another."""
    return ((name, attempt(work, *arguments)) for name, arguments in units.items())


def in_processes(workers: int, work: Work, units: Units) -> Iterator[tuple[str, Any]]:
    """Run units in processes, each a pool of its own: one that dies takes one unit down, which is tried again."""
    pools = [_pool() for _ in range(min(workers, len(units)))]
    waiting = deque((name, TRIES) for name in units)
    running: dict[Future[Any], tuple[str, int, ProcessPoolExecutor]] = {}
    try:
        while waiting or running:
            while waiting and pools:
                name, tries = waiting.popleft()
                pool = pools.pop()
                running[pool.submit(attempt, work, *units[name])] = name, tries, pool
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, tries, pool = running.pop(future)
                is_dead = future.exception() is not None
                pools.append(_pool() if is_dead else pool)
                if is_dead and tries > 1:
                    waiting.append((name, tries - 1))
                else:
                    cure = "make the file smaller, or run fewer {workers}"
                    yield name, InputError(f"its worker died {TRIES} times", cure=cure) if is_dead else future.result()
    finally:
        for _, _, pool in running.values():
            for process in list(pool._processes.values()):  # from Python 3.14 on: terminate_workers
                process.terminate()  # it then removes what it has half written
            pools.append(pool)
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare)


def _prepare() -> None:
    """Make a worker one thread that cleans up when it is asked to stop, and ends when its parent dies."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    Thread(target=_follow, args=[multiprocessing.parent_process()], daemon=True).start()


def _follow(parent: Any) -> None:
    parent.join()
    os._exit(1)


def on_ray(address: str | None, workers: int | None, work: Work, units: Units) -> Iterator[tuple[str, Any]]:
    """Run units on the Ray cluster at an address, or on a local one. Errors are Ray's own; it replaces workers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray  # noqa: PLC0415 (an extra)

    local: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": 100 << 20}
    with redirect_stdout(sys.stderr):  # Ray prints there of workers that die
        try:
            ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **({} if address else local))
        except Exception as error:
            raise InputError(f"Ray says {str(error).partition(chr(10))[0]!r}", argument="engine") from error
        try:
            task = ray.remote(num_cpus=1, max_retries=TRIES - 1)(attempt)
            futures = {task.remote(work, *arguments).future(): name for name, arguments in units.items()}
            for future in as_completed(futures):
                failure = future.exception()
                yield futures[future], InputError(str(failure).splitlines()[-1]) if failure else future.result()
        finally:
            ray.shutdown()
