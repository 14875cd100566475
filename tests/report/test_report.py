"""The report without a browser: what the page says, what it must not hold, its size and its bytes."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from inrun.analysis import queries, summarise
from inrun.cli.main import cli
from inrun.errors import ConfigurationError, InrunError, LedgerError
from inrun.ledger import Ledger, MemoryLedger, StepRecord
from inrun.report import ReportError, build_report
from inrun.report.gather import gather
from inrun.report.page import _plotly
from inrun.report.story import headlines, notices
from inrun.report.text import aligned, digits, number, percent, safe_json, signed, visible
from report_hostile import hostile_run
from report_payloads import PAYLOADS
from report_stories import tell_story

MOST_BYTES = 6_000_000


class Page(HTMLParser):
    """What an HTML parser finds in a page."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.comments: list[str] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.words: list[str] = []
        self._open: str | None = None
        self.raw = path.read_text(encoding="utf-8")
        self.feed(self.raw)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag if tag in self.inside else None
        if self._open:
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def handle_data(self, data: str) -> None:
        if self._open:
            self.inside[self._open][-1] += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def data(self) -> dict:
        return json.loads(self.inside["script"][1])

    @property
    def policy(self) -> str:
        return next(a["content"] for tag, a in self.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")


def account(step, label, **more):
    row = {"step": step, "validation": label, "loss_before": 2.0 - step / 100, "loss_after": None, "data": 0.25, "spread": 0.5}
    return row | {"lr": 0.1, "skipped": None} | more


def simple(path, labels=("v",), steps=6, samples=9, metadata=True, accounts=True, **more):
    rng = np.random.default_rng(1)
    with Ledger(path, about={"method": "step"}) as ledger:
        for step in range(steps):
            values = {x: rng.standard_normal(samples).astype(np.float32) for x in labels}
            rows = [account(step, x, **more) for x in labels] if accounts else []
            ledger.write(StepRecord(step, np.arange(samples), values, rows))
        if metadata:
            ledger.register_samples([{"sample_id": i, "domain": "abc"[i % 3], "text": f"text number {i}"} for i in range(samples)])
    return path


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    return tell_story(tmp_path_factory.mktemp("report") / "story", steps=60, samples=300)


@pytest.fixture(scope="module")
def page(story):
    return Page(build_report(story))


def empty(path):
    Ledger(path).close()
    return path


def all_skipped(path):
    with Ledger(path, about={"method": "first"}) as ledger:
        for step in range(3):
            ledger.write(
                StepRecord(step, np.arange(2), {}, [account(step, "v", loss_before=None, data=None, skipped="loss is nan")])
            )
    return path


def registered_only(path):
    with Ledger(path) as ledger:
        ledger.register_samples([{"sample_id": 0, "domain": "a"}])
    return path


def some_skipped(path):
    with Ledger(path) as ledger:
        for step in range(8):
            skipped = "loss is nan" if step % 2 else None
            values = {} if skipped else {"v": np.ones(3, np.float32)}
            ledger.write(StepRecord(step, np.arange(3), values, [account(step, "v", skipped=skipped)]))
    return path


def left_open(path):
    simple(path)
    (path / "lock-r0").write_text(json.dumps({"pid": 2**22 + 12345, "host": __import__("platform").node()}))
    return path


def saved_from_memory(path):
    ledger = MemoryLedger()
    ledger.write(StepRecord(0, np.arange(3), {"v": np.ones(3, np.float32)}, [account(0, "v")]))
    ledger.save(str(path), {"method": "first"})
    return path


def unlike_columns(path):
    with Ledger(path) as ledger:
        ledger.write(StepRecord(0, np.arange(4), {"v": np.arange(4, dtype=np.float32) - 1}, [account(0, "v")]))
        columns = {"year": [1999, 2001, None, 1999], "good": [True, False, None, True], "note": [None] * 4}
        ledger.register_samples({"sample_id": [0, 1, 2, 3], **columns})
    return path


CASES = {
    "empty": (empty, ["holds no steps yet", "no steps yet"]),
    "registered only": (registered_only, ["holds no steps yet", "0 used, 1 registered"]),
    "all skipped": (all_skipped, ["No step was scored", "Not scored: 3 steps (3: loss is nan)"]),
    "some skipped": (some_skipped, ["Not scored: 4 steps", "0 to 7, 4 not scored", "No metadata was registered"]),
    "no metadata": (lambda p: simple(p, metadata=False), ["No metadata was registered", "9 used, 0 registered"]),
    "no folds": (simple, ["needs folds", "Negative samples"]),
    "folds": (lambda p: simple(p, labels=("v#0", "v#1", "v#2")), ["(3 folds)"]),
    "no audits": (simple, ["no step was audited", "Audit more often (audit_every=1"]),
    "audits": (
        lambda p: simple(p, loss_after=1.5, momentum=0.3, decay=-0.1, residual=0.001),
        ["the books balance", "over 6 audited of 6 steps"],
    ),
    "rounding": (
        lambda p: simple(p, loss_after=1.5, rounding=0.2, residual=0.0),
        ["moves of entries whose gradient is only rounding"],
    ),
    "no accounts": (lambda p: simple(p, accounts=False), ["no step recorded it"]),
    "losses that are no numbers": (lambda p: simple(p, loss_before=float("nan"), loss_after=float("inf")), ["no step recorded it"]),
    "rising loss": (lambda p: simple(p, loss_before=1.0, loss_after=1.5, residual=-1.0), ["too coarse"]),
    "several sets": (lambda p: simple(p, labels=("a", "b", "c")), ["Do validation sets agree?"]),
    "one step": (lambda p: simple(p, steps=1), ["steps 0 to 0"]),
    "one sample": (lambda p: simple(p, samples=1), ["1 used, 1 registered"]),
    "points": (lambda p: simple(p, labels=tuple(f"v[{j}]" for j in range(30))), ["Not shown: 22 more validation sets"]),
    "left open": (left_open, ["The books were not closed", "reaches to step 5"]),
    "saved from memory": (saved_from_memory, ["scored by method first"]),
    "other columns": (unlike_columns, ["Value by year", "Group by"]),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_kind_of_run_gives_a_sensible_page(case, tmp_path, monkeypatch):
    monkeypatch.setattr("inrun.report.page._plotly", lambda: "var Plotly = {};")  # 5 MB less to parse
    make, said = CASES[case]
    page = Page(build_report(make(tmp_path / "run")))
    for words in said:
        assert words in page.text, words
    assert [t for t, _ in page.tags].count("main") == 1
    assert "None" not in page.text.replace("None of", "") and "nan" not in re.sub("loss is nan", "", page.text).split()
    assert page.data["sets"] is not None
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_figures_are_those_of_the_queries(story):
    found = gather(story, by=None, top=20, text=True)
    names = list(found.sets)
    assert names == ["code", "docs"] and set(found.sets.values()) == {4}
    whole = queries.groups(story, "domain").to_pylist()
    groups = found.panels["groups"]
    grouping = SimpleNamespace(**groups["groupings"][0])
    assert [g["column"] for g in groups["groupings"]] == ["domain", "source", "owner"] == found.columns
    for row in whole:
        mine = grouping.whole[names.index(row["validation"])][grouping.names.index(row["group"])]
        assert mine["total"] == pytest.approx(row["total"], rel=1e-4)
        assert (mine["samples"], mine["uses"]) == (row["samples"], row["uses"])
        assert mine["negative"] == round(row["negative_share"] * row["samples"])
        assert mine["clear"] == round(row["clear_share"] * row["samples"])
    for cumulative in (False, True):
        for row in queries.groups(story, "domain", stages=20, cumulative=cumulative).to_pylist():
            mine = grouping.stages[names.index(row["validation"])][grouping.names.index(row["group"])]
            upto = slice(0 if cumulative else row["stage"], row["stage"] + 1)
            assert groups["stages"]["last"][row["stage"]] == row["last_step"]
            assert sum(mine["total"][upto]) == pytest.approx(row["total"], rel=1e-3, abs=1e-7)
            assert sum(mine["uses"][upto]) == row["uses"]
            if cumulative:
                assert sum(mine["new"][upto]) == row["samples"]
    assert found.panels["agreement"]["matrix"][0][1] == pytest.approx(queries.agreement(story, "code", "docs").spearman, abs=1e-3)
    scores = queries.scores(story, "docs").to_pydict()
    docs = found.distributions[1]
    assert docs.samples == len(scores["score"]) and docs.negative == sum(s < 0 for s in scores["score"])
    assert sum(sum(counts) for counts in docs.bars.values()) == docs.samples
    assert docs.clear == sum(s + 2 * e < 0 for s, e in zip(scores["score"], scores["standard_error"], strict=True))
    best = queries.extremes(story, 20, "docs")["sample_id"].to_pylist()
    assert [found.shown.samples[k]["n"] for k in found.shown.top[1]] == [str(i) for i in best]


def test_books_are_those_of_the_summary(story):
    found = gather(story, by=None, top=1, text=True)
    reader = Ledger.open(story)
    for books, truth in zip(
        found.accounts, sorted(summarise(reader.accounts(), "step").sets, key=lambda s: s.validation), strict=True
    ):
        assert (books.name, books.steps, books.audited) == (truth.validation, truth.steps, truth.audited)
        assert books.fall == pytest.approx(truth.fall) and books.judged.relative_residual == pytest.approx(truth.relative_residual)
        measured = {part: value for part, value in books.totals.items() if value is not None}
        assert set(measured) == {"data", "momentum", "decay", "residual"}
        for part, value in measured.items():
            assert value == pytest.approx(getattr(truth, part))
            assert books.audited_curve[part][-1] == pytest.approx(value, rel=1e-4)
        assert (books.judged.verdict, books.judged.advice) == (truth.verdict, truth.advice)
        assert books.judged.audited_share == pytest.approx(truth.audited_share)


def test_headlines_say_what_they_mean(story):
    found = gather(story, by=None, top=1, text=True)
    cards = {h.label: h for h in headlines(found)[0]}
    assert cards["Samples scored"].value == "300" and cards["Optimizer steps"].value == "60"
    assert "two standard errors (4 folds)" in cards["Negative samples"].note
    books = found.accounts[0]
    assert cards["Fall, audited steps"].value == signed(books.fall) and "on 12 of 60 steps" in cards["Fall, audited steps"].note
    error = cards["Method's error"]  # one step in five was audited, all over the run
    assert error.mood == "good" and error.value == "0.2\u00a0%" and "the books balance" in error.note
    assert "of the fall: the books balance" in error.note
    assert notices(found) == []


def test_page_explains_sign_momentum_citation_and_next_steps(page):
    for words in (
        "about a tenth of a sample's push",
        "Positive : the sample lowered",
        "Data Shapley in One Training Run",
        "inrun curate",
        "run ",
    ):
        assert words in page.text, words


def test_duplicates_stand_side_by_side(story):
    shown = gather(story, by=None, top=1, text=True).shown
    assert shown.twin_texts >= 2
    ids = [[shown.samples[k]["n"] for k in t["members"]] for t in shown.twins]
    assert ["90", "91", "92", "93", "94"] in ids and ["55", "56"] in ids  # one of them in capitals


def test_the_same_ledger_gives_the_same_bytes(story, tmp_path):
    first = build_report(story, tmp_path / "a.html").read_bytes()
    assert build_report(story, tmp_path / "b.html").read_bytes() == first
    assert build_report(str(story)).read_bytes() == first  # written into the run: it does not see itself


def test_policy_allows_exactly_what_is_in_the_page(page):
    rules = dict(rule.split(" ", 1) for rule in page.policy.split("; "))
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in page.policy and "http" not in page.policy and "*" not in page.policy
    early, _, plotly, app = page.inside["script"]
    allowed = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in (early, plotly, app)]
    assert rules["script-src"].split() == allowed
    style = f"'sha256-{base64.b64encode(hashlib.sha256(page.inside['style'][0].encode()).digest()).decode()}'"
    assert style in rules["style-src"].split()
    heads = [tag for tag, _ in page.tags[:6]]
    assert heads[:5] == ["html", "head", "meta", "meta", "meta"] and page.tags[3][1].get("http-equiv") == "Content-Security-Policy"


def check_inert(page):
    for tag, attributes in page.tags:
        assert tag not in ("img", "iframe", "svg", "link", "object", "embed", "base", "form", "math", "video", "template"), tag
        assert not any(name.startswith("on") or name in ("style", "src", "srcdoc", "action") for name in attributes), attributes
        if "href" in attributes:
            assert tag == "a" and attributes["href"].startswith("#")
    assert page.comments == []
    assert [t for t, _ in page.tags].count("script") == 4 and len(page.inside["style"]) == 1


def test_nothing_is_loaded(page):
    check_inert(page)


def test_hostile_text_stays_text(tmp_path):
    page = Page(build_report(hostile_run(tmp_path / "run"), title=PAYLOADS[0]))
    check_inert(page)
    shown = json.dumps(page.data, ensure_ascii=False)
    assert "<script>window.__pwned=1</script>" in shown  # whole, in the data
    assert "<" not in page.inside["script"][1] and "\u2028" not in page.raw and "\x00" not in page.raw
    raw = page.raw.replace(page.inside["script"][2], "")  # plotly.js has its own characters
    assert not {c for c in raw if c in "\u202e\u2066\u200f\x1b\x9b\x7f\ufeff"}
    texts = {s.get("t") for s in page.data["shown"]["samples"]}
    assert {visible(p, 600) for p in PAYLOADS if p.strip()} & texts
    assert "49" not in [s.get("t") for s in page.data["shown"]["samples"]]  # {{7*7}}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\x00b\x1b[31m", "a⟨U+0000⟩b⟨U+001B⟩[31m"),
        ("\u202eevil", "⟨U+202E⟩evil"),
        ("x\u2028y", "x⟨U+2028⟩y"),
        ("\x9b\x7f", "⟨U+009B⟩⟨U+007F⟩"),
        ("one\r\ntwo\ttabs", "one\ntwo\ttabs"),
        ("👩‍👧 שלום", "👩‍👧 שלום"),
        ("abcdef", "abc…"),
        (None, "None"),
    ],
)
def test_visible(text, shown):
    assert visible(text, 4 if text == "abcdef" else None) == shown


def test_safe_json_comes_back_as_it_was():
    data = {"</script><!--": ["&amp;\u2028\u2029", 1.5, None, "\x00"]}
    text = safe_json(data)
    assert json.loads(text) == data and not set("<>&\u2028\u2029\x00") & set(text)
    with pytest.raises(ValueError):
        safe_json(float("nan"))


def test_numbers_for_people():
    assert [signed(x) for x in (0.12345, -2.0, 0.0, 1e-7, None)] == ["+0.123", "−2", "0", "+1.00e−7", "not measured"]
    assert [number(x) for x in (5.6123, 1234567.0, 12345.0)] == ["5.61", "1.23e6", "12345"]
    assert [percent(x) for x in (0.0, 0.123, 0.0999, 0.0123, 0.00001, None)] == [
        "0\u00a0%",
        "12\u00a0%",
        "10\u00a0%",
        "1.2\u00a0%",
        "0.001\u00a0%",
        "not measured",
    ]
    assert aligned([1.0, -0.001234]) == ["+1.000", "−0.001"] and aligned([]) == [] and aligned([0.0]) == ["+0"]
    assert digits(float("nan")) is None and digits(123456.789) == 123460.0 and str(digits(-0.0)) == "0.0"


def test_a_run_in_progress_says_so(tmp_path):
    with Ledger(tmp_path / "run", flush_every=1) as ledger:
        for step in range(4):
            ledger.write(StepRecord(step, np.arange(3), {"v": np.ones(3, np.float32)}, [account(step, "v")]))
        page = Page(build_report(tmp_path / "run"))
    assert "in progress: up to step 3" in page.text
    assert "in progress" not in Page(build_report(tmp_path / "run")).text


def test_metrics_are_drawn_where_there_are_some(tmp_path):
    run = simple(tmp_path / "run")
    lines = [{"step": s, "loss": 3.0 - s / 1000, **({"validation": {"docs": 2.0}} if s % 100 == 0 else {})} for s in range(1000)]
    lines += [{"step": 999, "loss": 7.0}, {"step": 5, "loss": float("nan")}]  # a resumed run says a step again
    text = "\n".join(map(json.dumps, lines)) + '\nnot json\n[1]\n{"loss": 1}\n{"step": "x", "loss": 1}\n{"step": 1000, "lo'
    (run / "metrics.jsonl").write_text(text)
    metrics = Page(build_report(run)).data["metrics"]
    assert len(metrics["training"]["step"]) == 300 and metrics["training"]["step"][-1] == 999
    assert metrics["training"]["loss"][0] == pytest.approx(3.0, abs=0.01) and metrics["training"]["loss"][-1] > 3
    assert [c["name"] for c in metrics["evaluation"]] == ["docs"] and len(metrics["evaluation"][0]["step"]) == 10
    assert gather(run, by=None, top=1, text=True).metrics.unreadable == 5
    (run / "metrics.jsonl").write_text("\n".join(json.dumps({"step": s, "validation": {"v": 2.0 - s / 100}}) for s in range(6)))
    assert Page(build_report(run)).data["metrics"]["evaluation"] == []  # the books say the same


def test_no_text_leaves_texts_out(story, tmp_path):
    found = Page(build_report(story, tmp_path / "a.html", text=False))
    assert not any("t" in s for s in found.data["shown"]["samples"]) and "left out of this page on request" in found.text
    secret = next(s["t"] for s in gather(story, by=None, top=5, text=True).shown.samples)
    assert json.dumps(secret)[1:40] not in found.raw


def test_columns_are_chosen_and_checked(story):
    assert gather(story, by="owner", top=1, text=True).columns == ["owner", "domain", "source"]
    with pytest.raises(ConfigurationError, match="no column 'nope'; they have 'id', 'domain'"):
        build_report(story, by="nope")
    for top in (0, 1001, True, "5"):
        with pytest.raises(ConfigurationError, match="top is"):
            build_report(story, top=top)


def test_many_groups_are_gathered(tmp_path):
    with Ledger(tmp_path / "run") as ledger:
        ids = np.arange(900)
        ledger.write(StepRecord(0, ids, {"v": (ids + 1).astype(np.float32)}, [account(0, "v")]))
        ledger.register_samples({"sample_id": ids.tolist(), "domain": [f"d{i % 300}" for i in ids]})
    grouping = SimpleNamespace(**gather(tmp_path / "run", by=None, top=1, text=True).panels["groups"]["groupings"][0])
    assert len(grouping.names) == 24 and grouping.names[-1] == "277 other groups" and grouping.names[0] == "d299"
    assert len(grouping.stages[0]) == 16 and sum(g["total"] for g in grouping.whole[0]) == pytest.approx(900 * 901 / 2, rel=1e-4)
    assert sum(sum(g["total"]) for g in grouping.stages[0]) == pytest.approx(900 * 901 / 2, rel=1e-4)


def test_size_is_bounded_where_everything_is_long(tmp_path):
    labels = [f"{'<' * 70}{k}" for k in range(9)]
    rng = np.random.default_rng(0)
    n = 2000
    with Ledger(tmp_path / "run", about={f"{k}<&" * 20: "<&>" * 5000 for k in range(50)}) as ledger:
        for step in range(700):
            ids = rng.integers(0, n, 4)
            parts = dict.fromkeys(("data", "rounding", "momentum", "decay", "residual", "spread", "loss_before", "loss_after"))
            rows = [
                {"step": step, "validation": x, **{k: float(v) for k, v in zip(parts, rng.random(8), strict=True)}} for x in labels
            ]
            ledger.write(StepRecord(step, ids, {x: rng.standard_normal(4).astype(np.float32) for x in labels}, rows))
        columns = {c: [f"{'<&' * 60}{i % 50}{c}" for i in range(n)] for c in ("domain", "source", "owner", "kind", "more")}
        ledger.register_samples(
            {"sample_id": list(range(n)), **columns, "text": [f"{i}" + "<\x00" * 3000 for i in range(n)]}, text_preview=0
        )
    (tmp_path / "run" / "metrics.jsonl").write_text(
        "\n".join(
            json.dumps({"step": s, "loss": s / 3, "validation": {f"{k}{'<' * 200}": s / 7 for k in range(20)}}) for s in range(900)
        )
    )
    path = build_report(tmp_path / "run", top=1000)
    assert path.stat().st_size < MOST_BYTES
    assert "Left out to keep this page small" in Page(path).text


def test_files_are_whole_or_absent(story, tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="is a folder"):
        build_report(story, tmp_path)
    assert build_report(story, tmp_path / "new" / "page.html").is_file()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ReportError, match="cannot be written"):
        build_report(story, tmp_path / "file" / "page.html")
    with pytest.raises(LedgerError, match="holds no run"):
        build_report(tmp_path)
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(ReportError, match="disk full"):
        build_report(story, tmp_path / "late.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "new"]


def test_missing_libraries_are_named(story, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ReportError, match=r"pip install 'inrun\[report\]'"):
        build_report(story, tmp_path / "a.html")


def test_missing_plotly_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ReportError, match=r"draws with plotly: pip install 'inrun\[report\]'"):
        _plotly.__wrapped__()


def test_command(story, tmp_path):
    out = tmp_path / "page.html"
    done = CliRunner().invoke(cli, ["report", str(story), "--out", str(out), "--by", "source", "--top", "3", "--no-text", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output) == {"report": str(out), "bytes": out.stat().st_size}
    said = CliRunner().invoke(cli, ["report", str(story), "--out", str(out)]).output
    assert said.startswith(f"written: {out} (") and " MB)" in said
    assert isinstance(CliRunner().invoke(cli, ["report", str(story), "--by", "nope"]).exception, ConfigurationError)
    assert isinstance(CliRunner().invoke(cli, ["report", str(tmp_path)]).exception, InrunError)
    assert CliRunner().invoke(cli, ["report", str(story), "--top", "0"]).exit_code == 2
    assert "Examples:" in CliRunner().invoke(cli, ["report", "--help"]).output


def test_import_is_light():
    code = "import sys, inrun.report; assert not {'torch', 'plotly', 'jinja2'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_large_run_is_no_obstacle(tmp_path):
    """1 million rows of 200,000 samples: R25 asks for less than a minute and 2 GB for more."""
    rng = np.random.default_rng(0)
    n, steps, batch = 200_000, 500, 1000
    with Ledger(tmp_path / "run", about={"method": "step"}) as ledger:
        for step in range(steps):
            values = {x: rng.standard_normal(batch).astype(np.float32) for x in ("a", "b")}
            ledger.write(StepRecord(step, rng.integers(0, n, batch), values, [account(step, x) for x in values]))
        texts = [f"text {i % 190_000} of a large run, long enough to be told apart from others " * 4 for i in range(n)]
        ledger.register_samples({"sample_id": np.arange(n).tolist(), "domain": [f"d{i % 40}" for i in range(n)], "text": texts})
    code = (
        "import sys, time, resource; from inrun.report import build_report; t = time.perf_counter(); "
        "p = build_report(sys.argv[1]); "
        "print(time.perf_counter() - t, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, p.stat().st_size)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True, capture_output=True, text=True)
    seconds, megabytes, size = map(float, done.stdout.split())
    print(f"{seconds:.1f} s, {megabytes:.0f} MB, {size / 1e6:.2f} MB page")
    assert seconds < 60 and megabytes < 2000 and size < MOST_BYTES
