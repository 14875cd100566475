"""What `inrun train` is told: a YAML file, dotted overrides, and the paper's recipe where both are silent."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta
from msgspec.inspect import DictType, FloatType, IntType, LiteralType, NoneType, StructType, TupleType, Type, UnionType, type_info

from inrun.errors import ConfigurationError
from inrun.ledger.labels import is_name
from inrun.methods import METHODS

_LARGEST = sys.float_info.max
#: At least one; none or more; a number that is finite and not negative; a share of a whole.
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0, le=_LARGEST)]
Share = Annotated[float, Meta(ge=0, lt=1)]


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
    #: ``chunks.parquet`` of `inrun curate`: of the documents, only the pieces that it keeps are trained on.
    pieces: str | None = None
    #: Where tokens are kept between runs; None: a folder ``tokens`` beside the run's own.
    cache: str | None = None


class Tokens(Part, frozen=True):
    """How text becomes tokens."""

    kind: Literal["bytes", "gpt2", "folder", "train"] = "gpt2"
    #: Local vocabulary files or tokenizer folder.
    path: str | None = None
    #: Size of a vocabulary that is trained on the corpus.
    vocab: Annotated[int, Meta(ge=258)] = 8192


class Model(Part, frozen=True):
    """The reference GPT, or any causal language model of transformers."""

    #: "gpt", or a model type of transformers (gpt2, gpt_neox, llama ...).
    type: str = "gpt"
    #: A local folder: with a config.json of transformers (``type`` is then any but gpt), or for gpt a checkpoint of such a run.
    path: str | None = None
    #: Begin with the weights in ``path`` (safetensors) instead of random ones.
    pretrained: bool = False
    context: Count = 1024
    width: Count = 768
    layers: Count = 12
    heads: Count = 12
    dropout: Share = 0.0
    #: Whether head and token table share one weight; null leaves it to the model type.
    tied: bool | None = True
    #: More options of the transformers config, by its own names.
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class Optimizer(Part, frozen=True):
    """AdamW with warm-up and cosine decay, clipped by norm: the paper's recipe."""

    lr: Amount = 6e-4
    #: What the cosine ends at.
    final_lr: Amount = 6e-5
    warmup: Whole = 2000
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: Amount = 1e-8
    #: Of matrices and tables; norms and biases are not decayed.
    weight_decay: Amount = 0.1
    #: Largest norm of the gradient; None does not clip.
    clip: Annotated[float, Meta(gt=0)] | None = 1.0


class Batch(Part, frozen=True):
    """Samples of one optimizer step."""

    size: Count = 16
    #: Backwards that a step is split into; the size stays that of the step.
    accumulation: Count = 1


class ValidationSet(Part, frozen=True):
    """Data whose loss defines value: documents of a split and/or with certain values, or other files."""

    split: str | None = None
    #: Such as ``{domain: math}``; a list means any of them.
    where: dict[str, str | list[str]] = msgspec.field(default_factory=dict)
    #: Other files; the fields are those of ``data``.
    paths: list[str] = msgspec.field(default_factory=list)
    #: Samples of which the gradient is taken at every step, drawn anew each time; 0 takes all, always.
    rows: Whole = 1
    #: Parts scored side by side, for standard errors; 0 or 1: none. Every part needs a row.
    folds: Whole = 0
    #: The most samples that are kept of the set, drawn once; 0 keeps all.
    limit: Whole = 0


class Scoring(Part, frozen=True):
    """How samples are scored; the names are those of :class:`inrun.Accountant`."""

    enabled: bool = True
    #: One of :data:`inrun.methods.METHODS`.
    method: str = "whole"
    #: Numbers kept per sample until its credit is settled: by the model's size (null), so many, or all of them ("exact").
    sketch: int | str | None = None
    #: Steps between audits; 0: never; null: often at first, then every 50th.
    audit_every: Whole | None = None
    #: Whether which rows belong to which sample is read from the graph.
    check_rows: bool = True
    #: Whether training is bit for bit what it is without scores.
    bitwise: bool = False


#: Options of ``scoring`` that earlier versions had, and what to write now.
GONE = {
    "credit": "write method=whole or method=step",
    "credit_memory": "write sketch=exact for exact, and leave it out for sketch",
    "update": "leave it out: method=whole and step share out the optimizer's own update, first and second that of SGD",
    "quadrature": "leave it out: rough steps take more points by themselves",
    "refresh": "leave it out: every step takes a new validation gradient",
    "deferred_memory": "leave it out: nothing is deferred",
}


class Checkpoints(Part, frozen=True):
    """Where training can go on, and what `inrun replay` looks from."""

    every: Count = 1000
    #: Checkpoints that are kept beside the newest; None keeps all.
    keep: Whole | None = 2
    #: Of those that would go, keep the ones at multiples of this many steps.
    keep_every: int | None = None


class Logging(Part, frozen=True):
    """What is reported, and where."""

    #: Steps between lines of metrics.jsonl.
    every: Count = 10
    #: Steps between evaluations of the validation sets (None: an eighth of the run, at most 250), and samples of each.
    evaluate_every: Count | None = None
    evaluate_rows: Count = 64
    tensorboard: bool = False
    #: Offline: nothing leaves the machine.
    wandb: bool = False


class Distributed(Part, frozen=True):
    """How several processes share the work (torchrun); nothing for one."""

    #: "ddp": every process has the whole model; "fsdp": parameters are split over processes (fully_shard); "auto" is ddp.
    mode: Literal["auto", "ddp", "fsdp"] = "auto"
    #: Seconds after which a process that does not answer is given up.
    timeout: Annotated[float, Meta(gt=0, le=1e6)] = 600.0


class Later(Part, frozen=True):
    """Room for what is not built yet; anything but these values is refused by name."""

    dtype: Literal["float32"] = "float32"
    compile: Literal[False] = False
    activation_checkpointing: Literal[False] = False


class TrainConfig(Part, frozen=True):
    """A whole run."""

    run: str = "runs/train"
    seed: Whole = 0
    steps: Count = 20_000
    device: str = "cpu"
    threads: Whole | None = None
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
    distributed: Distributed = Distributed()
    later: Later = Later()

    @property
    def evaluate_every(self) -> int:
        """Return the steps between evaluations: short runs have some, too."""
        return self.logging.evaluate_every or max(1, min(250, self.steps // 8))

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
    later = given.get("later")
    if isinstance(later, dict) and later.get("processes") == 1:  # runs from before there could be several say so
        given = {**given, "later": {name: value for name, value in later.items() if name != "processes"}}
    _refuse_gone(given)
    try:
        # Not strict: YAML 1.1 reads 6e-4 as a text.
        config = msgspec.convert(given, TrainConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the configuration is wrong: {_explain(str(error), given)}") from error
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


def _explain(message: str, given: Any) -> str:
    """Say which option is wrong, what it was given, and what is accepted there."""
    what, _, where = message.partition(" - at `$")
    name, value, kind = _locate(where.rstrip("`"), given)
    if "unknown field" in what and isinstance(kind, StructType):
        wrong, names = what.split("`")[1], [field.name for field in kind.fields]
        near = difflib.get_close_matches(wrong, names, 1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        return f"{name and f'{name}: '}there is no option {wrong!r}{meant} Accepted are {', '.join(names)}"
    accepted = _accepted(kind)
    if accepted and "got `" not in what:
        return f"{name} is {value!r}; it must be {accepted}"
    return f"{name} is {value!r}: {what}" if name else what


def _locate(path: str, given: Any) -> tuple[str, Any, Type]:
    """Follow a path of msgspec; return it with the keys that msgspec leaves out, the value there, and what it should be."""
    kind: Type = type_info(TrainConfig)
    found = ""
    for name, place in re.findall(r"\.(\w+)|\[([^\]]*)\]", path):
        kind = _without_none(kind)
        if isinstance(kind, StructType) and name:
            kind = next(field.type for field in kind.fields if field.name == name)
            key: Any = name
        elif isinstance(kind, DictType) and isinstance(kind.value_type, StructType):
            key, kind = _wrong_key(given, kind.value_type), kind.value_type
        elif isinstance(kind, TupleType):
            key, kind = int(place), kind.item_types[int(place)]
        else:
            break
        found += f"[{key}]" if isinstance(key, int) else f".{key}"
        given = given[key]
    return found.lstrip("."), given, kind


def _wrong_key(values: Mapping[str, Any], kind: StructType) -> str:
    """Return the first key whose value is not of a kind."""
    for key, value in values.items():
        try:
            msgspec.convert(value, kind.cls, strict=False)
        except msgspec.ValidationError:
            return str(key)
    raise AssertionError("all values are of the kind")


def _without_none(kind: Type) -> Type:
    """Return what an option may be beside None."""
    others = [k for k in kind.types if not isinstance(k, NoneType)] if isinstance(kind, UnionType) else [kind]
    return others[0] if len(others) == 1 else kind


def _accepted(kind: Type) -> str:
    """Describe the values of an option; "" where there is no more to say than its type."""
    inner = _without_none(kind)
    words: list[str] = []
    if isinstance(inner, LiteralType):
        words = [" or ".join(repr(value) for value in inner.values)]
    elif isinstance(inner, IntType | FloatType):
        limits = (("at least", inner.ge), ("above", inner.gt), ("below", inner.lt), ("at most", inner.le))
        words = ["finite" if x == _LARGEST else f"{word} {x}" for word, x in limits if x is not None]
    return " and ".join(words) + (", or null" if words and inner is not kind else "")


def _check(c: TrainConfig) -> None:
    """Refuse what no type can say: values that do not go together, and names that a registry does not know."""
    _check_scoring(c.scoring)
    if not c.data.paths:
        raise ConfigurationError("data.paths is empty: give the files or folders to train on, such as data.paths=[corpus.jsonl.gz]")
    if c.batch.size % c.batch.accumulation:
        raise ConfigurationError(
            f"batch.size {c.batch.size} cannot be split into batch.accumulation {c.batch.accumulation} equal parts"
        )
    if c.scoring.enabled and not c.validation:
        raise ConfigurationError(
            "there is no validation set, and scores say what samples did to one. Name some, such as "
            "validation.math.where.domain=math, or train without scores: scoring.enabled=false"
        )
    for name, v in c.validation.items():
        _check_validation(name, v)


def _check_scoring(s: Scoring) -> None:
    if s.method not in METHODS:
        raise ConfigurationError(f"scoring.method is {s.method!r}; accepted are {', '.join(METHODS)}")
    if (isinstance(s.sketch, str) and s.sketch != "exact") or (isinstance(s.sketch, int) and s.sketch < 1):
        raise ConfigurationError(f"scoring.sketch is {s.sketch!r}; accepted are a number of at least 1, exact, and null")


def _refuse_gone(given: Mapping[str, Any]) -> None:
    """Raise for options of earlier versions, and say what to write instead."""
    scoring = given.get("scoring")
    if not isinstance(scoring, dict):
        return
    found = [f"scoring.{name} is {scoring[name]!r} ({instead})" for name, instead in GONE.items() if name in scoring]
    if found:
        raise ConfigurationError(f"there are options that this inrun has no more: {'; '.join(found)}")
    if scoring.get("method") == "midpoint":
        raise ConfigurationError("scoring.method is 'midpoint', which this inrun calls step; write method=step")


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
    if v.folds > 1 and 0 < v.rows < v.folds:
        raise ConfigurationError(f"validation.{name}: {v.folds} folds need at least as many rows per step; rows is {v.rows}")
