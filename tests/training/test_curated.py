"""curate, then train on what it wrote: the same documents less the dropped ones."""

from __future__ import annotations

import json
import shlex
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import inrun
from inrun.cli.main import cli
from inrun.corpus.sources import find_files
from inrun.errors import ConfigurationError, TrainingError
from inrun.training.config import load_config, make_config
from inrun.training.curated import _as_yaml, trained_run
from inrun.training.session import train
from small_run import corpus, settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curated")
    file = corpus(folder)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for i, row in enumerate(rows):  # columns that inrun knows nothing of
        row |= {"meta": {"url": f"<b>{i}</b>", "n": [i, None]}, "score": "mine"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(make_config(settings(folder, steps=40)))
    return folder


def curate(folder: Path, out: str, *more: str) -> dict:
    result = CliRunner().invoke(cli, ["curate", str(folder / "run"), "--out", str(folder / out), "--json", *more])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.output)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_documents_come_back_whole_and_train_takes_the_kept_ones(folder: Path) -> None:
    said = curate(folder, "out", "-v", "code", "--top-fraction", "0.7")
    kept, dropped = lines(folder / "out" / "kept.jsonl"), lines(folder / "out" / "dropped.jsonl")
    before = lines(folder / "corpus.jsonl")
    assert said["unit"] == "documents" and len(dropped) == said["dropped"] > 0 and len(kept) == said["kept"]
    whole = {row["id"]: row for row in before}
    for row in kept + dropped:
        assert {k: v for k, v in row.items() if k != "inrun"} == whole[row["id"]]
    order = [row["id"] for row in before]
    assert [r["id"] for r in kept] == [i for i in order if i in {r["id"] for r in kept}]
    # Validation documents are in no sample, and stay.
    assert {r["id"] for r in before if r["split"] == "val"} <= {r["id"] for r in kept}
    assert f"""'data.paths=["{folder / "out"}"]'""" in said["command"]

    assert [f.path.name for f in find_files([folder / "out"])] == ["kept.jsonl"]
    assert [f.path.name for f in find_files([folder / "out" / "kept.jsonl"])] == ["kept.jsonl"]
    train(make_config(settings(folder, "again", steps=40, data={"paths": [str(folder / "out")]})))
    trained = {s["document"] for s in inrun.Ledger.open(folder / "again").samples().to_pylist()}
    first = {s["document"] for s in inrun.Ledger.open(folder / "run").samples().to_pylist()}
    assert trained == first - {r["id"] for r in dropped} and trained < first


def test_a_document_is_judged_by_the_sum_over_its_pieces(folder: Path) -> None:
    curate(folder, "sums", "-v", "all")
    reader = inrun.Ledger.open(folder / "run")
    document = {s["sample_id"]: s["document"] for s in reader.samples().to_pylist()}
    folds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    with reader.tables() as tables:
        for sample, label, value in tables.relation("SELECT sample_id, validation, sum(value) FROM uses GROUP BY 1, 2").fetchall():
            if label.startswith("all#"):
                folds[document[sample]][int(label[-1])] += value
    rows = lines(folder / "sums" / "kept.jsonl") + lines(folder / "sums" / "dropped.jsonl")
    told = {r["id"]: r["inrun"] for r in rows if "score" in r["inrun"]}
    assert told.keys() == folds.keys()
    for name, (a, b) in folds.items():
        assert told[name]["score"] == pytest.approx((a + b) / 2, rel=1e-6, abs=1e-12)
        assert told[name]["standard_error"] == pytest.approx(abs(a - b) / 2, rel=1e-5, abs=1e-9)
    dropped = {r["id"] for r in lines(folder / "sums" / "dropped.jsonl")}
    below = {n for n, (a, b) in folds.items() if (a + b) / 2 + max(abs(a - b), told[n].get("estimate_error", 0.0)) < 0}
    assert dropped == below
    # The worse half by the same sums; by single pieces it is another.
    curate(folder, "half", "-v", "all", "--top-fraction", "0.5")
    dropped = {r["id"] for r in lines(folder / "half" / "dropped.jsonl")}
    worse = sorted(folds, key=lambda name: sum(folds[name]))[: len(folds) // 2]
    assert dropped == set(worse) and len(dropped) == len(folds) // 2 > 10
    pieces = Counter(document.values())
    assert dropped != set(sorted(folds, key=lambda name: sum(folds[name]) / pieces[name])[: len(folds) // 2])  # the control


def test_shares_are_of_what_was_scored(folder: Path) -> None:
    said = curate(folder, "shares", "--top-fraction", "0.5", "-v", "code")
    assert said["scored"] < said["kept"] + said["dropped"]
    assert said["dropped"] == said["scored"] - int(np.ceil(0.5 * said["scored"]))
    result = CliRunner().invoke(
        cli, ["curate", str(folder / "run"), "--out", str(folder / "x"), "--top-fraction", "0.5", "-v", "code"]
    )
    assert f"of the {said['scored']} documents with a score, " in result.output
    assert "train on the kept ones:\n  inrun train" in result.output


def test_documents_of_validation_sets_are_not_unused(folder: Path) -> None:
    """They are in no sample, so that nothing could have used them: ``--drop-unused`` leaves them, and training goes on."""
    said = curate(folder, "used", "--drop-unused", "--top-fraction", "0.9", "-v", "code")
    held = {r["id"] for r in lines(folder / "corpus.jsonl") if r["split"] == "val"}
    assert held and held <= {r["id"] for r in lines(folder / "used" / "kept.jsonl")}
    assert said["unused_dropped"] == said["dropped"] - said["scored_dropped"]
    assert said["withheld"] == len(held) and said["unused"] == said["unused_dropped"]
    assert said["scored"] + said["unused"] + said["withheld"] == said["kept"] + said["dropped"]
    train(make_config(settings(folder, "used again", steps=2, data={"paths": [str(folder / "used")]})))


def test_pieces_can_be_left_out(folder: Path) -> None:
    curate(folder, "pieces", "--top-fraction", "0.6", "-v", "code")
    table = pq.read_table(folder / "pieces" / "chunks.parquet")
    kept = {i for i, k in zip(table["sample_id"].to_pylist(), table["kept"].to_pylist(), strict=True) if k}
    data = {"paths": [str(folder / "corpus.jsonl")], "pieces": str(folder / "pieces" / "chunks.parquet")}
    train(make_config(settings(folder, "part", steps=40, data=data)))
    trained = {s["sample_id"] for s in inrun.Ledger.open(folder / "part").samples().to_pylist()}
    assert trained == kept and len(kept) < table.num_rows
    with pytest.raises(ConfigurationError, match="was made for other context .'24', here '16'"):
        train(make_config(settings(folder, "other", data=data, model={"context": 16})))
    with pytest.raises(ConfigurationError, match="is no chunks.parquet"):
        train(make_config(settings(folder, "none", data={**data, "pieces": str(folder / "corpus.jsonl")})))


def test_other_pieces_are_not_resumed(folder: Path, tmp_path: Path) -> None:
    """A chunks.parquet that was written again leaves other pieces out: sample ids mean the same, the order does not."""
    curate(folder, "first", "--top-fraction", "0.6", "-v", "code")
    pieces = tmp_path / "chunks.parquet"
    table = pq.read_table(folder / "first" / "chunks.parquet")
    pq.write_table(table, pieces)
    data = {"paths": [str(folder / "corpus.jsonl")], "pieces": str(pieces)}
    configured = settings(folder, "resumed", steps=10, data=data)
    train(make_config(configured))
    other = table.set_column(table.schema.get_field_index("kept"), "kept", [np.arange(table.num_rows) % 2 == 0])
    pq.write_table(other.replace_schema_metadata(table.schema.metadata), pieces)
    with pytest.raises(TrainingError, match=r"other pieces of the documents .* chunks.parquet of data.pieces"):
        train(make_config(configured | {"steps": 12}), resume=True)
    pq.write_table(table.take(np.random.default_rng(0).permutation(table.num_rows)), pieces)  # the same pieces in another order
    assert train(make_config(configured | {"steps": 12}), resume=True).finished


def test_files_that_are_gone_or_changed_are_named(folder: Path, tmp_path: Path) -> None:
    corpus(tmp_path, documents=30)
    train(make_config(settings(tmp_path, steps=2)))
    args = ["curate", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    (tmp_path / "corpus.jsonl").write_text((tmp_path / "corpus.jsonl").read_text().replace("doc-1", "doc-x"))
    changed = CliRunner().invoke(cli, args)
    assert isinstance(changed.exception, ConfigurationError) and "have changed since it was trained" in str(changed.exception)
    (tmp_path / "corpus.jsonl").unlink()
    gone = CliRunner().invoke(cli, args)
    assert isinstance(gone.exception, ConfigurationError) and "--unit samples" in str(gone.exception)
    assert CliRunner().invoke(cli, [*args, "--unit", "samples"]).exit_code == 0


def invoke(*args: object) -> str:
    result = CliRunner().invoke(cli, [str(a) for a in args])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_what_was_never_used_is_said_as_it_is(tmp_path: Path) -> None:
    """After two steps most documents are unused; those of validation sets are not among them."""
    corpus(tmp_path)
    train(make_config(settings(tmp_path, steps=2)))
    samples = {s["document"] for s in inrun.Ledger.open(tmp_path / "run").samples().to_pylist()}
    said = invoke("curate", tmp_path / "run", "--out", tmp_path / "a", "-v", "code")
    told = json.loads(invoke("curate", tmp_path / "run", "--out", tmp_path / "b", "-v", "code", "--json"))
    assert told["unused"] == len(samples) - told["scored"] > 20 and told["withheld"] == 60 - len(samples) == 10
    assert f"{told['unused']} documents were never used, without a score (kept; --drop-unused drops them)" in said
    assert "10 documents were not there to train on, as those of validation sets" in said
    card = (tmp_path / "a" / "README.md").read_text()
    assert f"- {told['unused']} documents were never used" in card and "- 10 documents were not there to train on" in card
    said = invoke("curate", tmp_path / "run", "--out", tmp_path / "c", "-v", "code", "--drop-unused")
    assert "never used, without a score (dropped)" in said and "unless" not in said and "still" not in said


def test_what_may_still_change_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with inrun.Ledger(tmp_path / "run", about={"method": "whole"}) as ledger:
        ledger.register_samples([{"sample_id": 1, "text": "a"}, {"sample_id": 2, "text": "b"}])
        for step in range(3):
            ledger.write(inrun.ledger.StepRecord(step, [1, 2], {"v": [0.5, -0.5]}, [{"step": step, "validation": "v"}]))
        ledger.flush()
        said = invoke("curate", tmp_path / "run", "--out", tmp_path / "a")
        assert "training is still writing this run" in said and "credit is still coming in for 3 steps" in said
        assert json.loads(invoke("curate", tmp_path / "run", "--out", tmp_path / "b", "--json"))["at_work"] is True
    said = invoke("curate", tmp_path / "run", "--out", tmp_path / "c")
    assert "still writing" not in said and "credit is still coming in for 3 steps" in said


@pytest.mark.parametrize("name", ["plain", "2024", "a, b", "x: y", "it's [1] #2", 'say "hi"', "null", "1e3", "é😀", "tab\there"])
def test_the_printed_command_trains_whatever_the_names(folder: Path, name: str) -> None:
    said = curate(folder, name, "-v", "code", "--top-fraction", "0.7", "--force")
    program, command, *words = shlex.split(said["command"])
    assert (program, command) == ("inrun", "train")
    read = load_config(words[0], words[1:])
    assert (read.data.paths, read.run) == ([str(folder / name)], str(folder / "run-curated"))
    read = load_config(None, ["data.paths=[x]", "scoring.enabled=false", f"run={_as_yaml(name)}"])
    assert read.run == name and _as_yaml("runs/mine") == "runs/mine"


def test_a_replay_is_curated_by_the_documents_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus(tmp_path)
    (tmp_path / "new.jsonl").write_text('{"text": "the loop of a list is a value"}\n{"text": "return the sum of it"}\n')
    monkeypatch.chdir(tmp_path)
    base = settings(tmp_path) | {"run": "runs/first", "data": {"paths": ["corpus.jsonl"]}}
    train(make_config(base))
    invoke("replay", "runs/first", "--validation", "new.jsonl", "--quiet", "--no-check")
    told = json.loads(invoke("curate", "runs/first/replays/new", "--out", "kept", "--top-fraction", "0.5", "--json"))
    assert told["unit"] == "documents" and told["withheld"] == 10
    rows, whole = lines(tmp_path / "kept" / "kept.jsonl"), {r["id"]: r for r in lines(tmp_path / "corpus.jsonl")}
    assert all({k: v for k, v in row.items() if k != "inrun"} == whole[row["id"]] for row in rows) and told["dropped"] > 10
    words = shlex.split(told["command"])
    invoke(*words[1:], "steps=2", "--quiet")
    trained = {s["document"] for s in inrun.Ledger.open(tmp_path / "runs" / "first-curated").samples().to_pylist()}
    assert trained == {r["id"] for r in rows if r["split"] == "train"}

    (tmp_path / "runs").rename(tmp_path / "moved")  # together
    assert trained_run(Path("moved/first/replays/new")) == tmp_path / "moved" / "first"
    (tmp_path / "moved" / "first" / "config.yaml").unlink()
    with pytest.raises(ConfigurationError, match=r"is a replay of .*first, which has its documents and is not there any more"):
        trained_run(Path("moved/first/replays/new"))


def test_what_was_held_out_never_becomes_training_data(folder: Path) -> None:
    args = ["curate", str(folder / "run"), "--out", str(folder / "nothing"), "-v", "code", "--keep", "score > 1e9", "--drop-unused"]
    refused = CliRunner().invoke(cli, args)
    assert isinstance(refused.exception, ConfigurationError) and not (folder / "nothing").exists()
    assert "drops all 50 documents that were there to train on" in str(refused.exception)
    assert CliRunner().invoke(cli, [*args, "--unit", "samples"]).exit_code == 0


def test_relative_paths_start_where_training_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir(), away.mkdir()
    corpus(home)
    monkeypatch.chdir(home)
    (home / "new.jsonl").write_text('{"text": "the loop of a list is a value"}\n{"text": "return the sum of it"}\n')
    base = settings(home) | {"run": "runs/first", "data": {"paths": ["corpus.jsonl"]}}
    base["validation"]["own"] = {"paths": ["new.jsonl"], "rows": 1}
    train(make_config(base))
    monkeypatch.chdir(away)
    run = "../home/runs/first"
    told = json.loads(invoke("curate", run, "--out", "kept", "-v", "code", "--top-fraction", "0.5", "--json"))
    assert told["unit"] == "documents" and [p.name for p in away.iterdir()] == ["kept"]
    cd, where, *_, words = told["command"].split(" ", 3)
    assert (cd, where) == ("cd", str(home))
    monkeypatch.chdir(home)
    invoke(*shlex.split(words)[1:], "steps=2", "--quiet")
    assert (home / "runs" / "first-curated").is_dir()

    monkeypatch.chdir(away)
    (home / "corpus.jsonl").rename(home / "other.jsonl")
    gone = CliRunner().invoke(cli, ["curate", run, "--out", "again", "-v", "code"])
    assert isinstance(gone.exception, ConfigurationError) and [p.name for p in away.iterdir()] == ["kept"]
    assert f"relative to where training began, and were looked for in {home} and in {away}" in str(gone.exception)
    (home / "other.jsonl").rename(away / "corpus.jsonl")  # files that lie here now
    assert json.loads(invoke("curate", run, "--out", "again", "-v", "code", "--json"))["unit"] == "documents"
