"""The service's addresses: what is asked, and what is answered."""

import asyncio
import hmac
import logging
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from hashlib import sha256
from importlib.resources import files
from typing import Any, TypeVar

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from igeood.serve.batching import Job
from igeood.serve.log import say
from igeood.serve.protocol import LENGTH, Problem, read_infer, read_rows, write_infer, write_rows
from igeood.serve.protocol import Request as Asked
from igeood.serve.service import Service
from igeood.version import __version__

JSON = {"content-type": "application/json"}
TYPES = ("application/json", "application/octet-stream")
CHALLENGE = {"www-authenticate": 'Basic realm="igeood"'}  # a browser asks for a password: the key
OPEN = ("/v2/health/live", "/v2/health/ready")  # for those who watch over processes, without a key
T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Any]]
log = logging.getLogger("igeood")
HELD = 16  # bodies of the largest size that are held at a time, in all
LARGE = 1 << 18  # bytes of a body that are parsed in a thread of their own


def make_app(service: Service, *, keys: Sequence[str] = (), max_body: int = 16_000_000, quiet: bool = False) -> ASGIApp:
    """The ASGI application of a service.

    Parameters
    ----------
    service : Service
        What judges.
    keys : sequence of str
        One of them is needed for everything but health; without any, none.
    max_body : int
        Bytes of a body.
    quiet : bool
        Write no access log.
    """
    addresses = _Addresses(service, max_body)
    handlers = {Problem: _problem, HTTPException: _http_problem, Exception: _fault}
    routes = [
        Route(path, _answering(getattr(addresses, name)), methods=[method], name=name)
        for path, method, name in ADDRESSES
    ]
    app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    judging = {"/predict": addresses.predict, f"/v2/models/{service.name}/infer": addresses.infer}
    return _Door(app, service, keys, judging, quiet=quiet)


MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version}"
ADDRESSES = (
    (f"{MODEL}/infer", "POST", "infer"), ("/predict", "POST", "predict"), (f"{VERSION}/infer", "POST", "infer"),
    ("/v2/health/live", "GET", "live"), ("/v2/health/ready", "GET", "ready"), ("/v2", "GET", "server"),
    (MODEL, "GET", "model"), (f"{MODEL}/ready", "GET", "model_ready"), (VERSION, "GET", "model"),
    (f"{VERSION}/ready", "GET", "model_ready"), ("/", "GET", "page"), ("/status", "GET", "status"),
    ("/metrics", "GET", "metrics"), ("/openapi.json", "GET", "openapi"),
    ("/monitor/acknowledge", "POST", "acknowledge"),
)  # fmt: skip


class _Addresses:
    """A method for each address."""

    def __init__(self, service: Service, max_body: int) -> None:
        self.service, self.max_body, self._one_large = service, max_body, asyncio.Semaphore(1)
        page = (files("igeood.serve") / "page.html").read_text(encoding="utf-8")
        inline = re.findall(r"<(script|style)>(.*?)</\1>", page, re.S)
        hashes = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for _, text in inline)
        policy = f"default-src 'none'; connect-src 'self'; img-src data:; script-src {hashes}; style-src {hashes}"
        self._page = page.encode(), {"content-type": "text/html; charset=utf-8", "content-security-policy": policy}
        self._openapi = (files("igeood.serve") / "openapi.json").read_bytes().replace(b"0.0.0", __version__.encode())

    async def infer(self, request: Request) -> Response:
        """Judge the tensors of a request."""
        self._check_model(request)
        body = await self._body(request)
        asked = await self._done(len(body), read_infer, body, request.headers.get(LENGTH))
        columns = await self._judged(request, asked, len(body))
        body, headers = await self._done(len(body), write_infer, asked, self.service.name, columns)
        return Response(body, headers=headers)

    async def predict(self, request: Request) -> Response:
        """Judge rows of plain JSON."""
        body = await self._body(request)
        asked = await self._done(len(body), read_rows, body, self.service.served.default)
        columns = await self._judged(request, asked, len(body))
        return Response(await self._done(len(body), write_rows, columns), headers=JSON)

    async def _judged(self, request: Request, asked: Asked, size: int) -> dict[str, Any]:
        """What the guard says, by the names of outputs."""
        served = self.service.served
        try:
            data, key = await self._done(size, served.admit, asked)
            job = Job(data, len(data), (served, key), asked.refuses, asyncio.get_running_loop().create_future())
            self.service.batcher.submit(job)
            columns: dict[str, Any] = await job.future
        except Problem as problem:
            if problem.status == 400:
                self.service.watch.rejected += max(map(len, asked.inputs.values()), default=0)
            raise
        request.scope["igeood"] = {"inputs": job.rows, "ood": int(columns["is_ood"].sum())}
        return columns

    async def _done(self, size: int, work: Callable[..., T], *args: Any) -> T:
        """What work for a body of this size returns; for large ones in a thread, one at a time: others do not wait."""
        if size < LARGE:
            return work(*args)
        async with self._one_large:
            return await asyncio.to_thread(work, *args)

    async def _body(self, request: Request) -> bytes:
        """The body, once it is of a type that is read, and no longer than allowed."""
        kind = request.headers.get("content-type", TYPES[0]).partition(";")[0].strip().lower()
        if kind not in TYPES:
            raise Problem(415, f"content-type: {kind} is not read; send application/json (curl --json)")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Problem(415, "content-encoding: bodies are not unpacked; send it as it is")
        parts, size = [], 0
        too_long = Problem(413, f"body: is longer than {self.max_body} bytes; send fewer rows", {"connection": "close"})
        if (length := request.headers.get("content-length", "0")).isdecimal() and int(length) > self.max_body:
            raise too_long
        async for part in request.stream():
            size += len(part)
            self.service.held += len(part)
            request.scope["igeood.held"] = size
            if size > self.max_body:
                raise too_long
            if self.service.held > HELD * self.max_body:
                problem = f"{HELD} bodies of the largest size are held already; send it again in a second"
                raise Problem(503, problem, {"retry-after": "1"})
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_model(self, request: Request) -> None:
        given = {"model": self.service.name, "version": "1", **request.path_params}  # none where the router was skipped
        name, version = given["model"], given["version"]
        if name != self.service.name or version != "1":
            raise Problem(404, f"model: no {name!r}, version {version}; there is {self.service.name!r}, version 1")

    async def live(self, _: Request) -> Any:
        """The process answers."""
        return {"live": True}

    async def ready(self, _: Request) -> Any:
        """The guard is loaded, and the service goes on."""
        if self.service.is_stopping:
            raise Problem(503, "the service is stopping; send requests to another one")
        return {"ready": True}

    async def server(self, _: Request) -> Any:
        """Metadata of the server."""
        return {"name": "igeood", "version": __version__, "extensions": ["binary_tensor_data"]}

    async def model(self, request: Request) -> Any:
        """Metadata of the model: its tensors."""
        self._check_model(request)
        served = self.service.served
        about = {"name": self.service.name, "versions": ["1"], "platform": "igeood"}
        return {**about, "inputs": served.tensors(), "outputs": served.outputs()}

    async def model_ready(self, request: Request) -> Any:
        """The model is loaded, and the service goes on."""
        self._check_model(request)
        return {"name": self.service.name, **await self.ready(request)}

    async def page(self, _: Request) -> Response:
        """The page for people."""
        return Response(self._page[0], headers=self._page[1])

    async def status(self, _: Request) -> Any:
        """What the page shows."""
        return await asyncio.to_thread(self.service.record)

    async def metrics(self, _: Request) -> Response:
        """For Prometheus."""
        text = await asyncio.to_thread(self.service.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def openapi(self, _: Request) -> Response:
        """The OpenAPI document."""
        return Response(self._openapi, headers=JSON)

    async def acknowledge(self, _: Request) -> Any:
        """Forget the monitor's alarms."""
        return {"acknowledged": self.service.watch.acknowledge()}


async def _sent(endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without a router: half of a small request's time would be its."""
    request = Request(scope, receive)
    try:
        response = await endpoint(request)
    except Problem as problem:
        response = await _problem(request, problem)
    except (ClientDisconnect, asyncio.CancelledError):
        raise
    except Exception as error:
        log.exception("a request failed")
        response = await _fault(request, error)
    await response(scope, receive, send)


def _answering(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose plain results are answered as JSON."""

    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        result = await endpoint(request)
        return result if isinstance(result, Response) else Response(orjson.dumps(result), headers=JSON)

    return answer


async def _problem(request: Request, problem: Problem) -> Response:
    request.scope["igeood"] = {"error": problem.message}  # for the log
    return Response(orjson.dumps({"error": problem.message}), problem.status, headers={**JSON, **problem.headers})


async def _http_problem(request: Request, error: HTTPException) -> Response:
    methods = (error.headers or {}).get("Allow", "another method").replace("HEAD, ", "").replace(", HEAD", "")
    what = {404: "there is no such address; /openapi.json lists them", 405: f"this address takes {methods}"}
    message = f"{request.method} {request.url.path}: {what.get(error.status_code, error.detail)}"
    return await _problem(request, Problem(error.status_code, message, error.headers))


async def _fault(request: Request, error: Exception) -> Response:
    return await _problem(request, Problem(500, f"the service failed: {type(error).__name__}; its log says more"))


def _is_foreign(scope: Scope) -> bool:
    """Whether a page of another site, in a browser here, sends a request; to follow its links is allowed."""
    is_link = (b"sec-fetch-mode", b"navigate") in scope["headers"] and scope["method"] == "GET"
    sent_by = next((value for name, value in scope["headers"] if name == b"sec-fetch-site"), b"")
    return sent_by in (b"cross-site", b"same-site") and not is_link


class _Door:
    """Lets in who has a key; counts and logs every request."""

    def __init__(
        self, app: ASGIApp, service: Service, keys: Sequence[str], judging: Mapping[str, Endpoint], *, quiet: bool
    ) -> None:
        self._app, self._service, self._judging, self._quiet = app, service, judging, quiet
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start, status = time.perf_counter(), 499  # the client has gone

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, message = message["status"], self._marked(message)
            await send(message)

        try:
            if _is_foreign(scope):
                refusal = Problem(403, "sec-fetch-site: requests from other sites' pages are not answered")
                await (await _problem(Request(scope), refusal))(scope, receive, sending)
            elif scope["path"] not in OPEN and not self._may_enter(scope):
                refusal = Problem(401, "key: missing or wrong; send `Authorization: Bearer KEY`", CHALLENGE)
                await (await _problem(Request(scope), refusal))(scope, receive, sending)
            elif (judge := self._judging.get(scope["path"])) and scope["method"] == "POST":
                scope["endpoint"] = judge
                await _sent(judge, scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        except ClientDisconnect:
            pass
        finally:
            self._service.held -= scope.get("igeood.held", 0)
            self._note(scope, status, time.perf_counter() - start)
        return None

    def _marked(self, start: Message) -> Message:
        """The start of a response: while the service stops, it says that the connection ends."""
        ending = [(b"connection", b"close")] if self._service.is_stopping else []
        return {**start, "headers": [*start["headers"], *ending]}

    def _may_enter(self, scope: Scope) -> bool:
        """Whether a key is sent that is one of ours, as bearer token or as a password; compared in constant time."""
        if not self._keys:
            return True
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        if scheme.lower() == b"basic":
            with suppress(ValueError):
                key = b64decode(key).partition(b":")[2]
        return sum(hmac.compare_digest(key.strip(), ours) for ours in self._keys) > 0  # all of them: in constant time

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        name = getattr(scope.get("endpoint"), "__name__", "other") if status != 401 else "other"
        self._service.watch.answered(name, status, seconds)
        if not self._quiet:
            client = scope.get("client") or ("", 0)
            say("request", client=client[0], method=scope["method"], path=scope["path"], status=status,
                ms=round(1e3 * seconds, 3), **scope.get("igeood", {}))  # fmt: skip
