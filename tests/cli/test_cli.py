"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import inrun.cli
from inrun.bench.conditions import conditions
from inrun.bench.contestants import entries, under_conditions
from inrun.bench.measure import measure
from inrun.bench.shape import Shape
from inrun.cli.main import COMMANDS, cli, main
from inrun.cli.text import printable
from inrun.methods import METHODS
from inrun.training.loss import next_token_loss

SIZES = {"width": 16, "heads": 2, "layers": 1, "context": 8, "vocab": 50, "batch": 3, "rounds": 1}
SMALL = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from inrun.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
def test_bench_as_json(optimizer: str) -> None:
    result = CliRunner().invoke(cli, ["bench", *SMALL, "--optimizer", optimizer, "--slow-rounds", "1", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    names = [r["name"] for r in data["results"]]
    assert names[:2] == ["plain", "floor"]
    assert set(names[2:]) == {*METHODS, "paper first", "paper second", "one at a time", "torch.func vmap"}
    assert all(r["seconds"] > 0 and r["cpu_seconds"] > 0 and r["peak_bytes"] > 0 for r in data["results"])
    assert data["results"][0]["relative"] == 1.0
    assert data["shape"]["optimizer"] == optimizer


@pytest.mark.parametrize("model", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_bench_of_a_transformers_model_as_a_table(model: str) -> None:
    result = CliRunner().invoke(cli, ["bench", *SMALL, "--model", model, "--slow-rounds", "0"])
    assert result.exit_code == 0, result.output
    assert "of floor" in result.output
    assert "peak memory" in result.output
    assert "vmap" not in result.output


def test_bench_measures_in_a_process_of_its_own() -> None:
    """The command itself, as people run it (the allocator setting of the bench stays in its process)."""
    result = run("bench", *SMALL, "--slow-rounds", "0", "--only", "first", "--json")
    assert result.returncode == 0, result.stderr
    names = [r["name"] for r in json.loads(result.stdout)["results"]]
    assert names == [e.name for e in entries(Shape()) if e.name in ("plain", "floor", "first", "paper first")]


def test_every_command_of_the_room_is_in_the_table() -> None:
    listed = CliRunner().invoke(cli, ["--help"]).output
    found = {}
    for path in Path(inrun.cli.__file__).parent.glob("*_command*.py"):
        module = import_module(f"inrun.cli.{path.stem}")
        found |= {name: path.stem for name, value in vars(module).items() if isinstance(value, click.Command)}
    assert found == COMMANDS
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None and command.name == name
        assert f"  {name} " in listed
        assert command.get_short_help_str(40).removesuffix("...") in " ".join(listed.split())


def test_a_command_imports_only_its_own_module() -> None:
    code = """import sys
from inrun.cli.main import main
try:
    main()
finally:
    loaded = {name for name in sys.modules if name.startswith("inrun.cli.") and "command" in name}
    assert loaded == {"inrun.cli.ledger_commands"}, loaded
    assert not {"torch", "pyarrow", "rich"} & set(sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code, "info", "--help"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "steps, rows, samples" in result.stdout


def test_exit_codes_and_messages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ended(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["inrun", *arguments])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    assert ended("--version") == 0
    assert ended("bench", "--help") == 0 and "Examples" in capsys.readouterr().out
    for arguments, words in (
        (["bench", "--width", "10", "--heads", "3"], "not a multiple"),
        (["bench", "--optimizer", "lion"], "lion"),
        (["bench", "--model", "nonsense"], "nonsense"),
        (["bench", "--device", "cuda"], "no GPU"),
        (["nothing"], "nothing"),
    ):
        assert ended(*arguments) == 2
        assert words in capsys.readouterr().err


def test_printable() -> None:
    assert printable("a\x00b\u202ec\nd", 10) == "a·b·c·d"
    assert printable("abcdef", 4) == "abc…"
    assert printable(b"\xff", 3) == "·"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("model", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_bench_under_conditions(model: str) -> None:
    """Every condition has a yardstick of its own, and what is scored under it is relative to that."""
    shape = Shape(model=model, width=16, heads=2, layers=1, context=8, vocab=50, batch=3)
    lines = [e for e in under_conditions(shape, backend="eager") if model == "gpt" or "compile" not in e.name]
    results = {r.name: r for r in measure(shape, lines, rounds=1, slow_rounds=0)}
    names = ["bf16 autocast", *(["torch.compile"] if model == "gpt" else []), "checkpointing"]
    for name in names:
        plain, scored = (results[f"{name}: {what}"] for what in ("plain", "first"))
        assert plain.against == "plain"
        assert scored.against == plain.name
        assert scored.relative == pytest.approx(plain.seconds / scored.seconds)
    torch._dynamo.reset()


def test_bench_of_one_condition_as_a_table() -> None:
    result = CliRunner().invoke(cli, ["bench", *SMALL, "--conditions", "--only", "checkpointing: first"])
    assert result.exit_code == 0, result.output
    assert "checkpointing: plain" in result.output and "checkpointing: first" in result.output
    assert "autocast" not in result.output


def test_checkpointing_in_the_bench_changes_nothing_but_memory() -> None:
    shape = Shape(width=16, heads=2, layers=2, context=8, vocab=50, batch=3, dtype="float64")
    rows = shape.rows(3, 0)
    under = next(c for c in conditions() if c.name == "checkpointing")
    a, b = shape.build(), under.prepare(shape.build())
    for model in (a, b):
        next_token_loss(model, rows).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert type(a) is not type(b)
