"""What `inrun train` is told: a YAML file, dotted overrides, and the paper's recipe where both are silent."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from inrun.errors import ConfigurationError
from inrun.ledger.labels import is_name


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section of the configuration. Names that are not known are errors."""


class Data(Part, frozen=True):
    """Where documents come from. A field is None where documents have none; dots reach into nested objects."""

    #: jsonl (plain, gz, zst), Parquet, folders of text files or of such files, saved datasets.
    paths: list[str] = msgspec.field(default_factory=list)
    text: str | None = "text"
    id: str | None = "id"
    domain: str | None = "domain"
    source: str | None = "source"
    owner: str | None = "owner"
    split: str | None = "split"
    #: Documents of this split are trained on. "auto": of "train" if there is such a split, else "all" that no set takes.
    train_split: str = "auto"
    #: Where tokens are kept between runs; None: a folder ``tokens`` beside the run's own.
    cache: str | None = None


class Tokens(Part, frozen=True):
    """How text becomes tokens."""

    kind: Literal["bytes", "gpt2", "folder", "train"] = "gpt2"
    #: Local vocabulary files or tokenizer folder.
    path: str | None = None
    #: Size of a vocabulary that is trained on the corpus.
    vocab: int = 8192


class Model(Part, frozen=True):
    """The reference GPT, or any causal language model of transformers."""

    #: "gpt", or a model type of transformers (gpt2, gpt_neox, llama ...).
    type: str = "gpt"
    #: A local folder: with a transformers config.json (``type`` is then any but gpt), or for gpt a checkpoint of such a run.
    path: str | None = None
    #: Begin with the weights in ``path`` (safetensors) instead of random ones.
    pretrained: bool = False
    context: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.0
    tied: bool = True
    #: More options of the transformers config, by its own names.
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class Optimizer(Part, frozen=True):
    """AdamW with warm-up and cosine decay, clipped by norm: the paper's recipe."""

    lr: float = 6e-4
    #: What the cosine ends at.
    final_lr: float = 6e-5
    warmup: int = 2000
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    #: Of matrices and tables; norms and biases are not decayed.
    weight_decay: float = 0.1
    #: Largest norm of the gradient; None does not clip.
    clip: float | None = 1.0


class Batch(Part, frozen=True):
    """Samples of one optimizer step."""

    size: int = 16
    #: Backwards that a step is split into; the size stays that of the step.
    accumulation: int = 1


class ValidationSet(Part, frozen=True):
    """Data whose loss defines value: documents of a split and/or with certain values, or other files."""

    split: str | None = None
    #: Such as ``{domain: math}``; a list means any of them.
    where: dict[str, str | list[str]] = msgspec.field(default_factory=dict)
    #: Other files; the fields are those of ``data``.
    paths: list[str] = msgspec.field(default_factory=list)
    #: Samples of which the gradient is taken at every step, drawn anew each time; 0 takes all, always.
    rows: int = 1
    #: Parts scored side by side, for standard errors; 0 or 1: none. Every part needs a row.
    folds: int = 0
    #: The most samples that are kept of the set, drawn once; 0 keeps all.
    limit: int = 0


class Scoring(Part, frozen=True):
    """How samples are scored; the names are those of :class:`inrun.Accountant`."""

    enabled: bool = True
    method: Literal["first", "lookahead", "second", "midpoint"] = "first"
    update: Literal["auto", "sgd", "frozen", "secant"] = "auto"
    quadrature: str | None = None
    refresh: int = 1
    bitwise: bool = False
    #: Steps between audits; None audits as often as costs under one per cent, which differs from run to run.
    audit_every: int | None = 50
    deferred_memory: int | str | None = None


class Checkpoints(Part, frozen=True):
    """Where training can go on, and what `inrun replay` looks from."""

    every: int = 1000
    #: Checkpoints that are kept beside the newest; None keeps all.
    keep: int | None = 2
    #: Of those that would go, keep the ones at multiples of this many steps.
    keep_every: int | None = None


class Logging(Part, frozen=True):
    """What is said, and where."""

    #: Steps between lines of metrics.jsonl.
    every: int = 10
    #: Steps between evaluations of the validation sets, on at most so many samples of each.
    evaluate_every: int = 250
    evaluate_rows: int = 64
    tensorboard: bool = False
    #: Offline: nothing leaves the machine.
    wandb: bool = False


class Later(Part, frozen=True):
    """Room for what is not built yet; anything but these values is refused by name."""

    dtype: Literal["float32"] = "float32"
    compile: Literal[False] = False
    activation_checkpointing: Literal[False] = False
    processes: Literal[1] = 1


class TrainConfig(Part, frozen=True):
    """A whole run."""

    run: str = "runs/train"
    seed: int = 0
    steps: int = 20_000
    device: str = "cpu"
    threads: int | None = None
    #: What a loss or gradient that is not finite does: "stop" the run, or "skip" the step.
    nonfinite: Literal["stop", "skip"] = "stop"
    data: Data = Data()
    tokenizer: Tokens = Tokens()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    batch: Batch = Batch()
    validation: dict[str, ValidationSet] = msgspec.field(default_factory=dict)
    scoring: Scoring = Scoring()
    checkpoints: Checkpoints = Checkpoints()
    logging: Logging = Logging()
    later: Later = Later()

    def as_yaml(self) -> str:
        """Return the whole configuration, defaults included."""
        return yaml.safe_dump(msgspec.to_builtins(self), sort_keys=False, allow_unicode=True)


def load_config(file: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and apply overrides such as ``optimizer.lr=3e-4``."""
    given: Any = {}
    if file is not None:
        try:
            given = yaml.safe_load(Path(file).read_text("utf-8")) or {}
        except OSError as error:
            raise ConfigurationError(f"the configuration {str(file)!r} cannot be read: {error.strerror or error}") from error
        except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"the configuration {str(file)!r} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(given, dict):
        raise ConfigurationError(f"the configuration {str(file)!r} holds a {type(given).__name__}; it must hold names and values")
    for override in overrides:
        _override(given, override)
    return make_config(given)


def make_config(given: Mapping[str, Any]) -> TrainConfig:
    """Check plain data and return it as a configuration."""
    try:
        # Not strict: YAML 1.1 reads 6e-4 as a text.
        config = msgspec.convert(given, TrainConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the configuration is wrong: {_explain(str(error))}") from error
    _check(config)
    return config


def _override(given: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ConfigurationError(f"{override!r} is not an override; write NAME=VALUE with dots for sections: optimizer.lr=3e-4")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"the value of {override!r} is not YAML: {' '.join(str(error).split())}") from error
    section = given
    for name in names[:-1]:
        inner = section.setdefault(name, {})
        if inner is None:
            inner = section[name] = {}
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{override!r}: {name!r} is not a section with names of its own")
        section = inner
    section[names[-1]] = value


def _explain(message: str) -> str:
    """Say where, and which names there are, when one is not known."""
    what, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    at = f"{path}: " if path else ""
    if "unknown field" not in what:
        return at + what
    wrong, names = what.split("`")[1], _names(path)
    near = difflib.get_close_matches(wrong, names, 1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{at}there is no option {wrong!r}{meant} Accepted are {', '.join(names)}"


def _names(path: str) -> list[str]:
    kind: Any = TrainConfig
    for name in [part for part in path.split(".") if part]:
        if name.startswith("validation"):
            return list(ValidationSet.__struct_fields__)
        kind = next((f.type for f in msgspec.structs.fields(kind) if f.name == name), kind)
    return list(kind.__struct_fields__)


def _check(c: TrainConfig) -> None:
    """Refuse values that would only fail later, or mean nothing."""
    least = {
        "steps": (c.steps, 1),
        "model.context": (c.model.context, 1),
        "model.width": (c.model.width, 1),
        "model.layers": (c.model.layers, 1),
        "model.heads": (c.model.heads, 1),
        "batch.size": (c.batch.size, 1),
        "batch.accumulation": (c.batch.accumulation, 1),
        "optimizer.warmup": (c.optimizer.warmup, 0),
        "optimizer.lr": (c.optimizer.lr, 0),
        "optimizer.final_lr": (c.optimizer.final_lr, 0),
        "optimizer.weight_decay": (c.optimizer.weight_decay, 0),
        "checkpoints.every": (c.checkpoints.every, 1),
        "checkpoints.keep": (c.checkpoints.keep or 0, 0),
        "logging.every": (c.logging.every, 1),
        "logging.evaluate_every": (c.logging.evaluate_every, 1),
        "logging.evaluate_rows": (c.logging.evaluate_rows, 1),
        "scoring.refresh": (c.scoring.refresh, 1),
        "seed": (c.seed, 0),
        "tokenizer.vocab": (c.tokenizer.vocab, 258),
        "optimizer.eps": (c.optimizer.eps, 0),
        "threads": (c.threads or 1, 1),
    }
    for name, (value, low) in least.items():
        if not (math.isfinite(value) and value >= low):
            raise ConfigurationError(f"{name} is {value}; it must be at least {low}")
    for name, share in (("model.dropout", c.model.dropout), *(("optimizer.betas", beta) for beta in c.optimizer.betas)):
        if not 0 <= share < 1:
            raise ConfigurationError(f"{name} is {share}; it must be at least 0 and below 1")
    if not c.data.paths:
        raise ConfigurationError("data.paths is empty: give the files or folders to train on, such as data.paths=[corpus.jsonl.gz]")
    if c.batch.size % c.batch.accumulation:
        raise ConfigurationError(
            f"batch.size {c.batch.size} cannot be split into batch.accumulation {c.batch.accumulation} equal parts"
        )
    if c.optimizer.clip is not None and not c.optimizer.clip > 0:
        raise ConfigurationError(f"optimizer.clip is {c.optimizer.clip}; it must be above 0, or null for no clipping")
    if c.scoring.enabled and not c.validation:
        raise ConfigurationError(
            "there is no validation set, and scores say what samples did to one. Name some, such as "
            "validation.math.where.domain=math, or train without scores: scoring.enabled=false"
        )
    for name, v in c.validation.items():
        _check_validation(name, v)


def _check_validation(name: str, v: ValidationSet) -> None:
    if not is_name(name) or not name.isprintable():
        raise ConfigurationError(f"{name!r} cannot be the name of a validation set: it must have letters, and no #, [ and ]")
    if not (v.split or v.where or v.paths):
        raise ConfigurationError(
            f"validation set {name!r} does not say which data it takes: give split, where (such as {{domain: math}}) or paths"
        )
    unknown = [key for key in v.where if key not in ("domain", "source", "owner")]
    if unknown:
        raise ConfigurationError(f"validation.{name}.where: {unknown[0]!r} is not one of domain, source, owner")
    if min(v.rows, v.folds, v.limit) < 0 or (v.folds > 1 and 0 < v.rows < v.folds):
        raise ConfigurationError(f"validation.{name}: {v.folds} folds need at least as many rows per step; rows is {v.rows}")
