"""Serving: the runs are read, then kept up to date in a thread of their own while uvicorn answers."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inrun.errors import ConfigurationError, InrunError, LedgerError
from inrun.explorer.marks import MarkBook
from inrun.explorer.snapshot import Snapshot, Store
from inrun.ledger import LedgerReader

#: Seconds between two looks at the ledgers, and the port that is tried first.
EVERY, PORT = 1.0, 8765


class Follower(threading.Thread):
    """Takes in what training writes."""

    def __init__(self, snapshots: Sequence[Snapshot], every: float = EVERY) -> None:
        """Follow some runs."""
        super().__init__(name="inrun-follower", daemon=True)
        self._snapshots, self._every, self._stop_it = snapshots, every, threading.Event()

    def run(self) -> None:
        """Look again and again."""
        while not self._stop_it.wait(self._every):
            for snapshot in self._snapshots:
                snapshot.refresh()

    def finish(self) -> None:
        """Stop, and wait for it."""
        self._stop_it.set()
        self.join()


@dataclass(frozen=True)
class Opened:
    """Runs that were read."""

    snapshots: list[Snapshot]
    marks: MarkBook


@contextlib.contextmanager
def opened(runs: Sequence[str | Path], marks_file: Path | None = None, every: float = EVERY) -> Iterator[Opened]:
    """Read runs and follow them until the block ends."""
    readers = [LedgerReader(run) for run in runs]
    if len({r.path.resolve() for r in readers}) < len(readers):
        raise ConfigurationError("a run is named twice")
    marks = MarkBook([(str(r.about.get("run_id", r.path.resolve())), r.path) for r in readers], marks_file)
    with Store() as store:
        snapshots = [Snapshot(store, reader, place) for place, reader in enumerate(readers)]
        for snapshot in snapshots:
            snapshot.refresh()
            if snapshot.error is not None:
                raise LedgerError(snapshot.error)
        follower = Follower(snapshots, every)
        follower.start()
        try:
            yield Opened(snapshots, marks)
        finally:
            follower.finish()


class Endings:
    """SIGTERM and SIGHUP (a closed terminal) end serving as Ctrl-C does, so that the temporary folder goes with it."""

    def __init__(self) -> None:
        """Begin without a server: whatever is going on is left by SystemExit."""
        self.server: Any = None
        self._ended = False

    def __call__(self, number: int, frame: object) -> None:
        """Let the server finish, or leave; a second signal finds us cleaning up and changes nothing."""
        if self.server is not None and number == getattr(signal, "SIGHUP", None) and not self.server.should_exit:
            self.server.should_exit = True
        elif not self._ended:
            self._ended = True
            raise SystemExit(128 + number)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Take the signals while the block runs; those that are ignored (nohup) stay so."""
        names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
        known = [getattr(signal, name) for name in names if hasattr(signal, name)]
        before = {number: signal.getsignal(number) for number in known if signal.getsignal(number) is not signal.SIG_IGN}
        for number in before:
            signal.signal(number, self)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    runs: Sequence[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    names: Sequence[str] = (),
    marks_file: Path | None = None,
    ready: Callable[[str], None],
) -> None:
    """Serve runs until the process is interrupted.

    Args:
        runs: Their folders.
        host: The address to listen at.
        port: The port; None takes the usual one, or any that is free; 0 any that is free.
        names: Names under which browsers may reach this machine, beside its address.
        marks_file: Where marks are kept; None keeps them in memory.
        ready: Called once with the address, token included.
    """
    try:
        import uvicorn

        from inrun.explorer.app import build_app
    except ImportError:
        raise InrunError("the explorer needs starlette and uvicorn: pip install 'inrun[serve]'") from None
    token, endings = secrets.token_urlsafe(32), Endings()
    with endings.watched(), opened(runs, marks_file) as found:
        app: Any = build_app(found.snapshots, found.marks, token=token, host=host, names=names)
        listening, bound = _listen(uvicorn, app, host, port)
        shown = f"[{host}]" if ":" in host else "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104 - a name to compare with
        ready(f"http://{shown}:{bound}/?token={token}")
        endings.server = uvicorn.Server(_config(uvicorn, app, host, bound))
        endings.server.run(sockets=[listening])  # raises SIGTERM again when it has finished


def _config(uvicorn: Any, app: Any, host: str, port: int) -> Any:
    return uvicorn.Config(
        app, host=host, port=port, log_level="critical", access_log=False, server_header=False, lifespan="off", ws="none",
        proxy_headers=False, timeout_graceful_shutdown=2,
    )  # fmt: skip


def _listen(uvicorn: Any, app: Any, host: str, port: int | None) -> tuple[Any, int]:
    """Return a socket that listens, and its port."""
    for wanted in (PORT, 0) if port is None else (port,):
        with contextlib.suppress(SystemExit):  # uvicorn's way to say that a port is taken
            found = _config(uvicorn, app, host, wanted).bind_socket()
            found.listen(128)  # now: whoever opens the address as soon as it is printed waits a moment instead of being refused
            return found, found.getsockname()[1]
    raise ConfigurationError(f"{host}:{port} cannot be listened at: the port is taken, or the address is not this machine's")
