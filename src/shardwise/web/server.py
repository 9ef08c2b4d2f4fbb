"""Local server of runs: routes, and the socket on loopback."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from shardwise.errors import MachineError, UserError
from shardwise.train.run_files import RunFile
from shardwise.web import run_pages
from shardwise.web.guard import Guard
from shardwise.web.live_metrics import EventStream, Streams, metrics_events
from shardwise.web.run_list import RunFolder, RunList, find_runs, shown

LOOPBACK = "127.0.0.1"
ASSETS = Path(__file__).with_name("ui_assets")
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
PLANNER_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; "
    "style-src 'self'; img-src 'self' data:; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


@dataclass
class Ui:
    """What the pages show: runs below ``root``, a calibration file, and the built site, if there is one."""

    root: Path
    site: Path
    calibration: Path | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    stopping: Callable[[], bool] = lambda: False
    streams: Streams = field(default_factory=Streams)

    @property
    def has_planner(self) -> bool:
        """Whether the planner page has been built."""
        return (self.site / "index.html").is_file()

    def runs(self) -> RunList:
        """Find the runs, anew for each page."""
        return find_runs(self.root)

    def run(self, request: Request) -> RunFolder:
        """Return the run that a URL names.

        Raises:
            HTTPException: there is no such run.
        """
        found = self.runs().find(request.path_params["key"])
        if found is None:
            raise HTTPException(404)
        return found


def make_app(ui: Ui, port: int) -> ASGIApp:
    """Build the application behind its guard."""

    def runs(_: Request) -> Response:
        return HTMLResponse(run_pages.runs_page(ui.runs(), shown(str(ui.root)), ui.has_planner))

    def run(request: Request) -> Response:
        return HTMLResponse(run_pages.run_page(ui.run(request), ui.has_planner))

    def report(request: Request) -> Response:
        try:
            page = run_pages.report_html(ui.run(request))
        except UserError as error:
            page = run_pages.message_page("No report", str(error))
            return HTMLResponse(page, 422, {"Content-Security-Policy": _framed()})
        return HTMLResponse(page, headers={"Content-Security-Policy": REPORT_POLICY})

    def events(request: Request) -> Response:
        found = ui.run(request)
        if found.problem:
            raise HTTPException(403)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return EventStream(metrics_events(found.path / RunFile.METRICS, ui.stopping), ui.streams)

    def compare(request: Request) -> Response:
        listed = ui.runs()
        keys = dict.fromkeys(request.query_params.getlist("run"))
        chosen = [found for key in keys if (found := listed.find(key)) is not None]
        return HTMLResponse(run_pages.compare_page(chosen[: run_pages.MOST_COMPARED], ui.has_planner))

    def machine(_: Request) -> Response:
        return HTMLResponse(run_pages.machine_page(ui.calibration, ui.has_planner))

    def planner(request: Request) -> Response:
        if not ui.has_planner:
            return HTMLResponse(run_pages.planner_missing_page())
        return RedirectResponse("/planner/index.html")

    def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ("ui.css", "ui.js"):
            raise HTTPException(404)
        return FileResponse(ASSETS / name)

    def failed(_: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        words = {404: "There is nothing at this address.", 403: "This run cannot be read."}
        text = words.get(status, "The server failed; its terminal shows why.")
        return HTMLResponse(run_pages.message_page("Not shown", text), status)

    routes = [
        Route("/", runs, methods=["GET"]),
        Route("/machine", machine, methods=["GET"]),
        Route("/compare", compare, methods=["GET"]),
        Route("/runs/{key}", run, methods=["GET"]),
        Route("/runs/{key}/report", report, methods=["GET"]),
        Route("/runs/{key}/events", events, methods=["GET"]),
        Route("/ui/{name}", asset, methods=["GET"]),
        Route("/planner/", planner, methods=["GET"]),
        Mount("/planner", _Planner(directory=ui.site, html=True, check_dir=False)),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: failed, Exception: failed})
    return Guard(app, port=port, token=ui.token)


def _framed() -> str:
    return "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"


class _Planner(StaticFiles):
    """Static files of the site, under the policy of its pages; none where it has not been built."""

    async def check_config(self) -> None:
        """Accept a folder that is not there yet."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        """Return the file of a path; nothing where no file can have that name."""
        try:
            return super().lookup_path(path)
        except (ValueError, OSError):
            return "", None

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers["Content-Security-Policy"] = PLANNER_POLICY
        return response


def listen(port: int) -> socket.socket:
    """Bind a socket on loopback; port 0 is any free one.

    Raises:
        MachineError: the port is taken.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((LOOPBACK, port))
        found.listen(128)
    except OSError as error:
        found.close()
        raise MachineError(
            f"--port {port} cannot be used: {error.strerror}; give another one, or 0 for any that is free"
        ) from None
    return found


class _Server(uvicorn.Server):
    """Server that says when it answers; from then on, Ctrl-C ends it cleanly."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._say_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._say_started()


def serve(ui: Ui, listener: socket.socket, started: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; event streams end by themselves. ``started`` is called once it answers."""
    app = make_app(ui, listener.getsockname()[1])
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # URLs have the token
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    server = _Server(config, started)
    ui.stopping = lambda: server.should_exit
    server.run(sockets=[listener])
