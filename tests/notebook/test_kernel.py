"""Inside a kernel without ipywidgets: tables are drawn, bars come and go, nothing warns."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile_html import plain_text
from kernels import Kernel, check_clean

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytestmark = pytest.mark.filterwarnings("ignore")

BOOKS = """
import time
import numpy as np, pyarrow as pa
from inrun.ledger import Ledger, MemoryLedger, StepRecord
plain = pa.table({"a": [1]})
books = Ledger("run")
books.register_samples([{"sample_id": i, "domain": "<img src=x onerror=alert(1)>"} for i in range(4)])
row = {"step": 0, "validation": "math", "loss_before": 2.0, "loss_after": 1.5, "data": 0.5, "spread": 1.0, "residual": 0.0}
books.write(StepRecord(0, np.arange(4), {"math": np.ones(4, np.float32)}, [row]))
books.close()
run = Ledger.open("run")
"""
BAR = """
from inrun.truth.progress import reporting
with reporting(True, 3, "subsets") as tell:
    for done in range(3):
        time.sleep(0.25)
        tell(done + 1)
"""
COMMANDS = """
from inrun.cli.main import cli
from inrun.cli.progress import progress
with progress(patience=0.0, stays=True) as tell:
    pass
for words in (["scores", "run"], ["groups", "run"], ["audit", "run"], ["info", "run"]):
    cli.main(words, standalone_mode=False)
"""


def test_a_kernel_without_widgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        "try:\n    import ipywidgets\nexcept ImportError:\n    print('absent')",
        BOOKS,
        "plain",
        "run.scores(top=2)",
        "plain",
        "run.scores(by='domain')",
        "MemoryLedger().scores()",
        "run.scores().sort_by('score').slice(0, 1)",
        BAR,
        "run.plot.groups(library='matplotlib')",
        "run.plot.books(library='plotly')",
        "get_ipython().display_formatter.formatters['text/html'].for_type(pa.Table, lambda t: 'mine')\nrun.scores()",
        COMMANDS,
    ]
    outputs = Kernel(tmp_path, monkeypatch).run(cells, tmp_path)
    for found in outputs:
        check_clean(found)
    absent, _, before, top, after, groups, empty, sliced, bar, png, plotly, mine, _ = outputs
    assert "absent" in absent[0].text
    for foreign in (before, after):
        assert set(foreign[0].data) == {"text/plain"}
    for ours, words in ((top, "2 rows"), (groups, "Scores by group"), (empty, "0 rows"), (sliced, "1 rows")):
        assert words in plain_text(ours[0].data["text/html"]) and "pyarrow.Table" in ours[0].data["text/plain"]
    assert "<img src=x" in plain_text(top[0].data["text/html"])
    # One output that is replaced as work goes on, and empty in the end.
    assert len(bar) == 1 and bar[0].data["text/html"] == ""
    assert "image/png" in png[0].data and len(png) == 1
    assert "application/vnd.plotly.v1+json" in plotly[-1].data
    assert mine[0].data["text/html"] == "mine"


def test_ipython_is_not_imported_for_scores() -> None:
    import subprocess
    import sys

    code = "import sys; from inrun.ledger import MemoryLedger; MemoryLedger().scores(); assert 'IPython' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
