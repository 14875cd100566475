"""Every snippet of the documentation runs, every link leads somewhere, and no page is left out.

``tests/pages.py`` says how a page is run. Pages that speak of a run find one: ``runs/skills``, the run of the tutorial on domains
and skills, and ``runs/demo`` (also as ``runs/mine``), a short `inrun demo`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

from inrun.demo.run import DemoConfig, run_demo
from pages import COMMANDS, DOCS, FILES, LISTINGS, ROOT, Block, blocks_of, commands_of, holds_commands, run_block, run_page

pytestmark = pytest.mark.filterwarnings("ignore")

TUTORIALS = DOCS / "tutorials"
SKILLS = TUTORIALS / "domains-and-skills.md"
#: Fragments that benchmarks/evidence_page.py puts together; not pages.
FRAGMENTS = set((DOCS / "evidence").glob("*.md"))
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *DOCS.rglob("*.md")} - FRAGMENTS)
#: Pages whose snippets have a test of their own, and where.
ELSEWHERE = {
    "docs/baselines-retraining.md": "tests/baselines/test_retraining.py",
    "docs/integrations.md": "tests/integrations/test_docs_integrations.py",
    "docs/notebooks.md": "tests/test_notebooks.py",
    "docs/packed.md": "tests/test_docs_packed.py",
}
#: How many blocks of a page are shown only (``<!-- not run: why -->``); none of the others.
NOT_RUN = {
    "README.md": 1,
    "docs/explorer.md": 1,
    "docs/fidelity.md": 2,
    "docs/ledger.md": 1,
    "docs/replay.md": 1,
    "docs/train.md": 3,
    "docs/whole-credit.md": 1,
}
#: Pages that take longer than a few seconds.
SLOW = {"docs/tutorials/late-validation.md"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def to_run(page: Path) -> bool:
    kinds = {block.language for block in blocks_of(page) if block.not_run is None}
    return bool(kinds & {"python", *COMMANDS}) and name_of(page) not in ELSEWHERE


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the tutorial and a short demo, once for all workers, and return the folder they are in."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "docs-runs"
    with FileLock(f"{folder}.lock"):
        if not (folder / "marks.jsonl").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                run_page(SKILLS, folder)
                run_demo(DemoConfig(run="runs/demo", steps=8, per_domain=40, held_out=16, planted=10))
            shutil.copytree(folder / "runs" / "demo", folder / "runs" / "mine")
            (folder / "marks.jsonl").write_text('{"sample_id": 3, "mark": "drop"}\n')
    return folder


def prepared_for_distributed() -> dict[str, Any]:
    """Return the names that the page's loop takes as given; its job has one process."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_

    import inrun

    model = torch.nn.Linear(4, 1)
    rows = inrun.with_ids([{"x": torch.randn(4)} for _ in range(8)])
    return {
        "inrun": inrun,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "validation": lambda m: m(torch.ones(2, 4)).square().mean(),
        "loader": torch.utils.data.DataLoader(rows, batch_size=4),
        "loss_of": lambda m, batch: m(batch["x"]).square().mean(),
        "clip_grad_norm_": clip_grad_norm_,
        "DistributedDataParallel": DistributedDataParallel,
    }


def marked(page: Path) -> Any:
    marks = [pytest.mark.slow] if name_of(page) in SLOW else []
    return pytest.param(page, id=name_of(page), marks=marks)


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if to_run(page) and page not in (SKILLS, DOCS / "distributed.md")])
def test_page_runs(page: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    needs_runs = "runs/" in page.read_text(encoding="utf-8")
    shutil.copytree(runs, folder) if needs_runs else folder.mkdir()
    if page == DOCS / "own-loop.md":
        shutil.rmtree(folder / "runs" / "mine")  # it makes its own
    monkeypatch.chdir(folder)
    run_page(page, folder)


def test_the_tutorial_on_skills_finds_them(runs: Path) -> None:
    import inrun

    for skill, domain in {"arithmetic": "sums", "cooking": "recipes", "programming": "code"}.items():
        best = inrun.Ledger.open(runs / "runs" / "skills").scores(skill, by="domain", top=1).to_pylist()
        assert [row["group"] for row in best] == [domain]


def test_the_page_on_several_processes_runs_with_one(tmp_path: Path) -> None:
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        names = run_page(DOCS / "distributed.md", tmp_path, prepared_for_distributed())
        assert names["accountant"].scores().num_rows == 8
        names["accountant"].close()
    finally:
        distributed.destroy_process_group()


def test_what_is_not_run_is_counted() -> None:
    found = {name_of(page): sum(block.not_run is not None for block in blocks_of(page)) for page in PAGES}
    assert {page: count for page, count in found.items() if count} == NOT_RUN
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_what_they_are(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(page)
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks)
    assert len(re.findall(r"^ *<!-- not run:", text, re.MULTILINE)) == sum(block.not_run is not None for block in blocks)
    for block in blocks:
        assert block.language in ("python", *COMMANDS, *FILES, *LISTINGS), block.where
        assert block.language not in LISTINGS or not holds_commands(block), block.where


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        found |= {plain.replace(" ", "-"), re.sub(r"[-\s]+", "-", plain)}
    return found


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links of a page that lead nowhere in the repository."""
    found = []
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_control_broken_links_are_found() -> None:
    page = DOCS / "index.md"
    text = "[a](none.md) [b](ledger.md#nothing) [c](ledger.md#questions) ![d](images/none.png) [e](#nowhere) `[f](g)`"
    assert broken_links(page, text) == ["none.md", "ledger.md#nothing", "images/none.png", "#nowhere", "g"]


def navigation(entry: Any) -> set[str]:
    if isinstance(entry, str):
        return {entry}
    inner = entry.values() if isinstance(entry, dict) else entry
    return {page for part in inner for page in navigation(part)}


def test_navigation_has_every_page() -> None:
    listed = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert listed == {str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents}


def test_site_builds_offline_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site")))
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assert fetched(page.read_text(encoding="utf-8")) == [], page
    accountant = (tmp_path / "site" / "reference" / "accountant.html").read_text(encoding="utf-8")
    assert "audit_every" in accountant and "inrun.Accountant" in accountant
    assert "GhostScorer" in (tmp_path / "site" / "reference" / "paper.html").read_text(encoding="utf-8")
    assert "inrun curate" in (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")


def fetched(html: str) -> list[str]:
    """Return what a page would fetch from elsewhere."""
    tags = re.findall(r"<(?:script|img|iframe|source|link)\b[^>]*>", html)
    urls = [url for tag in tags for url in re.findall(r'(?:src|href)="((?:https?:)?//[^"]+)"', tag) if 'rel="canonical"' not in tag]
    return urls + re.findall(r"url\([\"']?((?:https?:)?//[^)\"']+)", html)


def test_control_what_is_fetched_is_found() -> None:
    assert fetched('<script src="https://unpkg.com/x"></script><a href="https://a.b">') == ["https://unpkg.com/x"]
    assert fetched('<link rel="stylesheet" href="//fonts.x/y">') == ["//fonts.x/y"]


@pytest.mark.slow
def test_figures_are_small_and_can_be_drawn_again(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = ("who-taught-what.png", "math-one-step.png", "math-along-the-move.png", "math-late-pushes.png", "math-books.png")
    assert all((DOCS / "images" / name).stat().st_size < 150_000 for name in drawn)
    monkeypatch.syspath_prepend(str(DOCS / "figures"))
    import mathematics
    import readme
    import style

    monkeypatch.setattr(style, "IMAGES", tmp_path)
    readme.main(runs / "runs" / "demo")
    mathematics.main(runs / "runs" / "skills")
    assert {path.name for path in tmp_path.iterdir()} == {*drawn, "tutorial-skills.png"}


def block(language: str, text: str) -> Block:
    return Block(ROOT / "README.md", 1, language, text, None)


@pytest.mark.parametrize(
    "wrong",
    [
        block("python", "assert 1 == 2\n"),
        block("sh", "inrun info no-such-run\n"),
        block("sh", "torchrun x.py\n"),
        block("text", "inrun train config.yaml\n"),
        block("rust", "fn main() {}\n"),
    ],
)
def test_control_wrong_blocks_fail(wrong: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception):  # noqa: B017 - whichever: an assertion, or the command's own error
        run_block(wrong, tmp_path, {})


def test_blocks_are_read_as_they_are_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: a GPU -->\n```python\nx\n```\n\n- a list\n\n  ```sh\n  inrun info a \\\n    b  # c\n  ```\n"
        "```console\n$ inrun x 'y z'\nprinted\n```\n```yaml\n# c.yaml\na: 1\n```\n"
    )
    gpu, shell, console, config = blocks_of(page)
    assert (gpu.not_run, gpu.line, shell.not_run) == ("a GPU", 3, None)
    assert commands_of(shell) == [["inrun", "info", "a", "b"]] and commands_of(console) == [["inrun", "x", "y z"]]
    run_block(config, tmp_path, {})
    assert (tmp_path / "c.yaml").read_text() == "# c.yaml\na: 1\n"
