"""What stands before every request of the page: who may ask, from which page, and what a browser may do with answers.

A page on the internet can make a visitor's browser send requests to 127.0.0.1, under a name of its own (DNS rebinding)
or as a form (CSRF). So the name asked for must be one of this machine, and whatever changes something must come from
our own script: it carries a header that no form and no other site's script can send without asking first. What is only
read must not come from another site's page either, as far as the browser says where it comes from.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OURS = "x-entroprefill"
"""Header of every request of the page's script."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:\d{1,5})?")
_HEADERS = {
    # Nothing but our own two files runs or paints; nothing is fetched from anywhere else.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    # Answers quote private documents: no cache keeps them.
    "cache-control": "no-store",
}


class Guard:
    """Refuses foreign names and foreign pages; says on every response what a browser may do with it.

    Args:
        app: what is guarded.
        hosts: names by which the machine may be asked; None: any address in figures, and ``localhost``.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        self._app = app
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, hand on or refuse one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(scope["method"], scope["path"], Headers(scope=scope))
        if refusal is not None:
            await JSONResponse({"error": refusal}, status_code=403)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _refusal(self, method: str, path: str, headers: Headers) -> str | None:
        hosts = headers.getlist("host")
        host = hosts[0] if hosts else ""
        if len(hosts) != 1 or not self._known(host):
            return "this name is not served; open the address that the terminal shows (or give --allow-host NAME)"
        if method in ("GET", "HEAD"):
            foreign = headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
            return "the request comes from another page" if foreign and path.startswith("/api/") else None
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return "the request comes from another page"
        if headers.get("sec-fetch-site", "same-origin") != "same-origin" or OURS not in headers:
            return f"the request does not come from the page; programs send the header {OURS}: 1"
        return None

    def _known(self, host: str) -> bool:
        if not _HOST.fullmatch(host):
            return False
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if self._hosts is not None:
            return name in self._hosts
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == "localhost"
        return True
