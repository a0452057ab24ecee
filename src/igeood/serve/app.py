"""The service's addresses: what is asked, and what is answered."""

import asyncio
import hmac
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from importlib.resources import files
from typing import Any, ClassVar

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from igeood.errors import IgeoodError
from igeood.serve.batching import AGAIN
from igeood.serve.log import log, say
from igeood.serve.protocol import JSON, LENGTH, Columns, Query, Written, read_infer, read_rows, write_infer, write_rows
from igeood.serve.service import Service
from igeood.version import __version__

TYPES = ("application/json", "application/octet-stream")
CHALLENGE = {"www-authenticate": 'Basic realm="igeood"'}  # a browser asks for a password: the key
OPEN = ("/v2/health/live", "/v2/health/ready")  # for those who watch over processes, without a key
HELD = 16  # bodies of the largest size that are held at a time, in all
LARGE = 1 << 18  # bytes of a body that is read in a thread
LONGEST = 500  # characters of a message: it may quote what was sent
MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version}"
Handler = Callable[["App", Request], Awaitable[Any]]


class App:
    """The ASGI application of a service: a method for each address.

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

    def __init__(
        self, service: Service, *, keys: Sequence[str] = (), max_body: int = 16_000_000, quiet: bool = False
    ) -> None:
        self._service = service
        self._keys = [key.encode() for key in keys]
        self._max_body = max_body
        self._quiet = quiet
        self._held = 0  # bytes of bodies
        self._reader = ThreadPoolExecutor(1, "igeood-reader")  # one large body at a time: others do not wait
        names = {"model": service.name, "version": 1}
        self._routes = {path.format(**names): route for path, route in self.ROUTES.items()}
        self._page = _page()
        document = (files("igeood.serve") / "openapi.json").read_bytes()
        self._openapi = Response(document.replace(b"0.0.0", __version__.encode()), headers=JSON)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, count it and log it."""
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])  # as ASGI has it: the server goes on without lifespan
        start = time.perf_counter()
        status = 499  # the client has gone
        try:
            response = await self._respond(Request(scope, receive))
            if self._service.is_stopping:
                response.headers["connection"] = "close"
            status = response.status_code
            await response(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            self._held -= scope.get("igeood.held", 0)
            self._note(scope, status, time.perf_counter() - start)

    async def _respond(self, request: Request) -> Response:
        """The answer to a request; an error of the library is one of what was sent."""
        try:
            result = await self._route(request)(self, request)
            return result if isinstance(result, Response) else Response(orjson.dumps(result), headers=JSON)
        except ClientDisconnect:
            raise
        except HTTPException as error:
            problem = error
        except IgeoodError as error:
            problem = HTTPException(400, str(error))
        except Exception as error:  # noqa: BLE001 (one request's failure is not the service's end)
            log.exception("a request failed")
            problem = HTTPException(500, f"the service failed: {type(error).__name__}; its log says more")
        message = problem.detail
        if len(message) > LONGEST:
            message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"  # the place, and the cure
        request.scope["igeood"] = {"error": message}  # for the log
        headers = {**JSON, **(problem.headers or {})}
        return Response(orjson.dumps({"error": message}), problem.status_code, headers)

    def _route(self, request: Request) -> Handler:
        """The method of an address, for those who may call it."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")).rstrip("/") or "/"
        if _is_foreign(request):
            raise HTTPException(403, "sec-fetch-site: requests from other sites' pages are not answered")
        if path not in OPEN and not self._has_key(request):
            raise HTTPException(401, "key: missing or wrong; send `Authorization: Bearer KEY`", CHALLENGE)
        if path not in self._routes:
            known = f"the model is {self._service.name!r}, version 1; /openapi.json lists all"
            raise HTTPException(404, f"{request.method} {path}: there is no such address; {known}")
        method, handler = self._routes[path]
        request.scope["igeood.name"] = handler.__name__
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            raise HTTPException(405, f"{request.method} {path}: this address takes {method}", {"allow": method})
        return handler

    def _has_key(self, request: Request) -> bool:
        """Whether one of the keys is sent, as bearer token or as password; compared in constant time."""
        scheme, _, key = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        if scheme.lower() == b"basic":
            with suppress(ValueError):
                key = b64decode(key).partition(b":")[2]
        matches = [hmac.compare_digest(key.strip(), ours) for ours in self._keys]
        return any(matches) or not self._keys

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        name = scope.get("igeood.name", "other")
        self._service.watch.requests.labels(name, str(status)).inc()
        self._service.watch.seconds.labels(name).observe(seconds)
        if not self._quiet:
            client = (scope.get("client") or [""])[0]
            about = {"client": client, "method": scope["method"], "path": scope["path"], "status": status}
            say("request", **about, ms=round(1e3 * seconds, 3), **scope.get("igeood", {}))

    async def infer(self, request: Request) -> Response:
        """Judge the tensors of a request."""
        read = partial(read_infer, length=request.headers.get(LENGTH))
        return await self._judge(request, read, partial(write_infer, self._service.name))

    async def predict(self, request: Request) -> Response:
        """Judge rows of plain JSON."""
        return await self._judge(request, partial(read_rows, default=self._service.served.default), write_rows)

    async def _judge(
        self, request: Request, read: Callable[[bytearray], Query], write: Callable[[Query, Columns], Written]
    ) -> Response:
        """From a body to data, to a verdict, and to an answer."""
        body = await self._body(request)
        run = self._in_thread if len(body) > LARGE else _at_once
        query = await run(read, body)
        try:
            job = await run(self._service.served.admit, query)
            self._service.batcher.submit(job)
            columns = await asyncio.wrap_future(job.future)
            content, headers = await run(write, query, columns)
        except IgeoodError:
            rows = max(map(len, query.inputs.values()), default=0)
            self._service.watch.counts["rejected"].inc(rows)
            raise
        request.scope["igeood"] = {"inputs": job.rows, "ood": sum(columns["is_ood"])}
        return Response(content, headers=headers)

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reader, work, *args)

    async def _body(self, request: Request) -> bytearray:
        """The body, if it is of a type that is read, and no longer than allowed."""
        media_type = request.headers.get("content-type", TYPES[0]).partition(";")[0].strip().lower()
        if media_type not in TYPES:
            raise HTTPException(415, f"content-type: {media_type} is not read; send application/json (curl --json)")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "content-encoding: bodies are not unpacked; send it as it is")
        too_long = HTTPException(
            413, f"body: longer than {self._max_body} bytes; send fewer rows", {"connection": "close"}
        )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            raise too_long
        body = bytearray()
        async for part in request.stream():
            body += part
            self._held += len(part)
            request.scope["igeood.held"] = len(body)
            if len(body) > self._max_body:
                raise too_long
            if self._held > HELD * self._max_body:
                raise HTTPException(503, "too many large bodies are held; send it again in a second", AGAIN)
        return body

    async def live(self, _: Request) -> Any:
        """The process answers."""
        return {"live": True}

    async def ready(self, _: Request) -> Any:
        """The guard is loaded, and the service goes on."""
        if self._service.is_stopping:
            raise HTTPException(503, "the service is stopping; send requests to another one")
        return {"ready": True}

    async def server(self, _: Request) -> Any:
        """Metadata of the server."""
        return {"name": "igeood", "version": __version__, "extensions": ["binary_tensor_data"]}

    async def model(self, _: Request) -> Any:
        """Metadata of the model: its tensors."""
        served = self._service.served
        about = {"name": self._service.name, "versions": ["1"], "platform": "igeood"}
        return {**about, "inputs": served.describe_inputs(), "outputs": served.describe_outputs()}

    async def model_ready(self, request: Request) -> Any:
        """The model is loaded, and the service goes on."""
        return {"name": self._service.name, **await self.ready(request)}

    async def page(self, _: Request) -> Any:
        """The page for people."""
        return self._page

    async def status(self, _: Request) -> Any:
        """What the page shows."""
        return await asyncio.to_thread(self._service.record)

    async def metrics(self, _: Request) -> Any:
        """For Prometheus."""
        text = await asyncio.to_thread(self._service.watch.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def openapi(self, _: Request) -> Any:
        """The OpenAPI document."""
        return self._openapi

    async def acknowledge(self, _: Request) -> Any:
        """Forget the monitor's alarms."""
        return {"acknowledged": self._service.watch.acknowledge()}

    ROUTES: ClassVar[dict[str, tuple[str, Handler]]] = {
        "/": ("GET", page),
        "/predict": ("POST", predict),
        "/status": ("GET", status),
        "/metrics": ("GET", metrics),
        "/openapi.json": ("GET", openapi),
        "/monitor/acknowledge": ("POST", acknowledge),
        "/v2": ("GET", server),
        "/v2/health/live": ("GET", live),
        "/v2/health/ready": ("GET", ready),
        MODEL: ("GET", model),
        f"{MODEL}/ready": ("GET", model_ready),
        f"{MODEL}/infer": ("POST", infer),
        VERSION: ("GET", model),
        f"{VERSION}/ready": ("GET", model_ready),
        f"{VERSION}/infer": ("POST", infer),
    }


def _page() -> Response:
    """The page for people, with a policy that lets nothing in but its own script and style."""
    text = (files("igeood.serve") / "page.html").read_text(encoding="utf-8")
    inline = re.findall(r"<(script|style)>(.*?)</\1>", text, re.S)
    hashes = " ".join(f"'sha256-{b64encode(sha256(part.encode()).digest()).decode()}'" for _, part in inline)
    policy = f"default-src 'none'; connect-src 'self'; img-src data:; script-src {hashes}; style-src {hashes}"
    return Response(text, headers={"content-type": "text/html; charset=utf-8", "content-security-policy": policy})


async def _at_once(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


def _is_foreign(request: Request) -> bool:
    """Whether a page of another site, in a browser, sends a request; to follow its links is allowed."""
    is_link = request.headers.get("sec-fetch-mode") == "navigate" and request.method == "GET"
    return request.headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_link
