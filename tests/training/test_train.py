"""`inrun train`: the same run whatever interrupts it, and the same weights whether scored or not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import inrun
from inrun.errors import ConfigurationError, LedgerError, TrainingError
from inrun.training.checkpoint import checkpoints_of, prune
from inrun.training.config import load_config, make_config
from inrun.training.loop import lr_at
from inrun.training.loss import next_token_loss, row_losses
from inrun.training.order import Order, draw
from inrun.training.prepare import prepare, tokenizer_of
from inrun.training.session import train
from small_run import corpus, settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    corpus(tmp_path)
    return tmp_path


def weights(run: str | Path) -> dict[str, torch.Tensor]:
    return load_file(str(checkpoints_of(Path(run))[-1] / "model.safetensors"))


def same_weights(a: str | Path, b: str | Path) -> bool:
    left, right = weights(a), weights(b)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def losses(run: str | Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in rows if "loss" in r]


def test_a_run_leaves_books_metrics_and_checkpoints(folder):
    result = train(make_config(settings(folder)))
    run = folder / "run"
    assert result.finished and result.status.step == 12
    assert [p.name for p in checkpoints_of(run)] == ["step-00000005", "step-00000010", "step-00000012"]
    reader = inrun.Ledger.open(run)
    assert reader.contributions().num_rows == 12 * 4 * 3  # batch times columns: one set and two folds
    samples = reader.samples().to_pylist()
    trained = {s["document"] for s in samples}
    assert not any(int(d.split("-")[1]) % 6 == 5 for d in trained)  # no validation document is trained on
    assert {s["domain"] for s in samples} == {"code", "prose"}
    assert [step for step, _ in losses(run)] == list(range(12))
    assert set(result.status.validation) == {"code", "all"}
    assert load_config(run / "config.yaml") == make_config(settings(folder))


def test_every_evaluation_is_in_the_metrics(folder):
    train(make_config(settings(folder, logging={"every": 5, "evaluate_every": 3})))
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "validation" in r] == [0, 3, 6, 9, 12]
    assert [r["step"] for r in rows if "loss" in r] == [0, 3, 4, 6, 9, 11]


def test_scores_follow_the_samples(folder):
    """What the ledger says of a sample is what an accountant says that sees the same batches by hand."""
    config = make_config(settings(folder, model={"dropout": 0.0}))
    train(config)
    ledger = inrun.Ledger.open(folder / "run").contributions().to_pylist()
    order = Order(training_ids(config), 4, config.seed)
    for step in range(12):
        ids = [r["sample_id"] for r in ledger if r["step"] == step and r["validation"] == "code"]
        assert ids == order.batch(step).tolist()


def training_ids(config) -> np.ndarray:
    return prepare(config, tokenizer_of(config, Path(config.run))).chunks.ids


@pytest.mark.parametrize("method", ["whole", "step", "first", "second"])
def test_weights_are_the_same_with_and_without_scores(folder, method):
    scored = settings(folder, "scored", scoring={"method": method, "bitwise": True})
    plain = settings(folder, "plain", scoring={"enabled": False})
    train(make_config(scored))
    train(make_config(plain))
    assert same_weights(folder / "scored", folder / "plain")
    assert losses(folder / "scored") == losses(folder / "plain")
    other = settings(folder, "other", seed=1, scoring={"enabled": False})  # the control
    train(make_config(other))
    assert not same_weights(folder / "other", folder / "plain")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_stopped_and_resumed_is_unbroken(folder, accumulation):
    batch = {"accumulation": accumulation}
    train(make_config(settings(folder, "unbroken", batch=batch)))
    config = make_config(settings(folder, "broken", batch=batch))
    for stop_at in (3, 7, 8):
        count = iter(range(100))
        result = train(config, resume=True, stop=lambda c=count, s=stop_at: next(c) >= s - 1)
        assert not result.finished or result.status.step == 12
    train(config, resume=True)
    assert same_weights(folder / "broken", folder / "unbroken")
    assert losses(folder / "broken") == losses(folder / "unbroken")
    a, b = (inrun.Ledger.open(folder / name) for name in ("broken", "unbroken"))
    assert a.contributions().equals(b.contributions()) and a.scores().equals(b.scores())
    assert a.accounts().equals(b.accounts())


def test_accumulation_changes_rounding_only(folder):
    train(make_config(settings(folder, "one", model={"dropout": 0.0})))
    train(make_config(settings(folder, "four", model={"dropout": 0.0}, batch={"accumulation": 4})))
    one, four = (inrun.Ledger.open(folder / n).scores()["score"].to_numpy() for n in ("one", "four"))
    assert np.allclose(one, four, rtol=1e-2, atol=1e-6) and not np.array_equal(one, four)
    assert np.allclose([x for _, x in losses(folder / "one")], [x for _, x in losses(folder / "four")], rtol=1e-5)


def command(config: Path, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "inrun", "train", str(config), *more]
    return subprocess.Popen(call, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        file = run / "metrics.jsonl"
        if file.exists() and file.read_text().count('"loss"') > step:
            return
        time.sleep(0.005)
    raise AssertionError(process.communicate()[1])


@pytest.mark.slow
def test_killed_at_a_random_step_and_resumed_is_bitwise_unbroken(folder):
    """200 steps, kill -9 at random moments, --resume until done."""
    config = folder / "config.yaml"
    base = settings(folder, "broken", steps=200, checkpoints={"every": 20}, logging={"evaluate_every": 50})
    config.write_text(make_config(base).as_yaml())
    generator = random.Random(time.time_ns())
    kills = sorted(generator.sample(range(1, 190), 2))
    for step in kills:
        process = command(config, "--resume", "--quiet")
        wait_for_step(folder / "broken", step, process)
        process.kill()
        process.communicate()
    process = command(config, "--resume", "--quiet")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    process = command(config, f"run={folder / 'unbroken'}", "--quiet")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    what = f"killed at {kills}"
    assert same_weights(folder / "broken", folder / "unbroken"), what
    assert losses(folder / "broken") == losses(folder / "unbroken"), what
    a, b = (inrun.Ledger.open(folder / name) for name in ("broken", "unbroken"))
    assert a.contributions().num_rows == 200 * 4 * 3
    assert a.contributions().equals(b.contributions()) and a.accounts().equals(b.accounts()), what
    assert a.credits().num_rows == 200 * 4 * 3 and a.credits().equals(b.credits()), what


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)])
def test_a_signal_leaves_a_checkpoint(folder, number, code):
    config = folder / "config.yaml"
    config.write_text(make_config(settings(folder, steps=5000, checkpoints={"every": 4000})).as_yaml())
    process = command(config)
    wait_for_step(folder / "run", 2, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "--resume" in errors and len(checkpoints_of(folder / "run")) == 1
    step = int(checkpoints_of(folder / "run")[0].name[5:])
    assert inrun.Ledger.open(folder / "run").contributions()["step"].to_numpy().max() == step - 1


def test_not_finite_stops_or_skips_aloud(folder, caplog):
    wild = {"lr": 1e30, "final_lr": 1e30, "warmup": 0, "clip": None}
    with pytest.raises(TrainingError, match="nonfinite=skip"):
        train(make_config(settings(folder, "stops", optimizer=wild)))
    skips = make_config(settings(folder, "skips", optimizer=wild, nonfinite="skip"))
    result = train(skips)
    assert result.finished and result.skipped >= 8
    assert "is skipped" in caplog.text
    rows = inrun.Ledger.open(folder / "skips").accounts().to_pylist()
    assert sum(r["skipped"] is not None for r in rows) >= 8 * 3
    metrics = [json.loads(line) for line in (folder / "skips" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("loss", 0) is None for row in metrics)  # valid JSON whatever the loss


def test_resume_refuses_what_would_change_the_run(folder):
    train(make_config(settings(folder)))
    with pytest.raises(ConfigurationError, match="--resume"):
        train(make_config(settings(folder)))
    with pytest.raises(ConfigurationError, match=r"optimizer.lr is 0.1"):
        train(make_config(settings(folder, optimizer={"lr": 0.1})), resume=True)
    longer = train(make_config(settings(folder, steps=15)), resume=True)
    assert longer.finished and longer.status.step == 15
    with (folder / "corpus.jsonl").open("a") as out:
        out.write('{"text": "one more", "domain": "prose", "split": "train"}\n')
    with pytest.raises(TrainingError, match="documents"):
        train(make_config(settings(folder, steps=18)), resume=True)


def test_a_run_that_failed_before_its_first_step_may_be_tried_again(folder):
    with pytest.raises(ConfigurationError, match="math"):
        train(make_config(settings(folder, validation={"code": {"split": "val", "where": {"domain": "math"}}})))
    with pytest.raises(ConfigurationError, match="heads"):
        train(make_config(settings(folder, model={"heads": 3})))
    assert train(make_config(settings(folder))).finished
    with pytest.raises(ConfigurationError, match="--resume"):
        train(make_config(settings(folder)))


def test_resumed_without_a_checkpoint_the_metadata_is_that_of_the_data_now(folder):
    """Killed before the first checkpoint, the corpus changed: sample ids mean other documents, and the books must say so."""
    config = make_config(settings(folder, checkpoints={"every": 500}))

    class Killed(BaseException):
        pass

    def kill(status):
        if status.step == 4:
            raise Killed

    with pytest.raises(Killed):
        train(config, tell=kill)
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    (folder / "corpus.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    assert train(config, resume=True).finished
    data = prepare(config, tokenizer_of(config, folder / "run"))
    now = {r["sample_id"]: r["document"] for r in data.chunks.samples().to_pylist()}
    books = {r["sample_id"]: r["document"] for r in inrun.Ledger.open(folder / "run").samples().to_pylist()}
    assert books == now


def test_other_peoples_folders_are_left_alone(folder):
    home = folder / "project"
    for name in ("tokenizer", "checkpoints", "samples"):
        (home / name).mkdir(parents=True)
        (home / name / "precious.txt").write_text("mine")
    (home / "config.yaml").write_text("theirs: true")
    for resume in (False, True):
        with pytest.raises(ConfigurationError, match="not written by"):
            train(make_config(settings(folder, "project")), resume=resume)
    assert len(list(home.rglob("precious.txt"))) == 3 and (home / "config.yaml").read_text() == "theirs: true"


@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_that_is_going_on_is_left_alone(folder, enabled):
    config = make_config(settings(folder, scoring={"enabled": enabled}))

    def second(status):
        if status.step == 3:
            for resume in (False, True):
                with pytest.raises(TrainingError, match="another process"):
                    train(config, resume=resume)

    assert train(config, tell=second).finished
    assert [step for step, _ in losses(folder / "run")] == list(range(12))


def test_files_to_validate_with_are_not_trained_on(folder):
    (folder / "data").mkdir()
    lines = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)
    (folder / "data" / "a.jsonl").write_text("".join(lines[:40]))
    (folder / "data" / "b.jsonl").write_text("".join(lines[40:]))
    sets = {"code": {"paths": [str(folder / "data" / "b.jsonl")], "rows": 2}, "all": {"split": "val", "rows": 2}}
    both = settings(folder, data={"paths": [str(folder / "data")]})
    with pytest.raises(ConfigurationError, match="b.jsonl"):
        train(make_config({**both, "validation": sets}))
    apart = settings(folder, "apart", data={"paths": [str(folder / "data" / "a.jsonl")]})
    assert train(make_config({**apart, "validation": sets})).finished
    (folder / "data" / "b.jsonl").write_text("".join(lines[30:]))
    with pytest.raises(TrainingError, match="validation set 'code'"):
        train(make_config({**apart, "validation": sets, "steps": 14}), resume=True)


def test_the_newest_whole_checkpoint_outlives_a_damaged_one(folder):
    config = make_config(settings(folder, checkpoints={"every": 5, "keep": 0}))
    train(config)
    damaged = checkpoints_of(folder / "run")[-1]
    train(make_config(settings(folder, "twin", checkpoints={"every": 5, "keep": None})))
    shutil.copytree(checkpoints_of(folder / "twin")[1], folder / "run" / "checkpoints" / "step-00000005")
    (damaged / "random.safetensors").write_bytes(b"x")
    with pytest.raises(LedgerError):  # the twin's mark is another run's: nothing is taken for what it is not
        train(config, resume=True)
    prune(folder / "run", 5, 0, None)
    assert (folder / "run" / "checkpoints" / "step-00000005").exists()


def test_a_shorter_run_is_refused(folder):
    train(make_config(settings(folder)))
    with pytest.raises(ConfigurationError, match="has done 12 already"):
        train(make_config(settings(folder, steps=6)), resume=True)
    assert load_config(folder / "run" / "config.yaml").steps == 12


def test_folds_measure_the_same_loss():
    torch.manual_seed(0)
    model = torch.nn.Embedding(9, 9)
    rows = torch.tensor([[1, 2, 3, 4], [5, 6, -1, -1], [7, 8, 1, -1], [2, 2, 2, 2]])
    assert torch.allclose(row_losses(model, rows).mean(), next_token_loss(model, rows))


def test_a_model_that_sees_ahead_is_refused(folder):
    pytest.importorskip("transformers")
    shape = {"type": "bert", "options": {"intermediate_size": 32}}
    with pytest.raises(ConfigurationError, match="not causal"):
        train(make_config(settings(folder, model=shape)))


def test_a_damaged_checkpoint_is_passed_over(folder, caplog):
    train(make_config(settings(folder, "unbroken")))
    train(make_config(settings(folder)))
    newest = checkpoints_of(folder / "run")[-1] / "optimizer.safetensors"
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(data)
    result = train(make_config(settings(folder)), resume=True)
    assert result.finished and "is damaged" in caplog.text and "goes on from step 10" in caplog.text
    assert same_weights(folder / "run", folder / "unbroken")
    for checkpoint in checkpoints_of(folder / "run"):
        (checkpoint / "state.json").write_text("{")
    with pytest.raises(TrainingError, match="no checkpoint"):
        train(make_config(settings(folder)), resume=True)


MODELS = {
    "gpt2": {},
    "gpt_neox": {"options": {"intermediate_size": 32}, "tied": False},
    "llama": {"options": {"intermediate_size": 32, "num_key_value_heads": 1}, "tied": False},
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers(folder, kind):
    pytest.importorskip("transformers")
    shape = {"type": kind, "dropout": 0.0, **MODELS[kind]}
    config = make_config(settings(folder, steps=4, model=shape, scoring={"audit_every": 1}))
    result = train(config)
    assert result.finished and result.status.residual < 0.02
    assert inrun.Ledger.open(folder / "run").about["model"].startswith(kind)


def test_weights_of_a_local_folder(folder):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    shape = {"vocab_size": 257, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=None, eos_token_id=None))
    model.save_pretrained(folder / "local")
    given = {"type": "gpt2", "path": str(folder / "local"), "pretrained": True, "dropout": 0.0}
    zero = {"lr": 0.0, "final_lr": 0.0, "weight_decay": 0.0}
    train(make_config(settings(folder, steps=1, model=given, optimizer=zero)))
    mine = weights(folder / "run")
    assert torch.equal(mine["transformer.wte.weight"], model.transformer.wte.weight.detach())
    again = transformers.AutoModelForCausalLM.from_pretrained(checkpoints_of(folder / "run")[-1])  # a checkpoint is such a folder
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    with pytest.raises(ConfigurationError, match="has 24 positions"):
        train(make_config(settings(folder, "long", steps=1, model={**given, "context": 48})))
    with pytest.raises(ConfigurationError, match=r"config.json"):
        train(make_config(settings(folder, "none", model={"type": "gpt2", "path": str(folder)})))


def test_weights_of_an_earlier_run(folder):
    train(make_config(settings(folder, "before")))
    last = checkpoints_of(folder / "before")[-1]
    zero = {"lr": 0.0, "final_lr": 0.0, "weight_decay": 0.0}
    train(make_config(settings(folder, steps=1, model={"path": str(last), "pretrained": True}, optimizer=zero)))
    assert same_weights(folder / "run", folder / "before")
    with pytest.raises(TrainingError, match="does not fit"):
        train(make_config(settings(folder, "wide", steps=1, model={"path": str(last), "pretrained": True, "width": 32})))
    with pytest.raises(ConfigurationError, match="pretrained=true"):
        train(make_config(settings(folder, "half", steps=1, model={"path": str(last)})))


class FakeRun:
    def __init__(self):
        self.rows, self.ended = [], False

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.ended = True


def test_curves_of_domains_go_to_wandb_offline_and_tensorboard(folder, monkeypatch):
    told, run = {}, FakeRun()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **k: told.update(k) or run))

    class Writer:
        def __init__(self, place, purge_step):
            told["tensorboard"] = (place, purge_step, [])

        def add_scalar(self, name, value, step):
            told["tensorboard"][2].append((name, value, step))

        def close(self):
            told["closed"] = True

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    train(make_config(settings(folder, logging={"wandb": True, "tensorboard": True})))
    assert told["mode"] == "offline" and run.ended and told["closed"]
    assert "domains/code/prose" in run.rows[-2][1] and "validation/all" in run.rows[-1][1]
    assert {name for name, _, _ in told["tensorboard"][2]} >= {"loss", "lr", "domains/all/code"}


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_sink_that_is_not_installed(folder, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "wandb" if name == "wandb" else "torch.utils.tensorboard", None)
    with pytest.raises(ConfigurationError, match=f"pip install {name}"):
        train(make_config(settings(folder, logging={name: True})))


def test_learning_rates():
    config = make_config({"data": {"paths": ["x"]}, "scoring": {"enabled": False}})
    assert lr_at(0, config) == pytest.approx(6e-4 / 2000) and lr_at(1999, config) == pytest.approx(6e-4)
    assert lr_at(20_000, config) == pytest.approx(6e-5) and lr_at(11_000, config) == pytest.approx((6e-4 + 6e-5) / 2)


def test_an_epoch_takes_every_sample_once():
    ids = np.arange(100, 113)
    order = Order(ids, 5, seed=3)
    taken = np.concatenate([order.batch(s) for s in range(13)])
    for epoch in range(5):
        assert sorted(taken[13 * epoch : 13 * epoch + 13].tolist()) == ids.tolist()
    assert not np.array_equal(taken[:13], taken[13:26])
    again = Order(ids, 5, seed=3)
    assert np.array_equal(again.batch(7), order.batch(7)) and np.array_equal(again.batch(2), order.batch(2))
    assert not np.array_equal(Order(ids, 5, seed=4).batch(0), order.batch(0))
    tiny = Order(np.arange(2), 5, seed=0).batch(0)  # fewer samples than a batch
    assert len(tiny) == 5 and set(tiny.tolist()) == {0, 1}


def test_validation_draws():
    ids = np.arange(50)
    a = draw(ids, 4, 0, "math", 7)
    assert len(set(a.tolist())) == 4 and np.array_equal(a, draw(ids, 4, 0, "math", 7))
    assert not np.array_equal(a, draw(ids, 4, 0, "math", 8)) and not np.array_equal(a, draw(ids, 4, 0, "code", 7))
    assert np.array_equal(draw(ids, 0, 0, "math", 7), ids) and np.array_equal(draw(ids, 99, 0, "math", 7), ids)
