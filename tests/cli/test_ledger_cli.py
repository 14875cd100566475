"""The commands that ask the ledger."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from click.testing import CliRunner

from inrun.cli.ledger_tables import cell
from inrun.cli.main import cli
from inrun.errors import ConfigurationError, InrunError, LedgerError
from inrun.ledger import Ledger, MemoryLedger, StepRecord

PAYLOADS = [
    "\x1b[2J\x1b[31mred",
    "\u202eevil\u2066",
    "=cmd()",
    "+1",
    "-1",
    "@x",
    "\t=1",
    "\r\n=2",
    "a\nb\x00c",
    "[bold]x[/bold]",
    "\x9b31m",
    "\x7f",
]
#: Every kind of output of every command.
COMMANDS = [
    ["scores"],
    ["scores", "--top", "3"],
    ["scores", "--bottom", "3", "--view", "rank"],
    ["scores", "--all"],
    ["scores", "--agreement", "v", "w\x1b[31m"],
    ["groups"],
    ["groups", "--by", "owner", "--view", "standardised"],
    ["groups", "--stages", "3"],
    ["groups", "--stages", "3", "--cumulative", "--view", "per_lr"],
    ["info"],
    ["audit"],
    ["shares", "--pool", "100", "-v", "v", "--currency", "\x1b[31mEUR"],
]


def account(step, label, **more):
    row = {"step": step, "validation": label, "loss_before": 2.0, "loss_after": 1.0, "data": 0.25, "spread": 0.5, "lr": 0.1}
    return row | {"skipped": None} | more


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("cli") / "run"
    rng = np.random.default_rng(0)
    n = len(PAYLOADS)
    with Ledger(path, about={"method": "first\x1b[31m", "model": "\u202e"}) as ledger:
        for step in range(9):
            values = {x: rng.standard_normal(n + 1).astype(np.float32) for x in ("v", "w\x1b[31m", "f#0", "f#1")}
            ledger.write(StepRecord(step, np.arange(n + 1), values, [account(step, x) for x in values]))
        ledger.write(StepRecord(9, np.arange(2), {}, [account(9, "v", skipped="\x1b[31mnan\u202e")]))
        ledger.register_samples([{"sample_id": i, "id": p, "domain": p, "owner": p, "text": p} for i, p in enumerate(PAYLOADS)])
    return str(path)


def invoke(command, run, *more):
    return CliRunner().invoke(cli, [command[0], run, *command[1:], *more])


def raw(text: str) -> set[str]:
    """Characters that a terminal could act on."""
    return {c for c in text if (unicodedata.category(c)[0] == "C" or c in "\u2028\u2029") and c != "\n"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("output", ["", "--json", "--csv"])
def test_nothing_reaches_the_terminal_raw(run, command, output) -> None:
    if command[0] in ("info", "audit") and output == "--csv":
        return
    result = invoke(command, run, *([output] if output else []))
    assert result.exit_code == 0, (result.output, result.exception)
    assert not raw(result.output)
    if output == "--json":
        json.loads(result.stdout)
    if output == "--csv" or (command == ["scores", "--all"] and not output):
        rows = list(csv.reader(io.StringIO(result.stdout)))
        assert len({len(r) for r in rows}) == 1
        for text in (c for r in rows for c in r):
            assert not text.startswith(("=", "@", "\t", "\r", "+")), text
            assert not text.startswith("-") or float(text) <= 0


def test_the_check_above_can_fail() -> None:
    assert raw("a\x1b[31m") == {"\x1b"}
    assert raw("\u202ea") == {"\u202e"}
    assert raw("a\nb") == set()


def test_json_keeps_texts_whole(run) -> None:
    rows = json.loads(invoke(["scores", "--top", "20", "-v", "v"], run, "--json").stdout)["rows"]
    assert {r["text"] for r in rows} == {*PAYLOADS, None}
    groups = json.loads(invoke(["groups", "-v", "v"], run, "--json").stdout)["rows"]
    assert {g["group"] for g in groups} == {*PAYLOADS, None}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("=1", "'=1"),
        ("  =1", "'  =1"),
        ("+x", "'+x"),
        ("-x", "'-x"),
        ("@x", "'@x"),
        ("\tx", "'\\tx"),
        ("\rx", "'\\rx"),
        ("＝1", "'＝1"),
        ("a=1", "a=1"),
        (-1.5, -1.5),
        (-3, -3),
        (True, True),
        (None, ""),
        (float("nan"), ""),
        ("é\u202e", "é\\u202e"),
        ("\x7f", "\\u007f"),
    ],
)
def test_csv_cells(value, shown) -> None:
    assert cell(value) == shown


def test_scores_say_what_the_api_says(run) -> None:
    reader = Ledger.open(run)
    for view in ("plain", "rank"):
        rows = json.loads(invoke(["scores", "--view", view], run, "--json").stdout)["rows"]
        assert rows == reader.scores(view=view).to_pylist()
    table = list(csv.DictReader(io.StringIO(invoke(["scores", "--all", "-v", "v"], run, "--csv").stdout)))
    assert [float(r["score"]) for r in table] == reader.scores(validation="v")["score"].to_pylist()


def test_tables_for_people(run) -> None:
    text = invoke(["scores", "--top", "2", "-v", "f"], run).output
    assert "f: highest scores" in text
    assert "± error" in text
    assert "rank agreement (Spearman) of 'f' and 'v' over 13 samples" in invoke(["scores"], run).output
    text = invoke(["groups"], run).output
    assert "(no value)" in text
    assert "1 used samples have no metadata" in text
    assert "clear of error" in text
    text = invoke(["info"], run).output
    for words in ("10 (0 to 9); 1 not scored", "f (2 folds)", "13 used, 12 registered, 1 without metadata", "468 contributions"):
        assert words in text
    text = invoke(["shares", "--pool", "100", "-v", "v", "--currency", "EUR"], run).output
    assert "(no owner)" in text
    assert "largest remainder" in text
    assert "25.0 % of it; momentum carries" in re.sub(r"\s+", " ", text)


def test_shares_sum_to_the_cent_in_every_output(run) -> None:
    data = json.loads(invoke(["shares", "--pool", "99.97", "-v", "v", "--include-unowned"], run, "--json").stdout)
    assert sum(r["cents"] for r in data["rows"]) == 9997
    rows = list(csv.DictReader(io.StringIO(invoke(["shares", "--pool", "99.97", "-v", "v"], run, "--csv").stdout)))
    assert sum(round(100 * float(r["amount"])) for r in rows) == 9997


def test_curate(run, tmp_path) -> None:
    result = invoke(["curate", "--out", str(tmp_path / "a"), "-v", "f"], run)
    assert result.exit_code == 0, result.output
    assert not raw(result.output)
    assert "samples are kept" in result.output
    data = json.loads(
        invoke(["curate", "--out", str(tmp_path / "b"), "--top-fraction", "0.5", "--by", "owner"], run, "--json").stdout
    )
    assert (data["kept"], data["dropped"]) == (6, 6)
    for file in (tmp_path / "a").iterdir():
        assert not raw(file.read_text())


def test_audit_reads_both_kinds_of_folders(tmp_path) -> None:
    memory = MemoryLedger()
    with Ledger(tmp_path / "disk", about={"method": "first"}) as ledger:
        for step in range(3):
            record = StepRecord(step, np.array([1]), {"v": np.array([1], np.float32)}, [account(step, "v")])
            memory.write(record)
            ledger.write(record)
    memory.save(tmp_path / "saved", {"method": "first"})
    first, second = (invoke(["audit"], str(tmp_path / name)) for name in ("disk", "saved"))
    assert first.exit_code == 0, first.output
    assert first.output == second.output
    assert "v: method first, 3 steps, 3 audited" in first.output


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["scores", "-v", "nosuch"], ConfigurationError, "no validation set 'nosuch'"),
        (["scores", "--top", "1", "--all"], ConfigurationError, "different questions"),
        (["scores", "--json", "--csv"], ConfigurationError, "two different outputs"),
        (["scores", "--agreement", "v", "nosuch"], ConfigurationError, "nosuch"),
        (["groups", "--by", "colour"], ConfigurationError, "no column 'colour'"),
        (["groups", "--cumulative"], ConfigurationError, "needs stages"),
        (["shares", "--pool", "0", "-v", "v"], ConfigurationError, "positive amount"),
        (["shares", "--pool", "10"], ConfigurationError, "several validation sets"),
        (["curate", "--out", "OUT", "--keep", "score >"], ConfigurationError, "cannot be read"),
    ],
)
def test_wrong_usage(run, arguments, error, words, tmp_path) -> None:
    arguments = [str(tmp_path / "out") if a == "OUT" else a for a in arguments]
    result = invoke(arguments, run)
    assert isinstance(result.exception, error)
    assert words in str(result.exception)
    assert not raw(str(result.exception))
    assert not result.stdout


@pytest.mark.parametrize(
    "command",
    [["scores"], ["scores", "--json"], ["groups"], ["shares", "--pool", "1"], ["curate", "--out", "never"]],
    ids=" ".join,
)
def test_an_empty_ledger_and_none_at_all(command, tmp_path) -> None:
    with Ledger(tmp_path / "empty") as ledger:
        ledger.register_samples([{"sample_id": 1, "domain": "a", "owner": "b"}])
    result = invoke(command, str(tmp_path / "empty"))
    assert isinstance(result.exception, LedgerError)
    assert "no contributions yet" in str(result.exception)
    (tmp_path / "folder").mkdir()
    assert "holds no run" in str(invoke(command, str(tmp_path / "folder")).exception)
    (tmp_path / "folder" / "config.yaml").write_text("steps: 10")  # as `inrun train` writes it, before it reads its data
    assert "has no books yet: its training has only just begun" in str(invoke(command, str(tmp_path / "folder")).exception)


def test_a_newer_schema(run, tmp_path) -> None:
    with Ledger(tmp_path / "run"):
        pass
    about = tmp_path / "run" / "run.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "schema": 99}))
    for command in (["scores"], ["groups"], ["info"], ["audit"], ["shares", "--pool", "1"]):
        error = invoke(command, str(tmp_path / "run")).exception
        assert isinstance(error, InrunError), command
        assert "schema 99" in str(error)


def test_exit_codes(run, tmp_path) -> None:
    def code(*arguments):
        program = "from inrun.cli.main import main; main()"
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    assert code("info", run)[0] == 0
    assert code("groups", run, "--by", "colour")[0] == 2
    assert code("scores", str(tmp_path / "nosuch"))[0] == 2
    status, message = code("scores", str(tmp_path))
    assert status == 1
    assert message.count("\n") == 1


@pytest.mark.parametrize("command", ["scores", "groups", "info", "audit", "curate", "shares"])
def test_help_has_examples(command) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
