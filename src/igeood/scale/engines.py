"""Where units of work run. An engine starts them, says which are finished, and outlives a worker that dies."""

import multiprocessing
import os
import signal
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from importlib.util import find_spec
from threading import Thread
from typing import Any, Protocol

import torch

from igeood.errors import IgeoodError, InputError, MissingExtraError
from igeood.terminal import Progress

Work = Callable[..., Any]  # of a module, so that a worker can import it
TRIES = 10  # for one unit whose workers die
REACH, ANSWER = 4, 20  # seconds for an address, and for a cluster that is there
DIED = f"its worker died {TRIES} times, perhaps out of memory; make the file smaller, or run fewer --workers"
_SPAWN = multiprocessing.get_context("spawn")


class Engine(Protocol):
    """Runs calls; a handle stands for one that was started."""

    def width(self) -> int:
        """How many calls may be under way."""

    def start(self, *call: Any) -> Any:
        """Start a call of a function with arguments; return its handle."""

    def finished(self, handles: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Wait for one at least; those that ended, each with what it returned, or None if its worker died."""


def choose(engine: str | None, workers: int | None, address: str | None) -> AbstractContextManager[Engine]:
    """The engine that the options name."""
    if address is not None and engine != "ray":
        raise InputError("address: is a Ray cluster's; give --engine ray too")
    if engine == "ray":
        return Ray(address, workers)
    return nullcontext(Here()) if workers is None else Processes(workers)


def run(engine: Engine, work: Work, units: Mapping[str, tuple[Any, ...]], report: Progress) -> dict[str, Any]:
    """Do all units of work, by name with their arguments; return what each returned, or as text why it failed."""
    waiting, deaths, running, outcomes = deque(units), Counter[str](), dict[Any, str](), dict[str, Any]()
    while waiting or running:
        while waiting and len(running) < engine.width():
            name = waiting.popleft()
            running[engine.start(work, *units[name])] = name
        for handle, outcome in engine.finished(list(running)):
            name = running.pop(handle)
            deaths[name] += outcome is None
            if outcome is None and deaths[name] < TRIES:
                waiting.append(name)
                continue
            outcomes[name] = DIED if outcome is None else outcome
            report("files", len(outcomes), len(units))
    return outcomes


def attempt(work: Work, *arguments: Any) -> Any:
    """What a unit of work returns, or as text why it failed: one file does not stop the others."""
    try:
        return work(*arguments)
    except Exception as error:  # noqa: BLE001
        return " ".join(str(error if isinstance(error, (IgeoodError, OSError)) else repr(error)).split())


class Here:
    """The process itself: a call runs when somebody waits for it."""

    def width(self) -> int:
        """One call at a time."""
        return 1

    def start(self, *call: Any) -> Any:
        """The call."""
        return partial(attempt, *call)

    def finished(self, handles: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Run them."""
        return ((handle, handle()) for handle in handles)


class Processes:
    """Several processes, each a pool of its own: who dies takes one file down, and is replaced."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._idle, self._busy = list[ProcessPoolExecutor](), dict[Future[Any], ProcessPoolExecutor]()

    def __enter__(self) -> "Processes":
        self._idle = [_pool() for _ in range(self._workers)]
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for child in multiprocessing.active_children() if kind else ():
            child.terminate()  # a worker then removes what it has half written
        for pool in (*self._idle, *self._busy.values()):
            pool.shutdown(cancel_futures=True)

    def width(self) -> int:
        """One call for each worker."""
        return self._workers

    def start(self, *call: Any) -> Future[Any]:
        """Hand the call to an idle worker."""
        pool, interrupt = self._idle.pop(), signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a new worker inherits
        try:
            future = pool.submit(attempt, *call)
        except BrokenExecutor:  # it died without work
            pool = _pool()
            future = pool.submit(attempt, *call)
        finally:
            signal.signal(signal.SIGINT, interrupt)
        self._busy[future] = pool
        return future

    def finished(self, handles: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Wait for results; a broken pool is replaced."""
        for future in wait(handles, return_when=FIRST_COMPLETED).done:
            pool, is_dead = self._busy.pop(future), isinstance(future.exception(), (BrokenExecutor, SystemExit))
            if is_dead:  # SystemExit: it was asked to stop
                pool.shutdown(wait=False)
            self._idle.append(_pool() if is_dead else pool)
            yield future, None if is_dead else future.result()


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, _SPAWN, _prepare)


def _prepare() -> None:
    """Make a worker one thread that cleans up when it is asked to stop, and ends when its parent dies."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Ray:
    """A Ray cluster: the one at an address, or a local one for the time of the run."""

    def __init__(self, address: str | None = None, workers: int | None = None) -> None:
        if find_spec("ray") is None:
            raise MissingExtraError('engine: needs Ray; pip install "igeood[ray]"')
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._given: dict[str, Any] = {"address": address or "local", "log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            self._given |= {"num_cpus": workers, "include_dashboard": False, "object_store_memory": 100 << 20}
        else:
            _reach(address)
            _check_cluster(self._given)
        import ray  # noqa: PLC0415 (an extra)

        self._ray: Any = ray

    def __enter__(self) -> "Ray":
        self._stdout = redirect_stdout(sys.stderr)  # Ray prints there of workers that die
        self._stdout.__enter__()
        try:
            self._start()
        except BaseException:
            self._stdout.__exit__(None, None, None)
            raise
        self._task = self._ray.remote(num_cpus=1, max_retries=0)(attempt)  # who drives counts the deaths
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()
        self._stdout.__exit__(None, None, None)

    def _start(self, tries: int = 3) -> None:
        """Connect; a local cluster's parts may miss each other where the machine is busy."""
        try:
            self._ray.init(**self._given)
        except Exception as error:
            self._ray.shutdown()
            if tries == 1:
                reason = str(error).partition("\n")[0]
                raise InputError(f"engine: Ray does not start ({reason}); try again, or use --workers") from error
            self._start(tries - 1)

    def width(self) -> int:
        """Two calls for each CPU that the cluster has now: one runs, and one waits."""
        return 2 * max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def start(self, *call: Any) -> Any:
        """Submit a task."""
        return self._task.remote(*call)

    def finished(self, handles: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Wait for tasks."""
        return ((handle, self._outcome(handle)) for handle in self._ray.wait(handles)[0])

    def _outcome(self, handle: Any) -> Any:
        try:
            return self._ray.get(handle)
        except self._ray.exceptions.RayTaskError as error:  # such as a worker without igeood
            return str(error).strip().splitlines()[-1]
        except self._ray.exceptions.RayError:
            return None


def _reach(address: str) -> None:
    """Raise if nothing answers there to the first bytes of HTTP/2, which Ray speaks."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and int(port) < 1 << 16):
        raise InputError(f"address: {address!r} is not HOST:PORT, such as 10.0.0.1:6379; give the cluster's")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACH) as link:
            link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            is_ray = link.recv(1) in (b"\0", b"\x15")  # HTTP/2's settings, or an alert of TLS
        problem = "" if is_ray else "another service answers"
    except OSError as error:
        problem = str(error)
    if problem:
        raise InputError(f"address: no Ray cluster at {address} ({problem}); check it with `ray status`")


def _check_cluster(given: dict[str, Any]) -> None:
    """Raise if another process cannot connect: Ray itself would try for ever, or abort the process that asks."""
    reader, writer = _SPAWN.Pipe(duplex=False)
    probe = _SPAWN.Process(target=_probe, args=(writer, given), daemon=True)
    probe.start()
    writer.close()
    try:
        problem = reader.recv() if reader.poll(ANSWER) else f"no answer in {ANSWER} seconds"
    except EOFError:
        problem = "the connection broke off"
    finally:
        probe.kill()
    if problem:
        cure = "check it with `ray status`, and $RAY_AUTH_TOKEN if it asks for one"
        raise InputError(f"address: no Ray cluster at {given['address']} ({problem}); {cure}")


def _probe(writer: Any, given: dict[str, Any]) -> None:
    """Connect to a cluster, and send what is wrong with it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Ray's logs
    import ray  # noqa: PLC0415 (an extra)

    try:
        ray.init(**given)
    except Exception as error:  # noqa: BLE001
        writer.send(str(error).partition("\n")[0])
    else:
        writer.send("")
