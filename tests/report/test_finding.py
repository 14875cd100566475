"""What the page opens with: the finding in words, its cautions and its cards, for every kind of books."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from test_report import Page, simple

from inrun.ledger import Ledger, StepRecord
from inrun.report import build_report
from inrun.report.cards import finding_cards
from inrun.report.distribution import Distribution
from inrun.report.finding import Group, Told, cautions, sentences, tell
from inrun.report.gather import gather
from inrun.report.story import stories
from report_hostile import hostile_run
from report_payloads import PAYLOADS
from report_stories import tell_story

NBSP = "\u00a0"


def scores(samples=100, negative=30, clear=20, helpful=50):
    """A distribution; without folds where ``clear`` is None."""
    bars = {"helpful": [helpful]} if clear is not None else {"helpful": [samples - negative]}
    return Distribution(samples, negative, clear, 0.1, 0.1, None, positive=samples - negative, bars=bars)


def group(name, total, error=0.1, samples=10, share=None):
    return Group(name, total, samples, share, error)


CODE, TABLES, WEB = group("code", 3.0, share=0.75, samples=30), group("tables", 1.0, share=0.25, samples=2), group("web", -2.0)
UNSURE = [group("a", 0.1, 0.2, share=1.0), group("b", -0.1, 0.2)]


def told(groups=(CODE, TABLES, WEB), *, dist=None, folds=4, state="balanced", pending=0, registered=100, gathered=False, **more):
    """Books that are made up."""
    judged = {"state": state, "relative_residual": 0.05, "audited_share": 1.0, "outsized": [], "outsized_share": 0.0}
    judged |= {"residual_to_fall": 0.5, "spread_to_fall": 300.0}
    judged = SimpleNamespace(**judged | {"outsized_steps": 0} | more)
    found = SimpleNamespace(pending=pending, samples_registered=registered)
    accounts = SimpleNamespace(judged=judged, audited=10, steps=20)
    return Told(found, "val", folds, accounts, dist or scores(), "domain", list(groups), gathered)


def words(what):
    return " ".join("".join(piece.text for piece in sentence) for sentence in sentences(what)).replace(NBSP, " ")


def without_folds(*groups):
    return told([dataclasses.replace(g, error=None) for g in groups], dist=scores(clear=None), folds=1)


STDLIB, NOISE = group("stdlib", 9.0, 4.0, share=0.7), group("noise", -9.0, 4.0)
BELOW = "20 of 100 samples are clearly below zero: see them, drop them."
CASES = {
    "all": (
        told(),
        f"code helped val most (75 % of all that helped), tables most per sample; web hurt it. {BELOW}",
    ),
    "one name for both": (told([CODE, WEB]), f"code helped val most (75 % of all that helped); web hurt it. {BELOW}"),
    "nothing hurt": (
        told([CODE, TABLES]),
        f"code helped val most (75 % of all that helped), tables most per sample; none clearly hurt it. {BELOW}",
    ),
    "nothing helped": (told([WEB, UNSURE[0]]), f"No domain clearly helped val; web hurt it. {BELOW}"),
    "nothing is clear": (
        told(UNSURE, dist=scores(clear=0, helpful=0)),
        "No domain is clear of its error for val: none clearly helped, none clearly hurt. No sample is clearly below zero.",
    ),
    "several hurt": (
        told([CODE, WEB, group("x", -1.0)]),
        f"code helped val most (75 % of all that helped); web and x hurt it. {BELOW}",
    ),
    "many hurt": (
        told([CODE, *(group(f"h{k}", -9.0 + k) for k in range(5))]),
        f"code helped val most (75 % of all that helped); h0, h1 and 3 more hurt it. {BELOW}",
    ),
    "the highest total is not clear": (
        told([CODE, TABLES, WEB, STDLIB]),
        "stdlib has the highest total for val (70 % of all that helped), but is not clear of its error; code and tables clearly "
        f"helped; web hurt it. {BELOW}",
    ),
    "the densest is not clear": (
        told([CODE, WEB, group("rare", 1.0, 0.5, samples=1, share=0.2)]),
        f"code helped val most (75 % of all that helped); web hurt it. {BELOW}",
    ),
    "the lowest total is not clear": (
        told([CODE, WEB, NOISE]),
        "code helped val most (75 % of all that helped); noise has the lowest total, but is not clear of its error; web clearly "
        f"hurt it. {BELOW}",
    ),
    "the lowest total is not clear, nor any other": (
        told([CODE, NOISE]),
        f"code helped val most (75 % of all that helped); none clearly hurt it. {BELOW}",
    ),
    "two folds": (
        told([CODE, TABLES, WEB, STDLIB], folds=2, dist=scores(clear=25)),
        "stdlib has the highest total for val (70 % of all that helped); web is below zero; 2 folds cannot say how sure that is. "
        "25 of 100 samples are clearly below zero: see them, drop them.",
    ),
    "two folds, nothing below": (
        told([CODE, TABLES], folds=2, dist=scores(clear=25)),
        "code has the highest total for val (75 % of all that helped), tables the highest per sample; none is below zero; "
        "2 folds cannot say how sure that is. 25 of 100 samples are clearly below zero: see them, drop them.",
    ),
    "two folds, nothing above": (
        told([WEB, NOISE], folds=2, dist=scores(clear=25)),
        "No domain helped val; noise and web are below zero; 2 folds cannot say how sure that is. "
        "25 of 100 samples are clearly below zero: see them, drop them.",
    ),
    "gathered": (
        told([CODE, TABLES], gathered=True),
        f"code helped val most (75 % of all that helped); of the 2 heaviest none clearly hurt it. {BELOW}",
    ),
    "no folds": (
        without_folds(CODE, TABLES, WEB),
        "code has the highest total for val (75 % of all that helped), tables the highest per sample; web is below zero. "
        "30 of 100 samples are below zero (see them); without folds nothing says how sure that is.",
    ),
    "no folds, two below": (
        without_folds(CODE, WEB, group("x", -1.0)),
        "code has the highest total for val (75 % of all that helped); web and x are below zero. "
        "30 of 100 samples are below zero (see them); without folds nothing says how sure that is.",
    ),
    "no folds, nothing above": (
        without_folds(WEB, group("x", -1.0)),
        "No domain helped val; web and x are below zero. 30 of 100 samples are below zero (see them); "
        "without folds nothing says how sure that is.",
    ),
    "no domains": (
        told([]),
        "Of 100 samples 50 clearly helped val, 20 clearly hurt it (see them, drop them), and 30 cannot be told from zero.",
    ),
    "one domain": (
        told([CODE], dist=scores(clear=0)),
        "Of 100 samples 50 clearly helped val, 0 clearly hurt it, and 50 cannot be told from zero.",
    ),
    "no domains, no folds": (
        told([], dist=scores(clear=None), folds=1),
        "Of 100 samples 70 lowered the loss on val, and 30 raised it (see them). Without folds nothing says how sure that is.",
    ),
    "no domains, nothing clear": (
        told([], dist=scores(clear=0, helpful=0)),
        "Of 100 samples none is clear of its error for val: none clearly helped, none clearly hurt.",
    ),
    "as many as by chance": (
        told(dist=scores(clear=13)),
        "code helped val most (75 % of all that helped), tables most per sample; web hurt it. 13 of 100 samples are below zero by "
        "more than two standard errors, no more than chance alone could put there (see them).",
    ),
    "one": (
        told(dist=scores(samples=10, clear=1, negative=1)),
        "code helped val most (75 % of all that helped), tables most per sample; web hurt it. 1 of 10 samples is below zero by "
        "more than two standard errors, no more than chance alone could put there (see them).",
    ),
    "too coarse": (
        told(state="coarse"),
        "code helped val most (75 % of all that helped), tables most per sample; web hurt it. "
        "20 of 100 samples are clearly below zero: see them.",
    ),
    "nothing registered": (
        told([], registered=0),
        "Of 100 samples 50 clearly helped val, 20 clearly hurt it (see them), and 30 cannot be told from zero.",
    ),
    "nothing scored": (
        told(dist=scores(samples=0, negative=0, clear=0, helpful=0)),
        "No sample was scored for val, so there is nothing to say of them yet.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_finding_in_words(case):
    what, said = CASES[case]
    assert words(what) == said
    assert len(sentences(what)) <= 2
    cards = finding_cards(what)
    assert [c.title for c in cards] == (["What helped", "What hurt", "How sure"] if case != "nothing scored" else [])
    assert not any(c.drop and "drop them" not in said for c in cards)


def drawn(rng, folds, samples, groups, *, low=0.0, lowered=0, moved=0.0):
    """Books of noise, for samples and for groups; ``lowered`` samples and the first group are moved down."""
    of_samples = rng.standard_normal((samples, folds))
    of_samples[:lowered] -= low
    of_groups = rng.standard_normal((groups, folds))
    of_groups[0] -= moved
    (score, error), (total, wide) = ((x.mean(1), x.std(1, ddof=1) / np.sqrt(folds)) for x in (of_samples, of_groups))
    dist = scores(samples, int((score < 0).sum()), int((score + 2 * error < 0).sum()), int((score - 2 * error > 0).sum()))
    return told([group(f"g{k}", t, e, share=0.5) for k, (t, e) in enumerate(zip(total, wide, strict=True))], dist=dist, folds=folds)


@pytest.mark.parametrize("folds", [3, 4, 8])
@pytest.mark.parametrize(("samples", "groups"), [(300, 5), (2000, 12), (20, 2)])
def test_noise_is_no_finding(folds, samples, groups):
    """Of runs in which nothing did anything, few advise to drop samples and few name a group; what was planted is found."""
    rng = np.random.default_rng(0)
    noise = [drawn(rng, folds, samples, groups) for _ in range(300)]
    drops = np.mean(["drop them" in words(w) for w in noise])
    named = np.mean([not words(w).startswith("No domain is clear of its error") for w in noise])
    assert drops <= 0.05 and named <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)
    assert named > 0 and np.mean([len(w.helped) + len(w.hurt) > 0 for w in noise]) == named
    old = np.mean([any(abs(g.total) > 2 * g.error for g in w.groups) for w in noise])
    assert old > 3 * named  # the control: two errors, whatever the folds
    far = {3: 30.0, 4: 12.0, 8: 6.0}[folds]
    planted = [drawn(rng, folds, samples, groups, low=6.0, lowered=samples // 2, moved=far) for _ in range(100)]
    assert np.mean(["drop them" in words(w) for w in planted]) > 0.9
    assert np.mean([[g.name for g in w.hurt] == ["g0"] for w in planted]) > 0.8


@pytest.mark.parametrize(("samples", "groups"), [(300, 5), (2000, 12), (20, 2)])
def test_two_folds_judge_no_group(samples, groups):
    """Dozens of standard errors would be asked for: totals are told as they are, and that nothing says how sure they are."""
    rng = np.random.default_rng(0)
    noise = [drawn(rng, 2, samples, groups) for _ in range(300)]
    assert np.mean(["drop them" in words(w) for w in noise]) <= 0.05
    planted = [drawn(rng, 2, samples, groups, low=6.0, lowered=samples // 2, moved=400.0) for _ in range(100)]
    assert np.mean(["drop them" in words(w) for w in planted]) > 0.9
    for what in (*noise, *planted):
        assert what.errors_away is None and "2 folds cannot say how sure that is. " in words(what)
        assert not re.search("hurt|helped [^)]|most", words(what).split(". ")[0].replace("helped val;", "")), words(what)


OUTSIZED = {"outsized": [SimpleNamespace(audited=False)], "outsized_steps": 2, "outsized_share": 0.86}
CAUTIONS = {
    "calm": (told(), []),
    "coarse": (told(state="coarse", relative_residual=0.4), ["Do not act on this yet: the method's error is 40 %"]),
    "rough": (told(state="rough"), ["The order holds; sums are off by about 5.0 %."]),
    "thin": (told(state="thin", audited_share=0.1), ["Careful: the audited steps hold only 10 % of"]),
    "thin, unknown": (told(state="thin", audited_share=None), ["Careful: the audited steps hold an unknown part of"]),
    "thin, outsized": (
        told(state="thin", **OUTSIZED),
        ["Careful: steps that hold an outsized part were not", "Few steps decide here: 2 steps hold 86 %"],
    ),
    "cancelling": (told(state="cancelling"), ["Careful: what the samples were given and taken is 300 times what the loss fell"]),
    "unmeasured": (told(state="unmeasured"), ["Careful: no audited step measured"]),
    "pending": (told(pending=3), ["Credit is still coming in for 3 steps"]),
    "nothing scored": (told(dist=scores(0, 0, 0, 0), pending=3), []),
}


@pytest.mark.parametrize("case", CAUTIONS)
def test_cautions(case):
    what, said = CAUTIONS[case]
    found = [line.replace(NBSP, " ") for line in cautions(what)]
    assert len(found) == len(said)
    for line, start in zip(found, said, strict=True):
        assert line.startswith(start)


def test_cards_say_how_sure():
    *_, sure = finding_cards(told(pending=2))
    assert (sure.value, sure.mood) == ("The books balance", "good")
    assert "chance could still put 13 clearly below zero" in sure.rows[1].note and sure.rows[2].figure == "still coming in"
    assert sure.rows[0].note.startswith("50 % of the fall, ".replace(" %", f"{NBSP}%"))
    *_, sure = finding_cards(told(state="cancelling"))
    assert (sure.value, sure.mood) == ("Scores nearly cancel", "bad")
    *_, sure = finding_cards(told(state="coarse"))
    assert sure.mood == "bad" and "Too coarse" in sure.value
    helped, hurt, sure = finding_cards(without_folds(CODE, TABLES, WEB))
    assert "needs folds" in sure.rows[1].note and helped.rows[0].figure == "+3" and hurt.see and not hurt.drop
    helped, hurt, _ = finding_cards(told())
    assert helped.rows[0].figure == "+3 ± 0.1" and (helped.named, helped.value, hurt.value) == (True, "code", "web")
    helped, hurt, _ = finding_cards(told([CODE, TABLES, WEB, STDLIB, NOISE]))  # the card's first are clear ones; then the others
    assert (helped.value, [r.name for r in helped.rows]) == ("code", ["code", "tables", "stdlib"])
    assert (hurt.value, [r.name for r in hurt.rows]) == ("web", ["web", "noise"])
    assert [c.rows[-1].note for c in (helped, hurt)] == [f"the {w} total, not clear of its error" for w in ("highest", "lowest")]
    helped, hurt, _ = finding_cards(told(UNSURE))
    assert (helped.value, hurt.value, helped.mood, helped.named) == ("no group clearly", "no group clearly", "", False)


def test_finding_is_that_of_the_books(tmp_path):
    """By a second way: the folds' own totals, straight from the contributions."""
    run = tell_story(tmp_path / "run", steps=120, samples=300)
    found = gather(run, by=None, top=5, text=True)
    what = tell(found, 0, 0)
    with Ledger.open(run).tables() as tables:
        rows = tables.relation(
            """SELECT domain, avg(total), stddev(total) / 2 FROM (
                   SELECT domain, validation, sum(contribution) AS total FROM contributions JOIN samples USING (sample_id)
                   WHERE validation LIKE 'code#%' GROUP BY ALL) GROUP BY 1"""
        ).fetchall()
    known = {name: (total, error) for name, total, error in rows}
    assert {g.name for g in what.groups} == set(known)
    grouping = found.panels["groups"]["groupings"][0]  # the chart is coloured by the same measure
    assert grouping["away"][0] == what.errors_away and grouping["folds"] == [4, 4]
    for g in what.groups:
        assert (g.total, g.error) == pytest.approx(known[g.name], rel=1e-2)
    away = stats.t.isf(0.025 / len(known), 3)
    helped = {n for n, (total, error) in known.items() if total > away * error}
    hurt = {n for n, (total, error) in known.items() if total < -away * error}
    assert {g.name for g in what.helped} == helped and {g.name for g in what.hurt} == hurt and "noise" in hurt
    assert words(what).startswith(f"{max(known, key=lambda n: known[n][0])} helped code most")
    assert [(s.place, s.column) for s in stories(found)] == [(s, c) for s in (0, 1) for c in (0, 1, 2)]


def test_page_opens_with_the_finding(tmp_path):
    page = Page(build_report(tell_story(tmp_path / "run", steps=120, samples=300, audit=40)))
    order = [
        "What this run found",
        "What helped",
        "What hurt",
        "How sure",
        "Value by",
        "How scores are spread",
        "The books, and what",
        "Audit more often",
    ]
    places = [page.text.index(w) for w in order]
    assert places == sorted(places)
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert "#samples" in links and "#next" in links
    ids = {a["id"] for _, a in page.tags if "id" in a}
    assert all(link[1:] in ids for link in links)
    assert re.search(r"inrun curate \S+ --out curated -v code", page.text)


def test_small_and_unregistered_runs(tmp_path):
    page = Page(build_report(simple(tmp_path / "bare", metadata=False)))
    assert "Of 9 samples" in page.text and "Without folds nothing says how sure" in page.text
    assert "drop them" not in page.text and "inrun curate" not in page.text  # there is nothing that could be written


def test_pending_credit_is_said(tmp_path):
    with Ledger(tmp_path / "run", about={"method": "whole"}) as ledger:
        for step in range(3):
            ledger.write(StepRecord(step, [1, 2], {"v": [0.5, -0.5]}, [{"step": step, "validation": "v"}]))
    page = Page(build_report(tmp_path / "run"))
    assert "Credit is still coming in for 3 steps" in page.text


def test_hostile_names_stay_names(tmp_path):
    """Names stand in elements of their own, escaped; none ends a sentence of ours or adds a tag."""
    found = gather(hostile_run(tmp_path / "run"), by=None, top=5, text=True)
    names = {n for g in found.panels["groups"]["groupings"] for n in g["names"]}
    for story in stories(found):
        for piece in (p for s in story.sentences for p in s if p.kind not in ("name", "good", "bad")):
            assert "<" not in piece.text and "script" not in piece.text and "__pwned" not in piece.text
        assert not any("<" in line for line in story.cautions)
    assert len(names) > 20
    page = Page(build_report(tmp_path / "run"))
    strong = [a for tag, a in page.tags if tag == "strong" and "named" in (a.get("class") or "")]
    assert strong and all(a.get("dir") == "auto" and set(a) == {"class", "dir"} for a in strong)
    assert [tag for tag, _ in page.tags].count("script") == 4


@pytest.mark.parametrize("name", PAYLOADS[::7])
def test_any_name_is_one_piece(name):
    what = told([group(name, 5.0, share=1.0), WEB])
    named = [p for s in sentences(what) for p in s if p.kind == "good"]
    assert [p.text for p in named] == [name]  # gather() makes it visible; the page escapes it


def test_values_at_each_use_and_neighbours(tmp_path):
    with Ledger(tmp_path / "run", about={"method": "first"}) as ledger:
        for step in range(100):
            values = {"v#0": [step + 1.0, 1.0, -2.0], "v#1": [step + 2.0, 3.0, -4.0], "w": [0.5, 0.5, 0.5]}
            ids = [0, 1 + step % 5, 7]
            ledger.write(StepRecord(step, ids, values, [{"step": step, "validation": x} for x in values]))
        rows = [
            {"sample_id": i, "document": "d" if i < 6 else "e", "chunk": 9 - i, "domain": "x", "text": f"piece {i} of a text"}
            for i in range(8)
        ]
        ledger.register_samples(rows)
    found = {s["n"]: s for s in gather(tmp_path / "run", by=None, top=50, text=True).shown.samples}
    once = found["3"]
    assert once["p"] == list(range(2, 100, 5)) and "m" not in once and once["v"] == [[2.0] * 20, [0.5] * 20]
    assert sum(once["v"][0]) == pytest.approx(once["s"][0])  # the values add up to the score
    many = found["0"]
    assert len(many["p"]) == len(many["v"][0]) == 40 and many["m"] == 3 and many["p"][-1] == 99
    assert once["d"] == "d" and [f[0] for f in once["f"]] == ["5", "4", "2", "1"]  # in the order of the document
    assert once["f"][1] == ["4", found["4"]["s"], "piece 4 of a text"] and found["0"]["f"][0][0] == "2"
    assert found["7"]["f"] == [["6", [None, None], "piece 6 of a text"]]  # registered, never used
    bare = gather(tmp_path / "run", by=None, top=50, text=False).shown.samples
    assert all(f[2] == "" for s in bare for f in s["f"])


def test_neighbours_know_their_bounds(tmp_path, monkeypatch):
    run = tell_story(tmp_path / "run", steps=40, samples=200)
    whole = gather(run, by=None, top=20, text=True).shown.samples
    monkeypatch.setattr("inrun.report.neighbours.MOST_BYTES", 2000)
    few = gather(run, by=None, top=20, text=True).shown.samples
    assert 0 < sum("v" in s for s in few) < sum("v" in s for s in whole)
    assert all(set(s) - {"p", "v", "m", "d", "f"} == set(t) - {"p", "v", "m", "d", "f"} for s, t in zip(few, whole, strict=True))
