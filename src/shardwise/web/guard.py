"""Who may ask the local server: its own pages in a browser that came with the token, and nobody else."""

from __future__ import annotations

import html
import secrets
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
ENTER = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Shardwise</title>'
    '<link rel="icon" href="data:,">'
    '<meta http-equiv="refresh" content="0; url={path}"></head><body><a href="{path}">Continue</a></body></html>'
)


class Guard:
    """Middleware: checks host, origin, method and token of each request, and adds `HEADERS` to each answer.

    The host must be this server's own, against DNS rebinding. A browser that has the token in the URL gets it as a
    cookie, and moves on to the URL without it; that page moves on by itself, since a browser does not send a strict
    cookie along a redirect that another site began.
    """

    def __init__(self, app: ASGIApp, *, port: int, token: str) -> None:
        self.app, self.token = app, token
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self.cookie = f"shardwise-ui-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._answer(scope)
        await (answer or self.app)(scope, receive, send_guarded)

    def _answer(self, scope: Scope) -> Response | None:
        """Return a refusal or the way in; ``None`` where the request is allowed."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return _refused(403, "This address is not the server's own: open the URL that shardwise ui has printed.")
        origins = headers.getlist("origin")
        if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
            return _refused(403, "Requests of other sites are refused.")
        if scope["method"] not in ("GET", "HEAD"):
            return _refused(405, "This server only shows; it changes nothing.")
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=50)) if _few(scope) else {}
        given = query.get("token")
        if given is not None:
            if not self._is_token(given):
                return _refused(401, "The token in this URL is wrong: open the URL that shardwise ui has printed.")
            return self._enter(scope["path"])
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return _refused(403, "Requests of other sites are refused.")
        cookies = cookie_parser("; ".join(headers.getlist("cookie")))
        if not self._is_token(cookies.get(self.cookie, "")):
            return _refused(401, "The token is missing: open the URL that shardwise ui has printed.")
        return None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _enter(self, path: str) -> Response:
        own = path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"
        response = HTMLResponse(ENTER.format(path=html.escape(own)))
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
        return response


def _few(scope: Scope) -> bool:
    return len(scope["query_string"]) <= 4096 and scope["query_string"].count(b"&") < 50


def _refused(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status, {"Connection": "close"})
