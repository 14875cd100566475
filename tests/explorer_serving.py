"""The explorer on a port of this machine, in a thread of the test's process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from inrun.explorer.app import build_app
from inrun.explorer.server import _config, _listen, opened

TOKEN = "a-token-for-tests"  # noqa: S105


@contextlib.contextmanager
def serving(*runs: Path, every: float = 0.3) -> Iterator[tuple[str, Any]]:
    """Give the address, and what is served."""
    with opened(runs, every=every) as found:
        app = build_app(found.snapshots, found.marks, token=TOKEN)
        listening, port = _listen(uvicorn, app, "127.0.0.1", 0)
        server = uvicorn.Server(_config(uvicorn, app, "127.0.0.1", port))
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
        thread.start()
        until = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < until
            time.sleep(0.02)
        try:
            yield f"http://127.0.0.1:{port}", found
        finally:
            server.should_exit = True
            thread.join(20)
            listening.close()
