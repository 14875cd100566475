"""The configuration of a run: what is accepted, and what is said of the rest."""

from __future__ import annotations

import pytest

from inrun.errors import ConfigurationError
from inrun.methods import METHODS
from inrun.training.config import TrainConfig, load_config, make_config

GIVEN = {"data": {"paths": ["corpus.jsonl"]}, "validation": {"math": {"where": {"domain": "math"}}}}


def test_the_papers_recipe_is_the_default():
    c = make_config(GIVEN)
    o = c.optimizer
    assert (o.lr, o.final_lr, o.warmup, o.betas, o.weight_decay, o.clip) == (6e-4, 6e-5, 2000, (0.9, 0.95), 0.1, 1.0)
    assert (c.batch.size, c.model.context) == (16, 1024)


def test_whole_credit_is_the_default():
    assert make_config(GIVEN).scoring.method == "whole" == next(iter(METHODS))


def test_overrides_and_the_resolved_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("data: {paths: [a.jsonl]}\noptimizer: {lr: 1e-3}\nvalidation:\n  math: {split: val}\n")
    c = load_config(file, ["optimizer.lr=3e-4", "model.width=64", "validation.code.where.domain=code", "scoring.sketch=exact"])
    assert c.optimizer.lr == 3e-4 and c.model.width == 64 and c.scoring.sketch == "exact"
    assert c.validation["code"].where == {"domain": "code"} and c.validation["math"].split == "val"
    assert load_config(file).optimizer.lr == 1e-3  # YAML 1.1 reads it as a text
    again = tmp_path / "resolved.yaml"
    again.write_text(c.as_yaml())
    assert load_config(again) == c


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer.lrr=1"], ["no option 'lrr'", "did you mean 'lr'", "warmup"]),
        (["nonsense=1"], ["no option 'nonsense'", "optimizer"]),
        (["validation.math.rowz=1"], ["no option 'rowz'", "rows"]),
        (["optimizer.lr=fast"], ["optimizer.lr", "float"]),
        (["optimizer.lr=-1"], ["optimizer.lr is -1", "at least 0"]),
        (["optimizer.lr=.nan"], ["optimizer.lr"]),
        (["optimizer.clip=0"], ["optimizer.clip is 0", "above 0, or null"]),
        (["batch.accumulation=3"], ["batch.size 16", "accumulation 3"]),
        (["scoring.method=third"], ["scoring.method", "third", *METHODS]),
        (["scoring.method=midpoint"], ["scoring.method is 'midpoint'", "method=step"]),
        (["scoring.method=null"], ["scoring.method", "None", "str"]),
        (["scoring.sketch=0"], ["scoring.sketch is 0", "at least 1, exact, and null"]),
        (["scoring.sketch=small"], ["scoring.sketch is 'small'", "exact"]),
        (["scoring.audit_every=-1"], ["scoring.audit_every is -1", "at least 0, or null"]),
        (["scoring.update=auto"], ["scoring.update is 'auto'", "leave it out", "method=whole"]),
        (["scoring.credit=step"], ["scoring.credit is 'step'", "method=whole or method=step"]),
        (["scoring.credit_memory=exact"], ["scoring.credit_memory is 'exact'", "sketch=exact"]),
        (
            ["scoring.quadrature=gauss3", "scoring.refresh=4"],
            ["scoring.quadrature is 'gauss3'", "scoring.refresh is 4"],
        ),
        (["scoring.deferred_memory=2GB"], ["scoring.deferred_memory is '2GB'", "leave it out"]),
        (["later.dtype=bfloat16"], ["later.dtype is 'bfloat16'", "'float32'"]),
        (["tokenizer.kind=words"], ["tokenizer.kind is 'words'", "'bytes' or 'folder'"]),
        (["optimizer.lr=.inf"], ["optimizer.lr is inf", "finite"]),
        (["optimizer.betas=[0.9, 1]"], ["optimizer.betas[1] is 1", "at least 0 and below 1"]),
        (["optimizer.betas=[0.9]"], ["optimizer.betas is [0.9]", "length 2"]),
        (["model.dropout=1"], ["model.dropout is 1", "at least 0 and below 1"]),
        (["checkpoints.keep=-1"], ["checkpoints.keep is -1", "at least 0, or null"]),
        (["threads=-1"], ["threads is -1"]),
        (["tokenizer.vocab=100"], ["tokenizer.vocab is 100", "at least 258"]),
        (["validation.code={split: val, rows: -1}"], ["validation.code.rows is -1", "at least 0"]),
        (["validation.math=3"], ["validation.math is 3"]),
        (["optimizer=3"], ["optimizer is 3"]),
        (["validation.math.where.domain=3.5"], ["validation.math.where is", "3.5"]),
        (["validation.math.where={}"], ["'math'", "split, where"]),
        (["validation.math.where={colour: red}"], ["'colour'", "domain, source, owner"]),
        (["validation.math.folds=4"], ["4 folds", "rows is 1"]),
        (["validation={}"], ["no validation set", "scoring.enabled=false"]),
        (["data.paths=[]"], ["data.paths is empty"]),
        (["steps=0"], ["steps is 0"]),
        (["optimizer.lr"], ["NAME=VALUE"]),
        (["optimizer.lr.x=1"], ["not a section"]),
        (["optimizer=[1"], ["not YAML"]),
        (["nonfinite=maybe"], ["nonfinite"]),
    ],
)
def test_what_is_wrong_is_said(tmp_path, overrides, words):
    file = tmp_path / "c.yaml"
    file.write_text("data: {paths: [a.jsonl]}\noptimizer: {lr: 1e-3}\nvalidation:\n  math: {where: {domain: math}}\n")
    with pytest.raises(ConfigurationError) as caught:
        load_config(file, overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "\x00", "!!python/object/apply:os.system ['true']", "a: &a [*a]"])
def test_files_that_are_no_configuration(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError):
        load_config(file)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml")


def test_every_option_has_a_default():
    assert isinstance(TrainConfig(), TrainConfig)
