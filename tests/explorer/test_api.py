"""Every endpoint: what it answers, whom it refuses, and what hostile names and questions do to it."""

from __future__ import annotations

import json
import time

import pytest
from starlette.testclient import TestClient

from explorer_runs import PATIENCE, SAMPLES, SOON, Written, finished, numbered
from explorer_serving import TOKEN
from inrun.errors import ConfigurationError, LedgerError
from inrun.explorer.app import ASSETS, build_app
from inrun.explorer.server import opened
from inrun.ledger import Ledger, StepRecord
from report_hostile import SETS, hostile_run
from report_payloads import PAYLOADS

HERE = "http://127.0.0.1:8765"
RUN = "/api/runs/0"
APIS = ["/api/runs", "/api/status", f"{RUN}/samples", f"{RUN}/sample?id=1", f"{RUN}/values?column=c:domain", f"{RUN}/scatter"]
APIS += [f"{RUN}/groups?by=c:domain", f"{RUN}/curves", f"{RUN}/marks.jsonl", "/api/compare?a=0&b=1"]


def client_of(found, known: bool = True, **more) -> TestClient:
    made = TestClient(build_app(found.snapshots, found.marks, token=TOKEN, **more), base_url=HERE, follow_redirects=False)
    if known:
        assert made.get(f"/?token={TOKEN}").status_code == 200
    return made


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    for name, window in (("first", None), ("second", 3)):
        finished(folder / name, 9, window=window)
    with opened([folder / "first", folder / "second"], every=3600) as runs:
        yield runs


@pytest.fixture
def client(found):
    return client_of(found)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    with opened([hostile_run(tmp_path_factory.mktemp("api") / "<b>hostile<b>")], every=3600) as runs:
        yield client_of(runs)


def page(client, run=0, **asked):
    if "filters" in asked:
        asked["filters"] = json.dumps(asked["filters"])
    answer = client.get(f"/api/runs/{run}/samples", params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


# What is answered


def test_runs_and_status(client):
    told = client.get("/api/runs").json()
    first, second = told["runs"]
    assert [s["name"] for s in first["sets"]] == ["code", "docs"] and first["sets"][0]["folds"] == 2
    assert (first["credit"], second["credit"]) == ("step", "whole")
    assert {c["name"]: c["kind"] for c in first["columns"]}["tokens"] == "number"
    assert first["steps"] == 9 and first["last_step"] == 8 and first["at_work"] is False and first["error"] is None
    assert client.get("/api/status").json()["runs"][0]["version"] == first["version"]


def test_pages_are_sorted_and_whole(client):
    every = page(client, limit="200", set="docs")
    assert every["total"] == SAMPLES == len(every["rows"])
    scores = [r["score"] for r in every["rows"] if r["score"] is not None]
    assert scores == sorted(scores, reverse=True)
    up = page(client, limit="200", set="docs", order="up")["rows"]
    assert [r["score"] for r in up if r["score"] is not None] == scores[::-1]
    pieces = [page(client, limit="5", offset=str(k), set="docs")["rows"] for k in (0, 5, 10)]
    assert [r["id"] for p in pieces for r in p] == [r["id"] for r in every["rows"]]
    assert page(client, offset="500")["rows"] == [] and page(client, offset="500")["total"] == SAMPLES
    for sort in ("id", "c:domain", "c:tokens", "c:good", "s:times_used", "s:last_step", "s:score:code", "s:pending"):
        assert len(page(client, sort=sort)["rows"]) == SAMPLES, sort
    assert [r["id"] for r in page(client, sort="id", order="up")["rows"]] == [str(i) for i in range(SAMPLES)]


def test_search_and_filters(client):
    assert [r["id"] for r in page(client, search="zebra RUN", sort="id", order="up")["rows"]] == [str(i) for i in range(SAMPLES)]
    assert page(client, search="number 7 of")["total"] == 1 and page(client, search="doc-11")["rows"][0]["id"] == "11"
    assert page(client, search="no such text")["total"] == 0

    def ids(*filters):
        return [int(r["id"]) for r in page(client, filters=list(filters), sort="id", order="up")["rows"]]

    assert ids(["c:domain", "is", "math"]) == [0, 3, 6, 9]
    assert ids(["c:domain", "not", "math"]) == [i for i in range(SAMPLES) if i % 3]
    assert ids(["c:domain", "empty", ""]) == [2, 5, 8, 11] and ids(["c:domain", "has", "OD"]) == [1, 4, 7, 10]
    assert ids(["c:tokens", "ge", "50"], ["c:tokens", "lt", "70"]) == [5, 6] and ids(["c:tokens", "is", "50"]) == [5]
    assert ids(["c:tokens", "lt", "9" * 300]) == list(range(SAMPLES)) and ids(["id", "gt", "9" * 19]) == []
    assert ids(["c:good", "is", "true"]) == [0, 2, 4, 6, 8, 10] and ids(["id", "gt", "9.5"]) == [10, 11]
    low = ids(["s:score:docs", "lt", "0"])
    assert low == [int(r["id"]) for r in page(client, set="docs", sort="id", order="up")["rows"] if (r["score"] or 0) < 0]


def test_one_sample_over_time(client, found):
    for run, snapshot in enumerate(found.snapshots):
        shown = page(client, run=run, set="code", filters=[["s:times_used", "gt", "0"]])["rows"][0]
        one = client.get(f"/api/runs/{run}/sample", params={"id": shown["id"]}).json()
        assert one["text"].endswith("second line") and {m["name"] for m in one["more"]} == {"id", "domain", "tokens", "good"}
        by_set = [[u for u in one["uses"] if u[0] == k] for k in range(len(snapshot.view.sets))]
        for scores, uses in zip(one["scores"], by_set, strict=True):
            assert sum(u[2] for u in uses) == pytest.approx(scores["score"], rel=1e-6)
            assert sum(u[3] for u in uses) == scores["times_used"]
            assert sum(u[3] for u in uses if u[4]) == scores["pending"]


def test_two_sets(client):
    told = client.get(f"{RUN}/scatter", params={"x": "docs", "y": "code"}).json()
    assert sum(c[2] for c in told["cells"]) == told["samples"] == sum(told["quarters"]) > 0
    assert -1 <= told["rank_correlation"] <= 1 and told["x"][0] <= 0 <= told["x"][1]
    alike = client.get(f"{RUN}/scatter", params={"x": "docs", "y": "docs"}).json()
    assert alike["rank_correlation"] == pytest.approx(1) and alike["correlation"] == pytest.approx(1)
    none = client.get(f"{RUN}/scatter", params={"x": "docs", "y": "code", "search": "nothing like it"}).json()
    assert none["samples"] == 0 and none["cells"] == []


def test_groups_are_those_of_the_queries(client, found):
    from inrun.analysis import queries

    for run, snapshot in enumerate(found.snapshots):
        told = client.get(f"/api/runs/{run}/groups", params={"by": "c:domain", "set": "code", "stages": "3"}).json()
        want = queries.groups(snapshot.reader, "domain", "code", stages=3).to_pylist()
        names = {None: "(no value)"}
        for row in want:
            group = next(g for g in told["groups"] if g["name"] == names.get(row["group"], row["group"]))
            assert group["totals"][row["stage"]] == pytest.approx(row["total"], abs=1e-9)
            assert group["uses"][row["stage"]] == row["uses"]
        assert told["edges"] == [0, 3, 6, 9]


def test_curves_and_comparison(client):
    told = client.get(f"{RUN}/curves").json()["curves"]
    assert [c["set"] for c in told] == ["code", "docs"] and told[0]["points"][0] == [0, 3.0] and len(told[0]["points"]) == 9
    for key in ("id", "c:id"):
        asked = {"a": "0", "b": "1", "x": "docs", "y": "code", "key": key}
        both = client.get("/api/compare", params=asked).json()
        assert both["samples"] == sum(c[2] for c in both["cells"]) > 5 and "id" in both["keys"]
        gaps = [abs(m["gap"]) for m in both["moved"]]
        assert gaps == sorted(gaps, reverse=True) and len(gaps) == both["samples"]


def test_ids_that_mean_other_samples_are_not_compared(tmp_path):
    every = list(range(12))
    runs = [numbered(tmp_path / "all", every), numbered(tmp_path / "same", every), numbered(tmp_path / "less", every[2:])]
    with opened(runs, every=3600) as found:
        client = client_of(found)

        def compared(b, **more):
            return client.get("/api/compare", params={"a": "0", "b": str(b), **more}).json()

        same, less, forced = compared(1), compared(2), compared(2, key="id")
        assert (same["key"], same["others"], same["samples"]) == ("id", 0, 36)
        assert (less["key"], less["others"], less["samples"]) == ("c:document", 30, 10)
        assert less["correlation"] == pytest.approx(1.0) and {m["key"] for m in less["moved"]} == {f"d{n}" for n in every[2:]}
        assert (forced["key"], forced["others"], forced["samples"]) == ("id", 30, 30)  # as asked, and said
    plain = [tmp_path / name for name in ("one", "two")]
    for path, start in zip(plain, (0, 1), strict=True):
        with Ledger(path) as ledger:
            ledger.write(StepRecord(0, [0, 1], {"v": [1.0, 2.0]}, [{"step": 0, "validation": "v"}]))
            if start:
                ledger.register_samples([{"sample_id": 0, "text": "a"}, {"sample_id": 1, "text": "b"}])
    with opened(plain, every=3600) as found:
        told = client_of(found).get("/api/compare", params={"a": "0", "b": "1"}).json()
        assert (told["key"], told["others"], told["samples"]) == ("id", None, 2)


def test_values(client):
    told = client.get(f"{RUN}/values", params={"column": "c:domain"}).json()
    assert {v["value"]: v["samples"] for v in told["values"]} == {"math": 4, "code": 4} and not told["more"]


def test_a_run_being_written_shows_new_steps(tmp_path):
    run = Written(tmp_path / "run")
    with opened([run.path], every=0.2) as found:
        client = client_of(found)
        assert client.get("/api/status").json()["runs"][0]["at_work"] is True
        assert page(client)["total"] == 0
        for steps in (1, 3):
            run.steps(steps)
            until = time.monotonic() + PATIENCE
            while client.get("/api/status").json()["runs"][0]["last_step"] != run.step - 1:
                assert time.monotonic() < until
                time.sleep(0.05)
            assert found.snapshots[0].view.read_at - run.on_disk_at() < SOON
            assert page(client)["total"] > 0
    run.ledger.close()


# Who is refused


@pytest.mark.parametrize("path", [*APIS, "/", "/assets/main.js", "/nothing"])
def test_token_is_needed(found, path):
    stranger = client_of(found, known=False)
    assert stranger.get(path).status_code == 403
    assert stranger.get(path, params={"token": "wrong"}).status_code == 403
    assert stranger.get(path, headers={"cookie": f"inrun={TOKEN}"}).status_code == 403
    assert stranger.get(path, headers={"authorization": "token wrong"}).status_code == 403
    assert stranger.get(path, headers={"authorization": f"token {TOKEN}"}).status_code in (200, 404)
    if path != "/":  # a token in an address is taken where the page is opened, and nowhere else
        assert stranger.get(path, params={"token": TOKEN}).status_code == 403


def test_cookie(found):
    answer = client_of(found, known=False).get(f"/?token={TOKEN}")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Domain" not in cookie
    assert TOKEN not in answer.text
    odd = client_of(found, known=False).get("/api/status", headers={"cookie": 'x={"a b": 1}; ' + cookie.split(";")[0]})
    assert odd.status_code == 200
    assert "set-cookie" not in client_of(found).get("/api/status").headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost@evil.example", "10.0.0.7", ""]
)
def test_foreign_names_are_refused(client, host):
    assert client.get("/api/status", headers={"host": host}).status_code == 400


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8765", "LOCALHOST"])
def test_own_names_are_taken(client, host):
    headers = {"host": host, "authorization": f"token {TOKEN}"}
    assert client.get("/api/status", headers=headers).status_code == 200


def test_other_addresses_only_if_asked_for(found):
    known = {"authorization": f"bearer {TOKEN}"}
    everywhere = client_of(found, known=False, host="0.0.0.0", names=["gpu7"])  # noqa: S104
    for host, status in (("10.0.0.7:8765", 200), ("gpu7", 200), ("evil.example", 400), ("localhost", 200)):
        assert everywhere.get("/api/status", headers={"host": host, **known}).status_code == status, host


def test_origins(client):
    mark = {"ids": ["1"], "mark": "drop"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8765"):
        assert client.post(f"{RUN}/marks", json=mark, headers={"origin": origin}).status_code == 403, origin
        assert client.get("/api/status", headers={"origin": origin}).status_code == 403
    assert client.post(f"{RUN}/marks", json=mark).status_code == 403  # no origin at all
    crossing = {"origin": HERE, "sec-fetch-site": "cross-site"}
    assert client.post(f"{RUN}/marks", json=mark, headers=crossing).status_code == 403
    assert client.get("/api/runs").json()["runs"][0]["marks"] == {}
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, f"{RUN}/marks", headers={"origin": HERE}).status_code == 405


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_ports_cannot_ask_in_our_name(client, site):
    """They are same-site, so that a browser sends our cookie along; and a picture or script of theirs has no Origin."""
    for path in APIS:
        assert client.get(path, headers={"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}).status_code == 403, path
        assert client.get(path, headers={"sec-fetch-site": site, "sec-fetch-mode": "navigate"}).status_code == 403, path
        assert client.get(path, headers={"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}).status_code == 200, path
    link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate"}
    assert client.get(f"/?token={TOKEN}", headers=link).status_code == 200  # a link in a mail or a notebook opens the page
    assert client.get("/", headers={**link, "sec-fetch-mode": "no-cors"}).status_code == 403
    assert client.get("/?token=wrong", headers={**link, "cookie": ""}).status_code == 403


def test_no_question_reaches_a_file(found):
    """Were there a way to put SQL into a question, it would find the store closed: no other file, no change of settings."""
    import duckdb

    con = found.snapshots[0].store.cursor()
    other = found.snapshots[1].reader.files("contributions")[0]
    for sql in (
        f"FROM read_parquet('{other}')",
        "SELECT * FROM read_text('/etc/passwd')",
        "COPY r0.items TO '/tmp/inrun-never.csv'",
        "ATTACH '/tmp/inrun-never.duckdb'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET threads = 1",
    ):
        with pytest.raises(duckdb.Error):
            con.execute(sql)


def test_parts_outside_of_a_run_are_not_read(tmp_path):
    """A ledger from elsewhere may name any file, or have links in it."""
    (tmp_path / "secret").mkdir()
    for number, how in enumerate(("link", "folder", "path")):
        run = finished(tmp_path / f"run{number}", 2)
        (part,) = (run / "samples").glob("*.parquet")
        hidden = tmp_path / "secret" / part.name
        if how == "link":
            part.rename(hidden)
            part.symlink_to(hidden)
        elif how == "folder":
            part.parent.rename(tmp_path / "secret" / "samples")
            part.parent.symlink_to(tmp_path / "secret" / "samples")
        else:
            for file in (run / "manifest").iterdir():
                file.write_bytes(file.read_bytes().replace(b"samples/", b"../secret/samples/"))
        with pytest.raises(LedgerError), opened([run], every=3600):
            pass


def test_trouble_with_a_run_is_told_and_does_not_end_the_following(tmp_path, monkeypatch):
    import duckdb

    run = Written(tmp_path / "run")
    run.steps(1)
    with opened([run.path], every=0.05) as found:
        client, snapshot = client_of(found), found.snapshots[0]

        def status(wanted):
            until = time.monotonic() + PATIENCE
            while not wanted(told := client.get("/api/status").json()["runs"][0]):
                assert time.monotonic() < until, told
                time.sleep(0.02)

        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "_take_in", lambda seen: (_ for _ in ()).throw(duckdb.OutOfMemoryException("no room")))
            run.steps(1)
            status(lambda told: told["error"] == "no room" and told["last_step"] == 0)
        status(lambda told: told["error"] is None and told["last_step"] == 1)
    run.ledger.close()


def test_headers_everywhere(client, found):
    stranger = client_of(found, known=False)
    for answer in (
        client.get("/"),
        client.get("/api/runs"),
        client.get("/assets/kit.js"),
        client.get("/nothing"),
        stranger.get("/"),
    ):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert not [h for h in answer.headers if h.startswith("access-control")]


def test_page_has_no_inline_script(client):
    text = client.get("/").text
    assert "<script>" not in text and "style=" not in text and " onclick" not in text
    for name, (_, _, kind) in ASSETS.items():
        answer = client.get(f"/assets/{name}")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        assert "innerHTML" not in answer.text and "insertAdjacentHTML" not in answer.text
    for name in ("../app.py", "..%2fapp.py", "page.html", ""):
        assert client.get(f"/assets/{name}").status_code == 404


# What cannot be asked


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("samples", {"sort": "c:nothing"}),
        ("samples", {"sort": "score_0; DROP TABLE r0.items"}),
        ("samples", {"sort": "s:score_0"}),
        ("samples", {"sort": 's:score:docs" DESC'}),
        ("samples", {"set": "nothing"}),
        ("samples", {"set": "docs' OR 1=1 --"}),
        ("samples", {"limit": "0"}),
        ("samples", {"limit": "201"}),
        ("samples", {"limit": "5 UNION SELECT 1"}),
        ("samples", {"offset": "-1"}),
        ("samples", {"offset": "１"}),
        ("samples", {"search": "x" * 401}),
        ("samples", {"filters": "{}"}),
        ("samples", {"filters": "[" * 20_000}),
        ("samples", {"filters": '[["c:domain", "is", 1]]'}),
        ("samples", {"filters": '[["c:domain", "is"]]'}),
        ("samples", {"filters": '[["c:domain", "= 1 OR", "x"]]'}),
        ("samples", {"filters": '[["c:tokens", "lt", "1 OR 1=1"]]'}),
        ("samples", {"filters": '[["c:tokens", "lt", "nan"]]'}),
        ("samples", {"filters": '[["c:domain\\" OR 1=1 --", "is", "x"]]'}),
        ("samples", {"filters": json.dumps([["id", "gt", "1"]] * 13)}),
        ("sample", {"id": "99999"}),
        ("sample", {"id": "1 OR 1=1"}),
        ("sample", {}),
        ("sample", {"id": "9" * 20}),
        ("values", {"column": "c:x"}),
        ("values", {"column": "c:domain; SELECT 1"}),
        ("groups", {"by": "c:x"}),
        ("groups", {"by": "domain"}),
        ("groups", {"by": "s:score"}),
        ("groups", {"by": "c:domain", "stages": "1000"}),
        ("scatter", {"x": "nope"}),
    ],
)
def test_bad_questions_are_named(client, path, asked):
    answer = client.get(f"{RUN}/{path}", params=asked)
    assert answer.status_code == 400 and answer.json()["error"]
    assert page(client)["total"] == SAMPLES  # all is still there


def test_unknown_places(client):
    for path in ("/api/runs/2/samples", "/api/compare?a=0&b=7", "/api/compare?a=0&b=1&key=s:score"):
        assert client.get(path).status_code == 400
    for path in ("/api/runs/-1/samples", "/api/runs/x/samples", "/api", "/api/runs/0/nothing"):
        assert client.get(path).status_code == 404
    assert client.get("/api/runs/7/marks.jsonl").status_code == 404


def test_half_a_character_is_refused(client):
    """JSON can spell a lone surrogate; DuckDB cannot take it."""
    filters = '[["c:domain", "is", "\\ud800"]]'
    assert json.loads(filters)[0][2] == "\ud800"
    for path in (f"{RUN}/samples", f"{RUN}/scatter"):
        told = client.get(path, params={"filters": filters})
        assert told.status_code == 400 and "lone surrogate" in told.text


def test_values_of_searches_are_only_bound(client):
    for text in ("' OR 1=1 --", '"; DROP TABLE r0.items; --', "%", "_", "$q0_", "\\", "{v}", "\x00", "\u202e"):
        assert page(client, search=text)["total"] == 0, text
        assert page(client, filters=[["c:domain", "is", text]])["total"] == 0
        assert page(client, filters=[["c:domain", "has", text]])["total"] == 0
    assert page(client)["total"] == SAMPLES


def test_hostile_names_come_out_as_they_are(hostile):
    run = hostile.get("/api/runs").json()["runs"][0]
    assert {s["name"] for s in run["sets"]} == set(SETS) and run["name"] == "<b>hostile<b>"
    assert any("⟨U+202E⟩" in s["shown"] for s in run["sets"]) and not any("\u202e" in s["shown"] for s in run["sets"])
    for name in SETS:
        rows = page(hostile, set=name, sort=f"s:score:{name}", limit="200")["rows"]
        assert len(rows) == 200
        assert hostile.get(f"{RUN}/scatter", params={"x": name, "y": SETS[0]}).json()["samples"] == 200
        assert hostile.get(f"{RUN}/groups", params={"by": "c:owner", "set": name}).status_code == 200
    for payload in PAYLOADS:
        value = page(hostile, filters=[["c:domain", "is", payload]])
        assert value["total"] >= 1 or payload == "", payload
        if payload.strip() and len(payload) <= 400:
            assert page(hostile, search=payload)["total"] >= 1, payload
    for number in range(len(PAYLOADS)):
        assert hostile.get(f"{RUN}/sample", params={"id": str(number)}).status_code == 200
    kinds = {hostile.get(path).headers["content-type"] for path in APIS[:8]}
    assert kinds == {"application/json"}


# Marks


def test_marks_are_kept_shown_and_exported(client):
    own = {"origin": HERE}

    def tell(status=200, **body):
        answer = client.post(f"{RUN}/marks", content=json.dumps(body), headers=own)
        assert answer.status_code == status, answer.text
        return answer.json()

    assert tell(ids=["1", "2", "77"], mark="drop") == {"changed": 2, "marks": {"drop": 2}}  # 77 is nobody
    assert tell(ids=["2"], mark="keep")["marks"] == {"drop": 1, "keep": 1}
    assert {r["id"]: r["mark"] for r in page(client)["rows"] if r["mark"]} == {"1": "drop", "2": "keep"}
    assert (
        page(client, filters=[["mark", "is", "any"]])["total"] == 2
        and page(client, filters=[["mark", "is", "none"]])["total"] == 10
    )
    assert page(client, filters=[["mark", "is", "drop"]])["rows"][0]["id"] == "1"
    assert client.get(f"{RUN}/sample?id=1").json()["mark"] == "drop"
    asked = {"filters": json.dumps([["c:domain", "is", "math"]])}
    assert tell(matching=asked, mark="look") == {"changed": 4, "marks": {"drop": 1, "keep": 1, "look": 4}}
    answer = client.get(f"{RUN}/marks.jsonl")
    assert "attachment" in answer.headers["content-disposition"]
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert {(r["sample_id"], r["mark"]) for r in lines} >= {(1, "drop"), (2, "keep"), (0, "look")}
    assert client.get("/api/runs/1/marks.jsonl").text == ""  # each run has its own
    assert tell(matching={}, mark=None)["marks"] == {}
    for body in (
        {},
        {"ids": ["1"]},
        {"ids": 3, "mark": "drop"},
        {"ids": [1], "mark": "drop"},
        {"ids": ["1"], "mark": "burn"},
        {"ids": ["1"], "mark": 4},
    ):
        tell(400, **body)
    tell(400, ids=["1"], matching={}, mark="drop")
    tell(400, matching={"filters": 3}, mark="drop")
    tell(413, ids=["1" * 5_000_000], mark="drop")
    for text in (b"", b"[]", b"\xff", b"[" * 100_000):
        assert client.post(f"{RUN}/marks", content=text, headers=own).status_code == 400


def test_runs_are_not_written_to(tmp_path):
    run = finished(tmp_path / "run", 4)

    def everything():
        return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(run.rglob("*")) if p.is_file()}

    was = everything()
    with opened([run], tmp_path / "marks.jsonl", every=0.05) as found:
        client = client_of(found)
        for path in APIS[:-1]:
            assert client.get(path).status_code == 200
        client.post(f"{RUN}/marks", json={"ids": ["1"], "mark": "drop"}, headers={"origin": HERE})
        time.sleep(0.2)
    assert everything() == was
    with opened([run], tmp_path / "marks.jsonl", every=3600) as again:
        assert again.marks.of(0) == {1: "drop"}


def test_places_that_cannot_be(tmp_path):
    run = Written(tmp_path / "run")
    run.ledger.close()
    for file, words in ((run.path / "marks.jsonl", "only read"), (tmp_path, "cannot be"), (tmp_path / "no" / "marks", "exists")):
        with pytest.raises(ConfigurationError, match=words), opened([run.path], file):
            pass
    (tmp_path / "bad").write_text("{}\n")
    with pytest.raises(ConfigurationError, match="line 1"), opened([run.path], tmp_path / "bad"):
        pass
    with pytest.raises(ConfigurationError, match="twice"), opened([run.path, run.path]):
        pass
    with pytest.raises(LedgerError), opened([tmp_path]):
        pass
