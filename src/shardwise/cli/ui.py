"""Verb ``shardwise ui``: a local page about this machine and its runs."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.arguments import Calibration, Json
from shardwise.errors import UserError

PORT = 8765
OPEN = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}"><a href="{url}">Open</a>'


def run_ui(
    runs: Annotated[Path, typer.Option(help="Folder whose runs are shown, also those further down.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 is any free one.", min=0, max=65535)] = PORT,
    site: Annotated[Path, typer.Option(help="Planner page, as make site builds it.")] = Path("build/site"),
    calibration: Calibration = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the URL only.")] = False,
    as_json: Json = False,
) -> None:
    """Run ``shardwise ui`` until Ctrl-C.

    Raises:
        UserError: the extra is not installed, or ``runs`` is not a folder; every problem.
        MachineError: the port is taken.
    """
    problems = []
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        problems.append(f"shardwise ui needs {' and '.join(missing)}: pip install 'shardwise[ui]'")
    if runs.exists() and not runs.is_dir():
        problems.append(f"--runs '{runs}' is not a folder; give the folder that contains your runs")
    if calibration is not None and not calibration.is_file():
        problems.append(f"--calibration '{calibration}' is not a file; make it with: shardwise bench comm")
    if problems:
        raise UserError(*problems)
    from shardwise.web.server import LOOPBACK, Ui, listen, serve

    missing_yet = "" if runs.exists() else ", which does not exist yet"
    ui = Ui(root=runs, site=site, calibration=calibration)
    listener = listen(port)
    url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/?token={ui.token}"
    with tempfile.TemporaryDirectory(prefix="shardwise-ui-") as folder:  # readable by this user alone

        def started() -> None:
            if as_json:
                print(json.dumps({"schema": 1, "url": url, "runs": str(runs)}), flush=True)
            text = f"Runs of '{runs}'{missing_yet}: {url}\nPress Ctrl-C to stop."
            print(text, file=sys.stderr if as_json else sys.stdout, flush=True)
            if not no_browser:
                page = Path(folder) / "open.html"  # a command line would show the token to every user
                page.write_text(OPEN.format(url=url))
                threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()

        if threading.current_thread() is threading.main_thread():  # a shell's background job begins with it ignored
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            serve(ui, listener, started)
        except KeyboardInterrupt:
            print("Stopped.", file=sys.stderr, flush=True)
