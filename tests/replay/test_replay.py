"""`inrun replay`: what arrives late is scored as if it had been there, and guesses are said to be guesses."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import inrun
from inrun.cli.main import main
from inrun.errors import ConfigurationError, TrainingError
from inrun.ledger.verify import verify
from inrun.replay import PINNED
from inrun.replay.replayer import Look, Replayer
from inrun.replay.score import choose_steps, replay
from inrun.replay.source import open_source
from inrun.replay.study import sampled_steps, study, thinnings, whole_stretches
from inrun.replay.viewpoints import Stage, Viewpoint, anchors_of, viewpoint_of
from inrun.training.checkpoint import checkpoints_of
from inrun.training.config import ValidationSet, make_config
from inrun.training.session import train
from small_run import corpus, settings

#: Clipping that bites, warm-up, two microbatches, a set in folds, decay on matrices only; dropout where a test wants it.
HARD = {"optimizer": {"clip": 0.3, "weight_decay": 0.2}, "batch": {"accumulation": 2}}


def with_documents(folder: Path) -> Path:
    corpus(folder)
    with (folder / "late.jsonl").open("w") as out:
        for i in range(6):
            out.write(json.dumps({"id": f"late-{i}", "text": "print the list " * (i + 2), "domain": "code"}) + "\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_documents(tmp_path)


def a_run(folder: Path, name: str = "run", *, keep: int | None = None, every: int = 5, method: str = "step", **more) -> Path:
    scoring = {"method": method, "bitwise": True, **more.pop("scoring", {})}
    train(make_config(settings(folder, name, checkpoints={"every": every, "keep": keep}, scoring=scoring, **{**HARD, **more})))
    return folder / name


def late(folder: Path) -> dict[str, ValidationSet]:
    return {"late": ValidationSet(paths=[str(folder / "late.jsonl")], rows=2)}


def by_label(run: Path) -> dict[str, np.ndarray]:
    rows = inrun.Ledger.open(run).contributions().to_pylist()
    return {n: np.array([r["contribution"] for r in rows if r["validation"] == n]) for n in {r["validation"] for r in rows}}


def distance(source, replayer: Replayer, steps, mode: str = "before") -> float:
    """The largest difference from the live contributions, relative to the largest of them."""
    records = []
    replayer.pinned(steps, anchors_of(source.checkpoints), mode, records.append)
    worst = 0.0
    for label in source.steps[0].live:
        live = np.concatenate([s.live[label] for s in source.steps])
        again = np.concatenate([r.contributions[label] for r in records])
        worst = max(worst, float(np.abs(live - again).max() / np.abs(live).max()))
    return worst


@pytest.mark.parametrize("method", ["first", "second", "step"])
def test_with_a_checkpoint_at_every_step_replay_is_what_was_live(folder, method):
    """Same weights, moments, clip factor, learning rate, rows and dropout; and the controls."""
    source = open_source(a_run(folder, every=1, method=method, steps=8))
    assert [c.step for c in source.checkpoints] == list(range(9)) and set(source.live_sets) == {"code", "all"}
    assert min(s.clip for s in source.steps) < 0.5
    replayer = Replayer(source, source.live_sets, Look("before"))
    assert distance(source, replayer, source.steps) < 1e-5
    if method != "step":
        replayer.close()
        return
    wrong = {
        "learning rate": [replace(s, lr=s.lr * 1.01) for s in source.steps],
        "clip factor": [replace(s, clip=s.clip * 1.01) for s in source.steps],
        "batches": [replace(s, ids=o.ids) for s, o in zip(source.steps, source.steps[::-1], strict=True)],
        "order": [replace(s, ids=s.ids[::-1].copy()) for s in source.steps],
    }
    for what, steps in wrong.items():
        assert distance(source, replayer, steps) > 1e-3, what
    early = replace(source, checkpoints=[replace(c, step=c.step + 1) for c in source.checkpoints[:-1]])
    assert distance(early, replayer, source.steps) > 1e-3
    replayer.close()


@pytest.mark.parametrize("keep", [None, 0])
def test_a_late_set_is_scored_as_if_it_had_been_there(folder, keep):
    """Without early checkpoints, too: the seed gives the beginning."""
    both = {"late": {"paths": [str(folder / "late.jsonl")], "rows": 2}}
    live = by_label(a_run(folder, "both", validation=both))
    run = a_run(folder, keep=keep)
    source = open_source(run, late(folder))
    result = replay(source, ["late"], folder / "out", check=["code"])
    assert result.scored == 12 and result.check[0].spearman == pytest.approx(1.0)
    assert [p.step for p in result.passed] == ([12] if keep == 0 else [5, 10, 12])
    assert all(p.difference == 0.0 for p in result.passed)  # bitwise runs come out bit for bit
    found = by_label(folder / "out")
    assert set(found) == {"late"}
    assert np.allclose(found["late"], live["late"], rtol=0, atol=1e-5 * np.abs(live["late"]).max())
    reader = inrun.Ledger.open(folder / "out")
    about = reader.about["replay"]
    assert about["of"] == inrun.Ledger.open(run).about["run_id"] and about["from"] == "exact" and about["complete"]
    assert reader.samples().num_rows == inrun.Ledger.open(run).samples().num_rows
    assert reader.contributions()["sample_id"].to_pylist() == [i for s in source.steps for i in s.ids.tolist()]
    other = replay(source, ["late"], folder / "first", Look("exact", method="first"))  # the control
    assert other.scored == 12 and not np.allclose(by_label(folder / "first")["late"], live["late"], rtol=0.01)


def test_a_run_without_scores_can_be_scored_afterwards(folder):
    live = by_label(a_run(folder, "scored"))
    plain = a_run(folder, "plain", scoring={"enabled": False})
    source = open_source(plain)
    assert source.run_id is None and source.live_sets == []
    result = replay(source, ["code"], folder / "out")
    assert all(p.difference == 0.0 for p in result.passed)
    assert np.allclose(by_label(folder / "out")["code"], live["code"], rtol=0, atol=1e-5 * np.abs(live["code"]).max())


def test_a_run_in_progress_and_skipped_steps(folder):
    config = make_config(settings(folder, checkpoints={"every": 4, "keep": None}))
    count = iter(range(100))
    assert not train(config, stop=lambda: next(count) >= 6).finished
    source = open_source(folder / "run", late(folder))
    assert [s.step for s in source.steps] == list(range(7))
    assert replay(source, ["late"], folder / "out", Look("interpolate")).scored == 7
    wild = {"lr": 1e30, "final_lr": 1e30, "warmup": 0, "clip": None}
    train(make_config(settings(folder, "wild", optimizer=wild, nonfinite="skip", scoring={"method": "first"})))
    source = open_source(folder / "wild", late(folder))
    assert len(source.steps) + len(source.skipped) == 12 and len(source.skipped) >= 8
    assert replay(source, ["late"], folder / "wild-again").scored == len(source.steps)


def test_no_books_where_nothing_could_be_scored(folder, monkeypatch):
    """Nothing but NaN is no score: an error, and no books that look like some."""
    source = open_source(a_run(folder), late(folder))
    monkeypatch.setattr(
        "inrun.training.validation.next_token_loss", lambda model, rows: sum(p.sum() for p in model.parameters()) * math.nan
    )
    for mode in ("exact", "before"):
        with pytest.raises(TrainingError, match="none of the 12 steps could be scored"):
            replay(source, ["late"], folder / "nothing", Look(mode))
    monkeypatch.setattr(
        "inrun.training.checkpoint.Checkpoint.load_model", lambda self, m: [p.data.fill_(math.nan) for p in m.parameters()]
    )
    with pytest.raises(TrainingError, match=r"diverged by step 0: .*--limit-steps"):
        replay(source, ["late"], folder / "nothing")
    assert not (folder / "nothing").exists() and not list(folder.glob(".*.part"))


@pytest.mark.slow
def test_fewer_checkpoints_are_worse_and_still_of_use(folder):
    """Slow training on a tiny model; exact replay does not mind."""
    slow = {"lr": 1e-3, "final_lr": 1e-3, "warmup": 4, "clip": 1.0}
    source = open_source(a_run(folder, every=4, method="first", steps=32, optimizer=slow))
    lines = study(source, ["code"], ["exact", "before", "interpolate"], 12)
    assert [c.states for c in lines if c.mode == "before"] == [9, 5, 3, 2]
    best = {mode: [c.spearman for c in lines if c.mode == mode] for mode in ("exact", "before", "interpolate")}
    assert best["exact"] == [pytest.approx(1.0, abs=1e-3)]
    for mode in ("before", "interpolate"):
        assert best[mode][0] > 0.8 and best[mode][0] > best[mode][-1] > 0.0, best
    assert all(c.steps > 0 and c.seconds > 0 for c in lines)
    with pytest.raises(ConfigurationError, match=r"'latest' live; it has .*code"):
        study(source, ["latest"], ["before"], 4)


def test_places():
    at = [0, 10, 30]
    assert viewpoint_of(14, at, "before") == Viewpoint(1, None, 0.0)
    assert viewpoint_of(14, at, "nearest") == Viewpoint(1, None, 0.0) and viewpoint_of(21, at, "nearest") == Viewpoint(2, None, 0.0)
    assert viewpoint_of(15, at, "interpolate") == Viewpoint(1, 2, 0.25)
    for mode in PINNED:
        assert viewpoint_of(10, at, mode) == Viewpoint(1, None, 0.0) and viewpoint_of(99, at, mode) == Viewpoint(2, None, 0.0)


def test_between_checkpoints_moments_have_the_bias_of_the_step(folder):
    source = open_source(a_run(folder))
    replayer = Replayer(source, ["code"], Look("interpolate"))
    anchors, stage = anchors_of(source.checkpoints), replayer.stage
    assert [a.step for a in anchors] == [0, 5, 10, 12]
    five, ten = (stage.shelf.load(anchors[i]) for i in (1, 2))
    assert (five.updates, ten.updates) == (5, 10)
    stage.put(source.steps[7], anchors, Viewpoint(1, 2, 0.4))
    i, parameter = 0, stage.parameters[0]
    assert torch.allclose(parameter, 0.6 * five.weights[i] + 0.4 * ten.weights[i], atol=1e-7)
    state = replayer.training.optimizer.state[parameter]
    for name, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.95)):
        corrected = 0.6 * five.moments[i][name] / (1 - beta**5) + 0.4 * ten.moments[i][name] / (1 - beta**10)
        assert torch.allclose(state[name] / (1 - beta**7), corrected, rtol=1e-4)
    assert float(state["step"]) == 7
    stage.put(source.steps[3], anchors, Viewpoint(0, None, 0.0))  # before the first checkpoint: its scale of gradients
    state = replayer.training.optimizer.state[parameter]
    assert torch.allclose(state["exp_avg_sq"] / (1 - 0.95**3), five.moments[i]["exp_avg_sq"] / (1 - 0.95**5), rtol=1e-4)
    stage.put(source.steps[5], anchors, Viewpoint(1, None, 0.0))
    assert stage.furthest(anchors[1]) == 0.0 < stage.furthest(anchors[2])
    assert stage.put(source.steps[0], anchors, Viewpoint(0, None, 0.0)) and not replayer.training.optimizer.state
    replayer.close()


def test_which_steps(folder):
    source = open_source(a_run(folder))
    assert [s.step for s in choose_steps(source, Look("before"), 4)] == [2, 6, 10]
    assert [s.step for s in choose_steps(source, Look("exact"), 4)] == [0, 1, 5, 6, 10]
    assert [s.step for s in choose_steps(source, Look("exact"), 4, limit=6)] == [0, 1, 5]
    with pytest.raises(TrainingError, match="steps 0 to 11"):
        choose_steps(source, Look("before"), 100)
    assert [len(t) for t in thinnings(anchors_of(source.checkpoints))] == [4, 3, 2]
    assert [s.step for s in whole_stretches(source.steps, anchors_of(source.checkpoints), 8)] == [0, 1, 2, 3, 4, 10, 11]
    steps = [s.step for s in sampled_steps(source.steps, 4)]
    assert len(steps) == 4 and all(3 * i <= s < 3 * i + 3 for i, s in enumerate(steps))


def test_a_checkpoint_that_goes_while_we_look(folder):
    source = open_source(a_run(folder), late(folder))
    shutil.rmtree(source.checkpoints[1].folder)
    with pytest.raises(TrainingError, match=r"step-00000005 is gone: .*checkpoints.keep=null"):
        replay(source, ["late"], folder / "out", Look("before"))
    assert not (folder / "out").exists()


def command(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["inrun", "replay", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command(folder, monkeypatch, capsys):
    run, new = a_run(folder), folder / "late.jsonl"
    code, out, err = command(monkeypatch, capsys, run, "--validation", new, "--quiet")
    assert code == 0, err
    assert "12 of 12 recorded steps" in out and "equal bit for bit" in out and "Spearman 1.0000" in out
    assert verify(run).good and verify(run / "replays/late").good
    assert inrun.Ledger.open(run / "replays/late").scores()["validation"].unique().to_pylist() == ["late"]
    more = ["--from", "nearest", "--every", "3", "--folds", "2", "--check-steps", "4", "--where", "domain=code", "--json"]
    code, out, err = command(monkeypatch, capsys, run, "-v", f"other={new}", "--out", folder / "x", *more)
    assert code == 0, err
    told = json.loads(out)
    assert told["scored"] == 4 and told["furthest"] == 2 and {c["mode"] for c in told["study"]} == {"nearest"}
    assert json.loads((folder / "x" / "replay.json").read_text()) == told
    assert inrun.Ledger.open(folder / "x").scores()["standard_error"].null_count == 0
    code, out, err = command(monkeypatch, capsys, run, "--check-steps", "3", "--check-set", "code", "--quiet")
    assert code == 0 and "interpolate" in out and "Spearman" in out, err


def test_what_is_refused(folder, monkeypatch, capsys):
    run, new = a_run(folder), folder / "late.jsonl"
    (folder / "empty").mkdir()
    (folder / "other.jsonl").write_text((folder / "corpus.jsonl").read_text().replace("loop", "pool"))
    cases = [
        ([folder / "empty", "-v", new], 2, "not a run of `inrun train`"),
        ([run, "-v", folder / "none.jsonl"], 2, "there is no file"),
        ([run, "-v", ""], 2, "names no file"),
        ([run, "-v", "late="], 2, "names no file"),
        ([run, "-v", f"code={new}"], 2, "has a validation set 'code' already"),
        ([run, "-v", new, "-v", new], 2, "two validation sets"),
        ([run, "-v", new, "--where", "math"], 2, "KEY=VALUE"),
        ([run, "-v", new, "--where", "domain=prose"], 2, "no document has the domain 'prose'"),
        ([run, "-v", new, "--check-set", "late"], 2, "was not scored live"),
        ([run, "-v", new, "--out", folder / "empty"], 2, "exists already"),
        ([run, "-v", new, "--exact", "--from", "before"], 2, "two different ways"),
        ([run, "-v", new, "--sketch", "0"], 2, "x>=1"),
        ([run, "-v", new, "--data", folder / "other.jsonl"], 1, "have changed since"),
    ]
    for arguments, expected, message in cases:
        code, _, err = command(monkeypatch, capsys, *arguments)
        assert code == expected and message in err, (arguments, code, err)
    assert not (run / "replays").exists()
    for checkpoint in checkpoints_of(run):
        shutil.rmtree(checkpoint)
    code, _, err = command(monkeypatch, capsys, run, "-v", new)
    assert code == 1 and "no checkpoint" in err


def whole(folder: Path, name: str = "run", **more) -> Path:
    """A run under whole credit that forgets within 7 steps, so that windows pass; its rate does not depend on its length."""
    forgets = {"lr": 3e-3, "final_lr": 3e-3, "warmup": 4, "betas": [0.5, 0.9], **HARD["optimizer"]}
    return a_run(folder, name, method="whole", steps=24, **{"optimizer": forgets, **more})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents and two runs under whole credit, one of which had the late set: what most tests look at."""
    place = with_documents(tmp_path_factory.mktemp("trained"))
    whole(place)
    whole(place, "both", validation={"late": {"paths": [str(place / "late.jsonl")], "rows": 2}})
    return place


@pytest.fixture
def run(trained: Path, folder: Path) -> Path:
    """A copy of the run, to write into."""
    shutil.copytree(trained / "run", folder / "run")
    return folder / "run"


def credits(run: Path, label: str) -> list[tuple[int, int, float]]:
    rows = inrun.Ledger.open(run).credits().to_pylist()
    return [(r["step"], r["sample_id"], r["credit"]) for r in rows if r["validation"] == label]


@pytest.mark.parametrize("keep", [None, pytest.param(0, marks=pytest.mark.slow)])
def test_a_late_set_gets_the_credits_it_would_have_had(trained, folder, keep):
    live = trained / "both"
    run = trained / "run" if keep is None else whole(folder, keep=keep)
    source = open_source(run, late(folder))
    assert source.method == "whole" and all(s.credits for s in source.steps)
    result = replay(source, ["late"], folder / "out", check=["code"])
    assert result.method == "whole" and result.scored == 24 and all(p.difference == 0.0 for p in result.passed)
    assert (
        result.check[0].steps == 24 and result.check[0].spearman > 0.999 and result.check[0].total == pytest.approx(1.0, rel=1e-3)
    )
    found, expected = credits(folder / "out", "late"), credits(live, "late")
    assert [x[:2] for x in found] == [x[:2] for x in expected] and len(found) == 24 * 4
    a, b = (np.array([x[2] for x in rows]) for rows in (found, expected))
    assert np.allclose(a, b, rtol=0, atol=1e-3 * np.abs(b).max())
    books = inrun.Ledger.open(folder / "out")
    assert books.about["method"] == "whole" and books.scores()["pending"].to_numpy().sum() == 0
    assert books.credits()["validation"].unique().to_pylist() == ["late"] and verify(folder / "out").good
    step = replay(source, ["late"], folder / "step", Look("exact", method="step"), check=["code"])  # the control
    assert step.method == "step" and credits(folder / "step", "late")[0][2] != found[0][2]
    sums = {name: np.abs(inrun.Ledger.open(folder / name).scores()["score"].to_numpy()).sum() for name in ("out", "step")}
    assert sums["out"] > 1.2 * sums["step"]


def test_steps_by_themselves_are_scored_by_their_own_moves_and_it_is_said(run, folder, caplog):
    source = open_source(run, late(folder))
    for look, steps in ((Look("before"), source.steps), (Look("exact"), choose_steps(source, Look("exact"), every=2))):
        caplog.clear()
        result = replay(source, ["late"], folder / f"out-{look.mode}", look, steps=steps)
        assert result.method == "step" and 'scored by method="step"' in caplog.text
        with pytest.raises(ConfigurationError, match="by all the steps after it"):
            replay(source, ["late"], folder / "refused", replace(look, method="whole"), steps=steps)
    first = replay(source, ["late"], folder / "first", Look("exact", method="first"))
    assert first.method == "first" and inrun.Ledger.open(folder / "first").about["method"] == "first"
    part = replay(source, ["late"], folder / "part", steps=choose_steps(source, Look("exact"), limit=15))
    assert part.method == "whole" and {s for s, _, _ in credits(folder / "part", "late")} == set(range(15))
    lines = study(source, ["code"], ["exact", "before"], 12)
    assert [c.mode for c in lines][:2] == ["exact", "before"] and lines[0].spearman > 0.9
    first = study(source, ["code"], ["exact"], 12, Look(method="first"))  # the control: other shares than those that were live
    assert abs(lines[0].spread - 1) < abs(first[0].spread - 1) and lines[0].pearson > first[0].pearson


def test_a_run_of_another_method_can_be_replayed_by_whole_credit(trained, folder):
    live = trained / "both"
    source = open_source(whole(folder, scoring={"method": "first"}), late(folder))
    assert source.method == "first"
    result = replay(source, ["late"], folder / "out", Look("exact", method="whole"), check=["code"])
    assert result.method == "whole" and result.check == [] and "scored by method=first" in result.unchecked
    a, b = (np.array([x[2] for x in credits(f, "late")]) for f in (folder / "out", live))
    assert np.allclose(a, b, rtol=0, atol=1e-3 * np.abs(b).max())


def test_like_is_compared_with_like_or_nothing(run, folder, monkeypatch, capsys):
    """A part of a run pays its last uses in part, and single steps are scored by another method: neither is what was live."""
    source = open_source(run, late(folder))
    part = replay(source, ["late"], folder / "part", steps=choose_steps(source, Look("exact"), limit=15), check=["code"])
    (check,) = part.check
    assert part.unchecked == "" and 0 < check.steps < 15 == part.scored
    assert check.total == pytest.approx(1.0, rel=1e-3) and check.spearman > 0.999
    paid = {s.step: s.credits["code"] for s in source.steps}
    again = {(step, i): c for step, i, c in credits(folder / "part", "late")}
    assert len(again) == 15 * 4 and len(paid) == 24  # all are in the books; only the comparison leaves some out
    some = replay(source, ["late"], folder / "some", steps=choose_steps(source, Look("exact"), every=2), check=["code"])
    assert some.check == [] and "these steps by method=step" in some.unchecked
    few = replay(source, ["late"], folder / "few", steps=choose_steps(source, Look("exact"), limit=1), check=["code"])
    assert few.check == [] and "no use was paid in full" in few.unchecked
    code, out, err = command(monkeypatch, capsys, source.run, "-v", folder / "late.jsonl", "--every", "2", "--quiet")
    assert code == 0 and "not compared with live scores: the run was scored by whole credit" in out, err
    assert json.loads((source.run / "replays/late/replay.json").read_text())["unchecked"]


def test_whole_credit_over_another_state_of_the_optimizer_is_refused(run, folder, monkeypatch):
    source = open_source(run, late(folder))
    put = Stage._put_moments

    def other(self, *arguments):
        put(self, *arguments)
        for state in self.optimizer.state.values():
            state["exp_avg"].mul_(3)

    monkeypatch.setattr(Stage, "_put_moments", other)
    with pytest.raises(TrainingError, match="--method step"):
        replay(source, ["late"], folder / "out")
    assert not (folder / "out").exists()


def test_skipped_steps_do_not_break_windows(run, folder):
    """A step whose validation loss was not finite moved the weights, and is in the optimizer's memory."""
    source = open_source(run, late(folder))
    gap = replace(source, steps=[s for s in source.steps if s.step not in (3, 4, 5, 6)])
    result = replay(gap, ["late"], folder / "out", check=["code"])
    assert result.method == "whole" and result.scored == 20 and result.check[0].spearman > 0.999


def test_the_command_says_which_method(run, folder, monkeypatch, capsys):
    new = folder / "late.jsonl"
    code, out, err = command(monkeypatch, capsys, run, "-v", new, "--quiet")
    assert code == 0 and "(method whole)" in out and "Spearman 1.0000" in out, err
    code, out, err = command(monkeypatch, capsys, run, "-v", f"other={new}", "--method", "step", "--sketch", "exact", "--quiet")
    assert code == 0 and "(method step)" in out, err
    code, _, err = command(monkeypatch, capsys, run, "-v", f"third={new}", "--method", "whole", "--every", "2")
    assert code == 2 and "by all the steps after it" in err
    code, _, err = command(monkeypatch, capsys, run, "-v", f"third={new}", "--method", "half")
    assert code == 2 and "whole" in err
