"""The service's addresses: what is asked, and what is answered."""

import asyncio
import hmac
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.resources import files
from typing import Any, ClassVar

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from igeood.errors import IgeoodError
from igeood.serve.log import log, say
from igeood.serve.protocol import JSON, LENGTH, Columns, Query, read_infer, read_rows, write_infer, write_rows
from igeood.serve.service import Service
from igeood.version import __version__

TYPES = ("application/json", "application/octet-stream")
CHALLENGE = {"www-authenticate": 'Basic realm="igeood"'}  # a browser asks for a password: the key
OPEN = ("/v2/health/live", "/v2/health/ready")  # for those who watch over processes, without a key
LONGEST = 500  # characters of a message: it may quote what was sent
MODEL = "/v2/models/{model}"
Handler = Callable[["App", Request], Awaitable[Any]]


class App:
    """The ASGI application of a service: a method for each address.

    Parameters
    ----------
    service : Service
        What gives verdicts.
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
        self._name = service.options.name
        self._keys = [key.encode() for key in keys]
        self._max_body = max_body
        self._quiet = quiet
        models = (self._name, f"{self._name}/versions/1")
        self._routes = {path.format(model=model): route for path, route in self.ROUTES.items() for model in models}
        self._page = _page()
        document = (files("igeood.serve") / "openapi.json").read_bytes()
        self._openapi = Response(document.replace(b"0.0.0", __version__.encode()), headers=JSON)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, count it and log it."""
        start = time.perf_counter()
        response = await self._respond(Request(scope, receive))
        if self._service.is_stopping:
            response.headers["connection"] = "close"
        await response(scope, receive, send)
        seconds = time.perf_counter() - start
        name = scope.get("igeood.name", "other")
        self._service.metrics.requests.labels(name, str(response.status_code)).inc()
        self._service.metrics.seconds.labels(name).observe(seconds)
        if not self._quiet:
            about = {"client": (scope.get("client") or [""])[0], "method": scope["method"], "path": scope["path"]}
            figures = {"status": response.status_code, "ms": round(1e3 * seconds, 3)}
            say("request", **about, **figures, **scope.get("igeood", {}))

    async def _respond(self, request: Request) -> Response:
        """The answer to a request; an error of the library is one of what was sent."""
        try:
            result = await self._route(request)(self, request)
            return result if isinstance(result, Response) else Response(orjson.dumps(result), headers=JSON)
        except ClientDisconnect:
            problem = HTTPException(499, "the client has gone")
        except HTTPException as error:
            problem = error
        except IgeoodError as error:
            problem = HTTPException(400, str(error))
        except Exception as error:  # noqa: BLE001 (one request's failure is not the service's end)
            log.exception("a request failed")
            problem = HTTPException(500, f"the service failed: {type(error).__name__}; its log says more")
        content = {"error": problem.detail[:LONGEST]}
        request.scope["igeood"] = content  # for the log
        return Response(orjson.dumps(content), problem.status_code, {**JSON, **(problem.headers or {})})

    def _route(self, request: Request) -> Handler:
        """The method of an address, for those who may call it."""
        path = request.scope["path"].rstrip("/") or "/"
        is_link = request.headers.get("sec-fetch-mode") == "navigate" and request.method == "GET"
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_link:
            raise HTTPException(403, "sec-fetch-site: requests from other sites' pages are not answered")
        if path not in OPEN and not self._has_key(request):
            raise HTTPException(401, "key: missing or wrong; send `Authorization: Bearer KEY`", CHALLENGE)
        if path not in self._routes:
            raise HTTPException(404, f"{path}: no such address; the model is {self._name!r}, see /openapi.json")
        method, handler = self._routes[path]
        request.scope["igeood.name"] = handler.__name__
        if request.method != method and (request.method, method) != ("HEAD", "GET"):
            raise HTTPException(405, f"{path}: this address takes {method}", {"allow": method})
        return handler

    def _has_key(self, request: Request) -> bool:
        """Whether one of the keys is sent, as bearer token or as password; compared in constant time."""
        scheme, _, key = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        if scheme.lower() == b"basic":
            with suppress(ValueError):
                key = b64decode(key).partition(b":")[2]
        matches = [hmac.compare_digest(key.strip(), ours) for ours in self._keys]
        return any(matches) or not self._keys

    async def infer(self, request: Request) -> Response:
        """Verdicts on the tensors of a request."""
        query = read_infer(await self._body(request), request.headers.get(LENGTH))
        return write_infer(self._name, query, await self._verdicts(request, query))

    async def predict(self, request: Request) -> Response:
        """Verdicts on rows of plain JSON."""
        query = read_rows(await self._body(request), self._service.served.default)
        return write_rows(await self._verdicts(request, query))

    async def _verdicts(self, request: Request, query: Query) -> Columns:
        """The guard's answer to a query."""
        try:
            job = self._service.served.job(query)
            self._service.batcher.submit(job)
            columns: Columns = await asyncio.wrap_future(job.future)
        except IgeoodError:
            rows = max(map(len, query.inputs.values()), default=0)
            self._service.metrics.counts["rejected"].inc(rows)
            raise
        request.scope["igeood"] = {"inputs": job.rows, "ood": sum(columns["is_ood"])}
        return columns

    async def _body(self, request: Request) -> bytearray:
        """The body, if it is of a type that is read, and no longer than allowed."""
        media_type = request.headers.get("content-type", TYPES[0]).partition(";")[0].strip().lower()
        if media_type not in TYPES:
            raise HTTPException(415, f"content-type: {media_type} is not read; send application/json (curl --json)")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_body:
                what = f"body: over {self._max_body} bytes; send fewer rows"
                raise HTTPException(413, what, {"connection": "close"})
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
        inputs = [{"name": name, "datatype": "FP32", "shape": shape} for name, shape in served.shapes.items()]
        outputs = [{"name": name, "datatype": datatype, "shape": [-1]} for name, datatype in served.outputs.items()]
        return {"name": self._name, "versions": ["1"], "platform": "igeood", "inputs": inputs, "outputs": outputs}

    async def model_ready(self, request: Request) -> Any:
        """The model is loaded, and the service goes on."""
        return {"name": self._name, **await self.ready(request)}

    async def page(self, _: Request) -> Any:
        """The page for people."""
        return self._page

    async def status(self, _: Request) -> Any:
        """What the page shows."""
        return await asyncio.to_thread(self._service.record)

    async def metrics(self, _: Request) -> Any:
        """For Prometheus."""
        text = await asyncio.to_thread(generate_latest, self._service.metrics.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def openapi(self, _: Request) -> Any:
        """The OpenAPI document."""
        return self._openapi

    async def acknowledge(self, _: Request) -> Any:
        """Forget the monitor's alarms."""
        return {"acknowledged": self._service.acknowledge()}

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
    }


def _page() -> Response:
    """The page for people, with a policy that lets nothing in but its own script and style."""
    text = (files("igeood.serve") / "page.html").read_text(encoding="utf-8")
    inline = re.findall(r"<(script|style)>(.*?)</\1>", text, re.S)
    hashes = " ".join(f"'sha256-{b64encode(sha256(part.encode()).digest()).decode()}'" for _, part in inline)
    policy = f"default-src 'none'; connect-src 'self'; img-src data:; script-src {hashes}; style-src {hashes}"
    return Response(text, headers={"content-type": "text/html; charset=utf-8", "content-security-policy": policy})
