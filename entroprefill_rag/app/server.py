"""The page's routes. Everything it shows comes from here as data; the page itself is a few files that never change."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from entroprefill_rag.app import view
from entroprefill_rag.app.answers import Answering, Event, answer_of
from entroprefill_rag.app.guard import OURS, Guard
from entroprefill_rag.app.loading import Loaded, Loading, NotReadyError
from entroprefill_rag.app.uploads import Uploading
from entroprefill_rag.app.visits import UploadLimits, Visit, Visits
from entroprefill_rag.config import PruningConfig
from entroprefill_rag.errors import EntroPrefillError, RequestError
from entroprefill_rag.report.plain import one_line

_LOG = logging.getLogger(__name__)
_COOKIE = "entroprefill_visit"
_LONGEST_BODY = 64_000
_LONGEST_QUESTION = 8_000
_LISTED = 200
_STATIC = {"app.css": "text/css", "app.js": "text/javascript", "icon.svg": "image/svg+xml"}
Handler = Callable[[Request, Visit], Awaitable[Response]]


class _Refused(Exception):
    """A request that is answered with an error: status, and what was wrong."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Page:
    """One page over one store, as the routes see it.

    Args:
        loading: of model, embedder and documents.
        explain: one line for what went wrong.
        config: of pruning.
        top_k: chunks to retrieve for a question.
        max_new_tokens: longest answer.
        uploads: bounds on what a browser may add; None: nothing.
        token: what must be given before anything is answered; None: nothing must.
        most_answers: how many are made or wait at the same time.
        folder: name of the store's folder, for people.
    """

    loading: Loading
    explain: Callable[[Exception], str]
    config: PruningConfig
    top_k: int = 20
    max_new_tokens: int = 256
    uploads: UploadLimits | None = field(default_factory=UploadLimits)
    token: str | None = None
    most_answers: int = 8
    folder: str = ""
    visits: Visits = field(default_factory=Visits)
    _busy: int = 0

    def __post_init__(self) -> None:
        embedding = threading.Lock()
        self._answering = Answering(self.config, self.top_k, self.max_new_tokens, embedding)
        self._uploading = None if self.uploads is None else Uploading(self.uploads, embedding)

    def application(self, hosts: Collection[str] | None) -> Guard:
        """The ASGI application.

        Args:
            hosts: see :class:`Guard`.
        """
        app = Starlette(
            routes=[
                Route("/", _page),
                Route("/static/{name}", _static),
                Route("/api/login", self._login, methods=["POST"]),
                Route("/api/status", self._for(self._status)),
                Route("/api/ask", self._for(self._ask), methods=["POST"]),
                Route("/api/full", self._for(self._full), methods=["POST"]),
                Route("/api/upload", self._for(self._upload), methods=["POST"]),
                Route("/api/remove", self._for(self._remove), methods=["POST"]),
                Route("/api/record/{name}", self._for(self._record)),
                Route("/api/report/{name}", self._for(self._report)),
            ],
            exception_handlers=dict.fromkeys((_Refused, EntroPrefillError, ClientDisconnect, Exception), self._refused),
            lifespan=self._lifespan,
        )
        return Guard(app, hosts)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.loading.start()
        try:
            yield
        finally:
            self.loading.close()

    # Who asks.

    def _for(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """The handler with the visit of who asks; without a token needed, a new browser gets one at its first call.

        Only our own script begins a visit: else a link or an image of another site, which come without the cookie,
        could replace it, or push out those of others.
        """

        async def route(request: Request) -> Response:
            visit, secret = self.visits.find(request.cookies.get(_COOKIE, "")), None
            if visit is None:
                if self.token is not None:
                    raise _Refused(401, "give the token that the server was started with")
                secret, visit = self.visits.begin() if OURS in request.headers else (None, Visit())
            response = await handler(request, visit)
            if secret is not None:
                _remember(response, secret)
            return response

        return route

    async def _login(self, request: Request) -> Response:
        given = str((await _data(request)).get("token")).encode("utf-8", "replace")
        if self.token is not None and not hmac.compare_digest(given, self.token.encode("utf-8", "replace")):
            await asyncio.sleep(1.0)  # guessing takes its time
            raise _Refused(401, "this is not the token")
        secret, _ = self.visits.begin()
        response = JSONResponse({"ok": True})
        _remember(response, secret)
        return response

    # What is there.

    async def _status(self, request: Request, visit: Visit) -> Response:
        state, text = self.loading.status()
        told: dict[str, Any] = {
            "state": state,
            "text": text,
            "terms": view.terms(),
            "pruning": self.config.enabled,
            "folder": one_line(self.folder, 80),
            "uploads": None if self.uploads is None else {"file_bytes": self.uploads.file_bytes},
        }
        if state == "ready":
            told |= await run_in_threadpool(self._documents, self.loading.loaded(), visit)
        return JSONResponse(told)

    def _documents(self, loaded: Loaded, visit: Visit) -> dict[str, Any]:
        base = loaded.base
        chunks = Counter(str(chunk.metadata.get("path", chunk.id)) for chunk in base.chunks) if base else Counter()
        read = base.reading.documents if base else []
        skipped = [one for one in base.reading.skipped if one.reason != "hidden"] if base else []
        return {
            "model": loaded.backend.name,
            "embedder": loaded.embedder.name,
            "documents": len(read),
            "chunks": len(base.chunks) if base else 0,
            "listed": [
                {"path": one.path, "chunks": chunks[one.path], "notes": list(one.notes)} for one in read[:_LISTED]
            ],
            "skipped": [{"path": one.path, "reason": one.reason} for one in skipped[:_LISTED]],
            "uploaded": [
                {
                    "name": name,
                    "chunks": len(index.chunks),
                    "notes": [text for document in index.reading.documents for text in document.notes],
                }
                for name, index in visit.uploads.items()
            ],
        }

    # Answers.

    async def _ask(self, request: Request, visit: Visit) -> Response:
        question = (await _data(request)).get("question")
        if not isinstance(question, str) or not question.strip():
            raise RequestError("the question is empty; ask something")
        if len(question) > _LONGEST_QUESTION:
            raise RequestError(f"the question has {len(question):,} characters, the page takes {_LONGEST_QUESTION:,}")
        loaded = self.loading.loaded()
        visit.index(loaded.base)  # without documents there is nothing to stream
        return self._streamed(self._answering.ask(question.strip(), loaded, visit))

    async def _full(self, request: Request, visit: Visit) -> Response:
        name = str((await _data(request)).get("id"))
        answer_of(visit, name)
        return self._streamed(self._answering.in_full(name, self.loading.loaded(), visit))

    def _streamed(self, events: AsyncGenerator[Event]) -> Response:
        if self._busy >= self.most_answers:
            raise _Refused(503, f"{self._busy} answers are being made already; try again in a moment")
        self._busy += 1

        async def lines() -> AsyncGenerator[bytes]:
            try:
                async with aclosing(events) as stream:
                    async for event in stream:
                        yield json.dumps(event).encode() + b"\n"
            except Exception as error:  # the response has begun: what went wrong is its last line
                yield json.dumps({"type": "error", "error": self._explained(error)}).encode() + b"\n"

        return _Streamed(lines(), self._one_less)

    def _one_less(self) -> None:
        self._busy -= 1

    # Documents of the browser's own.

    async def _upload(self, request: Request, visit: Visit) -> Response:
        uploading = self._uploading
        if uploading is None:
            raise _Refused(403, "uploads are off")
        loaded = self.loading.loaded()
        most = uploading.limits.file_bytes
        data = await _body(request, most, "the file has more than {most:,} bytes, the most that is taken")
        if uploading.under_way >= uploading.most:
            raise _Refused(503, f"{uploading.under_way} files are being read already; try again in a moment")
        given = request.query_params.get("name", "")
        name = await uploading.add(given, data, loaded, visit, request.is_disconnected)
        return JSONResponse({"name": name, **await run_in_threadpool(self._documents, loaded, visit)})

    async def _remove(self, request: Request, visit: Visit) -> Response:
        name = (await _data(request)).get("name")
        if visit.uploads.pop(str(name), None) is None:
            raise RequestError("there is no such upload")
        return JSONResponse(await run_in_threadpool(self._documents, self.loading.loaded(), visit))

    # What can be taken away.

    async def _record(self, request: Request, visit: Visit) -> Response:
        record = answer_of(visit, request.path_params["name"]).record
        return _download(record.to_json(indent=1), "application/json", "entroprefill-record.json")

    async def _report(self, request: Request, visit: Visit) -> Response:
        from entroprefill_rag.report.html import html_report

        exchange = answer_of(visit, request.path_params["name"])
        page = await run_in_threadpool(html_report, exchange.record, exchange.request.chunks)
        return _download(page, "text/html", "entroprefill-report.html")

    # What goes wrong.

    async def _refused(self, request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        if isinstance(error, _Refused):
            return JSONResponse({"error": str(error)}, status_code=error.status)
        if isinstance(error, NotReadyError):
            return JSONResponse({"error": self._explained(error)}, status_code=503)
        return JSONResponse(
            {"error": self._explained(error)}, status_code=400 if isinstance(error, EntroPrefillError) else 500
        )

    def _explained(self, error: Exception) -> str:
        if not isinstance(error, EntroPrefillError):
            _LOG.error("%s", type(error).__name__, exc_info=error)
        return self.explain(error)


class _Streamed(StreamingResponse):
    """Lines of JSON; whatever ends them, their generator is closed and its place is free again."""

    def __init__(self, lines: AsyncGenerator[bytes], ended: Callable[[], None]) -> None:
        super().__init__(lines, media_type="application/x-ndjson")
        self._lines = lines
        self._ended = ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Stream until the lines end or the browser leaves."""
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            self._ended()
            await self._lines.aclose()


async def _data(request: Request) -> dict[str, Any]:
    body = await _body(request, _LONGEST_BODY, "more than {most:,} bytes were sent")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _Refused(400, "a JSON object is expected")
    return found


async def _body(request: Request, most: int, message: str) -> bytes:
    """The request's body, read no further than it may go, whatever its length claims to be."""
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > most:
        raise _Refused(413, message.format(most=most))
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _Refused(413, message.format(most=most))
        parts.append(part)
    return b"".join(parts)


def _remember(response: Response, secret: str) -> None:
    response.set_cookie(_COOKIE, secret, httponly=True, samesite="strict", path="/")


def _download(text: str, kind: str, name: str) -> Response:
    return Response(text, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'})


async def _page(request: Request) -> Response:
    return HTMLResponse(_file("index.html"))


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    kind = _STATIC.get(name)
    if kind is None:
        return JSONResponse({"error": "not found"}, status_code=404)
    return Response(_file(name), media_type=kind)


def _file(name: str) -> str:
    return (files("entroprefill_rag.app") / "static" / name).read_text(encoding="utf-8")
