"""The HTTP side: endpoints, and what happens to every request whatever its endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any

import structlog
from octavo_client import AsyncClient
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo_gateway import schema, tokenization, translate
from octavo_gateway.chat import ChatRenderer
from octavo_gateway.completions import CompletionRenderer
from octavo_gateway.errors import SERVER_ERROR, ApiError, translated
from octavo_gateway.exchange import CLIENT_GONE, ClientGone, Exchange, request_id_of
from octavo_gateway.gate import Gate, draining
from octavo_gateway.generation import Generation, Renderer
from octavo_gateway.metrics import Metrics, Progress
from octavo_gateway.names import FieldNames
from octavo_gateway.pages import Pages
from octavo_gateway.served import Scheduler, Served
from octavo_gateway.stories import story
from octavo_gateway.translate import Job
from octavo_gateway.watching import LIMIT_SECONDS, Watchers

_log = structlog.get_logger()
_DEADLINE_MARGIN_SECONDS = 1.0  # the scheduler's own word about a deadline comes first
_LAST_WORD_SECONDS = 1.0  # for a caller that does not read
_INTERNAL = "internal error; the gateway's log has more under the x-request-id"
_FALLBACK_NAMES = FieldNames()

_Handler = Callable[[Exchange, Progress], Awaitable[None]]


class Gateway:
    """All endpoints over one client.

    Attributes:
        app: for an ASGI server.
        gate: what is in flight; the server drains it.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        timeout: float,
        max_concurrent_requests: int,
        max_body_bytes: int,
        cors_origins: Sequence[str] = (),
        max_console_watchers: int = 0,
    ) -> None:
        """Serve what `client` reaches.

        Args:
            client: its retries must leave refusals for want of room to the callers.
            timeout: seconds that one request may take in all.
            max_concurrent_requests: more are refused.
            max_body_bytes: of one request.
            cors_origins: whose pages in browsers may call; "*" is all.
            max_console_watchers: web consoles that may watch at once; 0: there is no console.
        """
        self._client = client
        self._timeout = timeout
        self._max_body_bytes = max_body_bytes
        self._scheduler = Scheduler(client)
        self._started = int(time.time())
        self._own_version = version("octavo")
        self.gate = Gate(max_concurrent_requests)
        self.metrics = Metrics(lambda: self.gate.num_inside)
        middleware = []
        if cors_origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(cors_origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                    expose_headers=["x-request-id", "retry-after"],
                )
            )
        app = Starlette(
            routes=[
                self._route("GET", "/health", self._health, is_gated=False),
                self._route("GET", "/metrics", self._metrics, is_gated=False),
                self._route("GET", "/version", self._version, is_gated=False),
                self._route("GET", "/v1/models", self._models),
                self._route("GET", "/v1/models/{id:path}", self._model),
                self._route("POST", "/v1/completions", self._completions),
                self._route("POST", "/v1/chat/completions", self._chat),
                self._route("POST", "/tokenize", self._tokenize),
                self._route("POST", "/detokenize", self._detokenize),
                *(self._console_routes(max_console_watchers) if max_console_watchers else ()),
            ],
            middleware=middleware,
            exception_handlers={HTTPException: _no_such_endpoint},
        )
        app.router.redirect_slashes = False  # it would lead to whatever host the caller names
        self.app: ASGIApp = app

    def _route(self, method: str, path: str, handler: _Handler, *, is_gated: bool = True) -> Route:
        name = path.replace(":path", "")  # for people
        return Route(path, _Endpoint(self, name, handler, is_gated=is_gated), methods=[method])

    def _console_routes(self, max_watchers: int) -> Sequence[Route]:
        pages, watchers = Pages(), Watchers(self._client, most=max_watchers)

        async def page(exchange: Exchange, _: Progress) -> None:
            await pages.answer(exchange)

        async def file(exchange: Exchange, _: Progress) -> None:
            await pages.answer(exchange, str(exchange.path_params["name"]))

        async def without_slash(exchange: Exchange, _: Progress) -> None:
            # The page's own links are relative, for proxies that serve it below a path.
            location = {"location": "../console"}
            await exchange.answer_bytes(b"", "text/plain", status=308, headers=location)

        async def watch(exchange: Exchange, _: Progress) -> None:
            # It never ends by itself: a gateway that drains does not wait for it.
            await self._run(
                exchange, watchers.watch(exchange), seconds=LIMIT_SECONDS, ends=self.gate.closing
            )

        return (
            self._route("GET", "/console", page, is_gated=False),
            self._route("GET", "/console/", without_slash, is_gated=False),
            self._route("GET", "/console/watch", watch, is_gated=False),
            self._route("GET", "/console/story", self._story),
            self._route("GET", "/console/{name}", file, is_gated=False),
        )

    async def _run(
        self,
        exchange: Exchange,
        work: Awaitable[None],
        *,
        seconds: float | None = None,
        ends: asyncio.Event | None = None,
    ) -> None:
        """Do the work, unless the caller hangs up, time is up or the gateway ends first.

        Args:
            exchange: whose caller may hang up.
            work: to do.
            seconds: that it may take; None: as long as any request.
            ends: set when the gateway ends; None: when it cuts off what is in flight.

        Raises:
            ClientGone: if the caller hung up.
            ApiError: 504 or 503 for the other two.
        """
        seconds = self._timeout if seconds is None else seconds
        working = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(exchange.disconnected())
        ending = asyncio.ensure_future((ends or self.gate.cut_off).wait())
        tasks = (working, gone, ending)
        try:
            await asyncio.wait(
                tasks,
                timeout=seconds + _DEADLINE_MARGIN_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if working.done():
                working.result()
            elif gone.done():
                raise ClientGone
            elif ending.done():
                raise draining()
            else:
                raise ApiError(
                    504,
                    f"the request took longer than {seconds:g} s",
                    kind=SERVER_ERROR,
                    code="deadline_exceeded",
                )
        finally:
            for task in tasks:
                task.cancel()
            # What the work held, its calls above all, is given back before going on.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _story(self, exchange: Exchange, _: Progress) -> None:
        request_id, key = exchange.query.get("request_id"), exchange.api_key()
        await exchange.answer(await story(self._client, request_id, key))

    async def _served(self, api_key: str | None) -> Served:
        with translated(_FALLBACK_NAMES):
            return await self._scheduler.served(api_key)

    async def _completions(self, exchange: Exchange, progress: Progress) -> None:
        key = exchange.api_key()
        raw = await exchange.body(self._max_body_bytes)
        job = translate.from_completion(schema.parse(schema.CompletionBody, raw))
        await self._generate(exchange, progress, job, key, CompletionRenderer)

    async def _chat(self, exchange: Exchange, progress: Progress) -> None:
        key = exchange.api_key()
        raw = await exchange.body(self._max_body_bytes)
        job = translate.from_chat(schema.parse(schema.ChatBody, raw))
        await self._generate(exchange, progress, job, key, ChatRenderer)

    async def _generate(
        self,
        exchange: Exchange,
        progress: Progress,
        job: Job,
        key: str | None,
        renderer_of: Callable[[Job, Served], Renderer],
    ) -> None:
        progress.is_stream = job.stream

        async def work() -> None:
            served = await self._served(key)
            renderer = renderer_of(job, served)
            progress.answer_id = renderer.answer_id
            generation = Generation(
                self._client,
                job,
                renderer,
                served=served,
                api_key=key,
                timeout=self._timeout,
                progress=progress,
            )
            await (generation.stream if job.stream else generation.whole)(exchange)

        await self._run(exchange, work())

    async def _tokenize(self, exchange: Exchange, _: Progress) -> None:
        key = exchange.api_key()
        body = schema.parse(schema.TokenizeBody, await exchange.body(self._max_body_bytes))

        async def work() -> None:
            served = await self._served(key)
            await exchange.answer(await tokenization.tokenize(self._client, served, body, key))

        await self._run(exchange, work())

    async def _detokenize(self, exchange: Exchange, _: Progress) -> None:
        key = exchange.api_key()
        body = schema.parse(schema.DetokenizeBody, await exchange.body(self._max_body_bytes))

        async def work() -> None:
            await exchange.answer(await tokenization.detokenize(self._client, body, key))

        await self._run(exchange, work())

    async def _models(self, exchange: Exchange, _: Progress) -> None:
        await exchange.answer(
            {"object": "list", "data": [await self._describe("", exchange.api_key())]}
        )

    async def _model(self, exchange: Exchange, progress: Progress) -> None:
        name = str(exchange.path_params["id"])
        if not name:  # /v1/models/
            await self._models(exchange, progress)
            return
        await exchange.answer(await self._describe(name, exchange.api_key()))

    async def _describe(self, name: str, key: str | None) -> dict[str, Any]:
        with translated(_FALLBACK_NAMES):
            model = await self._client.model(name, api_key=key)
        return {
            "id": model.model,
            "object": "model",
            "created": self._started,
            "owned_by": "octavo",
            "root": model.model,
            "parent": None,
            "max_model_len": model.max_model_len,
        }

    async def _health(self, exchange: Exchange, _: Progress) -> None:
        if self.gate.is_draining:
            await exchange.answer({"status": "draining"}, status=503)
        elif await self._scheduler.is_healthy():
            await exchange.answer({"status": "ok"})
        else:
            await exchange.answer({"status": "the scheduler does not serve"}, status=503)

    async def _metrics(self, exchange: Exchange, _: Progress) -> None:
        await exchange.answer_bytes(self.metrics.text(), self.metrics.content_type)

    async def _version(self, exchange: Exchange, _: Progress) -> None:
        await exchange.answer({"version": self._own_version})


class _Endpoint:
    """One path, as an ASGI application: counts, logs, and turns what is raised into answers."""

    def __init__(self, gateway: Gateway, path: str, handler: _Handler, *, is_gated: bool) -> None:
        self._gateway = gateway
        self._path = path
        self._handler = handler
        self._is_gated = is_gated

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        progress = self._gateway.metrics.progress(self._path)
        gate = self._gateway.gate.entry() if self._is_gated else contextlib.nullcontext()
        status = 0
        told: dict[str, str] = {}
        with structlog.contextvars.bound_contextvars(request_id=exchange.request_id):
            try:
                with gate:
                    await self._handler(exchange, progress)
            except ClientGone:
                status = CLIENT_GONE
            except ApiError as error:
                status = error.status
                told = _cause(error)
                await _last_word(exchange, error)
            except Exception:
                _log.exception("request_failed", endpoint=self._path)
                status = 500
                failure = ApiError(500, _INTERNAL, kind=SERVER_ERROR, code="internal_error")
                await _last_word(exchange, failure)
            status = status or exchange.status
            progress.close(status)
            if self._is_gated:
                _log.info(
                    "request_finished",
                    endpoint=self._path,
                    status=status,
                    seconds=round(progress.seconds, 3),
                    num_tokens=progress.num_tokens,
                    answer_id=progress.answer_id,
                    **told,
                )


def _cause(error: ApiError) -> dict[str, str]:
    """What the log has of an error; a refusal may quote the caller, so its words stay out."""
    cause = {"code": error.code} if error.code else {}
    return {**cause, "error": str(error)} if error.status >= 500 else cause


async def _last_word(exchange: Exchange, error: ApiError) -> None:
    """Tell the caller, if it still reads."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORD_SECONDS):
            await exchange.fail(error)


async def _no_such_endpoint(request: Request, error: Exception) -> JSONResponse:
    """Answer a path, or a method on one, that there is not."""
    assert isinstance(error, HTTPException)
    told = ApiError(
        error.status_code,
        f"there is no {request.method} {request.url.path} here",
        code="method_not_allowed" if error.status_code == 405 else "unknown_url",
    )
    headers = {**(error.headers or {}), "x-request-id": request_id_of(request.headers)}
    return JSONResponse(told.body, status_code=told.status, headers=headers)
