"""The application: the page, its files, and an API that answers in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from inrun.errors import ConfigurationError, InrunError
from inrun.explorer import pages, pictures
from inrun.explorer.ask import kind_of
from inrun.explorer.guard import Guard
from inrun.explorer.marks import MarkBook
from inrun.explorer.snapshot import Snapshot
from inrun.explorer.sums import MEASURES
from inrun.ledger import credit_of, method_of
from inrun.report.about import writer_at_work
from inrun.report.text import one_line, visible

#: Files of the page, by the package that has them: the report's style and first tools are ours, too.
ASSETS = {
    "report.css": ("inrun.report", "style.css", "text/css"),
    "both.js": ("inrun.report", "both.js", "text/javascript"),
    "early.js": ("inrun.explorer", "early.js", "text/javascript"),
    "style.css": ("inrun.explorer", "style.css", "text/css"),
    "icon.svg": ("inrun.explorer", "icon.svg", "image/svg+xml"),
    **{
        f"{n}.js": ("inrun.explorer", f"{n}.js", "text/javascript")
        for n in ("kit", "state", "charts", "samples", "sample", "views", "main")
    },
}
#: Bytes of a request that marks samples.
MOST_BODY = 4_000_000

Answer = Callable[[Request], Any]


class Explorer:
    """The runs, the marks, and an answer for every route."""

    def __init__(self, snapshots: list[Snapshot], marks: MarkBook) -> None:
        """Take snapshots that were filled."""
        self.snapshots, self.marks = snapshots, marks

    def routes(self) -> list[Route]:
        """Return what can be asked for."""
        run = "/api/runs/{run:int}"
        answers: dict[str, Answer] = {
            "/api/runs": self.runs,
            "/api/status": self.status,
            "/api/compare": self.compare,
            f"{run}/samples": lambda r: pages.page(self.run(r), r.query_params, self.marks.of(self.number(r))),
            f"{run}/sample": self.sample,
            f"{run}/values": lambda r: pages.values(self.run(r), r.query_params),
            f"{run}/scatter": lambda r: pictures.scatter(self.run(r), r.query_params, self.marks.of(self.number(r))),
            f"{run}/groups": lambda r: pictures.groups(self.run(r), r.query_params),
            f"{run}/curves": lambda r: pictures.curves(self.run(r)),
        }
        return [
            Route("/", self.page),
            Route("/assets/{name}", self.asset),
            Route(f"{run}/marks", self.mark, methods=["POST"]),
            Route(f"{run}/marks.jsonl", self.export),
            *(Route(path, _json(answer)) for path, answer in answers.items()),
        ]

    def number(self, request: Request) -> int:
        """Return the number of the run that was asked for."""
        number = int(request.path_params["run"])
        if number >= len(self.snapshots):
            raise ConfigurationError("there is no such run")
        return number

    def run(self, request: Request) -> Snapshot:
        """Return the run that was asked for."""
        return self.snapshots[self.number(request)]

    def runs(self, _: Request) -> Any:
        """Say what there is: runs, their validation sets and columns."""
        return {"runs": [self._facts(k, s) for k, s in enumerate(self.snapshots)], "measures": list(MEASURES)}

    def _facts(self, number: int, snapshot: Snapshot) -> dict[str, Any]:
        view, about = snapshot.view, snapshot.reader.about
        return {
            **self._state(number, snapshot),
            "name": one_line(snapshot.reader.path.resolve().name, 80),
            "path": visible(snapshot.reader.path, 300),
            "method": one_line(method_of(about), 40),
            "model": one_line(about.get("model", "?"), 60),
            "credit": credit_of(about),
            "sets": [{"name": n, "shown": one_line(n, 60), "folds": len(f)} for n, f in zip(view.sets, view.labels, strict=True)],
            "hidden_sets": view.hidden_sets,
            "columns": [{"name": c.name, "shown": one_line(c.name, 60), "kind": kind_of(c.kind)} for c in view.columns],
            "shown_columns": [one_line(c.name, 60) for c in pages.shown_columns(view)],
            "has_text": view.text_column is not None,
        }

    def _state(self, number: int, snapshot: Snapshot) -> dict[str, Any]:
        view = snapshot.view
        return {
            "version": view.version,
            "steps": view.steps,
            "last_step": view.last_step,
            "samples": view.samples,
            "scored": view.scored,
            "at_work": writer_at_work(snapshot.reader.path),
            "error": None if snapshot.error is None else visible(snapshot.error, 400),
            "marks": _counted(self.marks.of(number)),
        }

    def status(self, _: Request) -> Any:
        """Say how far every run is; pages that follow a run ask for it."""
        return {"runs": [self._state(k, s) for k, s in enumerate(self.snapshots)]}

    def compare(self, request: Request) -> Any:
        """Set two runs against each other."""
        numbers = [pages.whole(request.query_params, name, 0, 0, len(self.snapshots) - 1) for name in ("a", "b")]
        first, second = (self.snapshots[n] for n in numbers)
        return pictures.compare(first, second, request.query_params)

    def sample(self, request: Request) -> Any:
        """Tell all about one sample."""
        return pages.sample(self.run(request), _sample_id(request.query_params.get("id")), self.marks.of(self.number(request)))

    async def mark(self, request: Request) -> Response:
        """Mark samples, by their ids or all that match."""
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BODY:
                return _refused("the request is too large", 413)
        return await run_in_threadpool(_answer, lambda: self._mark(self.number(request), body))

    def _mark(self, number: int, body: bytes) -> Any:
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict) or ("ids" in given) == ("matching" in given) or "mark" not in given:
            raise ConfigurationError('marks are {"mark": NAME or null, "ids": [...]} or {"mark": ..., "matching": {...}}')
        snapshot, mark, now = self.snapshots[number], given["mark"], self.marks.of(number)
        if mark is not None and not isinstance(mark, str):
            raise ConfigurationError("a mark is a name, or null")
        if "matching" in given:
            asked = given["matching"]
            if not (isinstance(asked, dict) and all(isinstance(v, str) for v in asked.values())):
                raise ConfigurationError("matching has the parameters of a page, as texts")
            ids: Iterable[int] = pages.matching(snapshot, asked, now)
        else:
            if not isinstance(given["ids"], list):
                raise ConfigurationError("ids is a list of texts")
            ids = [_sample_id(i) for i in given["ids"]]
            if mark is not None:
                ids = pages.known_ids(snapshot, ids)
        changed = list(ids)
        self.marks.set(number, changed, mark)
        return {"changed": len(changed), "marks": _counted(self.marks.of(number))}

    async def export(self, request: Request) -> Response:
        """Hand the marks of a run out as a file."""
        try:
            text = self.marks.lines(self.number(request))
        except ConfigurationError as error:
            return _refused(str(error), 404)
        headers = {"content-disposition": 'attachment; filename="marks.jsonl"'}
        return Response(text, media_type="application/x-ndjson", headers=headers)

    async def page(self, _: Request) -> Response:
        """Return the page. It has nothing of any run in it."""
        return Response((files("inrun.explorer") / "assets" / "page.html").read_bytes(), media_type="text/html")

    async def asset(self, request: Request) -> Response:
        """Return a file of the page."""
        known = ASSETS.get(request.path_params["name"])
        if known is None:
            return PlainTextResponse("404: there is no such file\n", 404)
        package, name, kind = known
        return Response((files(package) / "assets" / name).read_bytes(), media_type=kind)


def build_app(
    snapshots: list[Snapshot], marks: MarkBook, *, token: str, host: str = "127.0.0.1", names: Iterable[str] = ()
) -> Guard:
    """Return the application, guarded."""
    return Guard(Starlette(routes=Explorer(snapshots, marks).routes()), token, host, names)


def _sample_id(text: Any) -> int:
    """Read an id, which is a text: JavaScript would round large integers."""
    if isinstance(text, str) and len(text) <= 20 and text.isascii() and text.removeprefix("-").isdecimal():
        number = int(text)
        if -(2**63) <= number < 2**63:
            return number
    raise ConfigurationError("an id is a text of digits")


def _counted(marks: dict[int, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for mark in marks.values():
        found[mark] = found.get(mark, 0) + 1
    return found


def _json(answer: Answer) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(_answer, lambda: answer(request))

    return endpoint


def _answer(ask: Callable[[], Any]) -> Response:
    """Answer; what is wrong with a question or a run becomes a message, never a traceback."""
    try:
        return JSONResponse(ask())
    except ConfigurationError as error:
        return _refused(str(error), 400)
    except InrunError as error:
        return _refused(str(error), 503)


def _refused(why: str, status: int) -> Response:
    return JSONResponse({"error": visible(why, 400)}, status)
