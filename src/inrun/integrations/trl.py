"""TRL's SFTTrainer and DPOTrainer: ``attach(trainer, validation=...)``, with packing, padding-free batches and LoRA.

On top of what :mod:`.transformers` does:

- The head. TRL multiplies by ``lm_head.weight`` without calling the module; where the head is trained it is called (:mod:`.heads`).
- Packed documents. Packing drops every column but tokens and labels. ``documents=`` (the dataset that the trainer was given) is
  packed once more, with ids, and must come out as the trainer's; every document is then scored by itself.
- Pairs. A sample of DPO is two rows, chosen and rejected: both have its id. The reference model is not trained and not scored.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import ConfigurationError, IdsError
from inrun.integrations.data import ID_FIELD, KeepIds, is_arrow, is_stream, with_id_column
from inrun.integrations.heads import CalledHead
from inrun.integrations.transformers import TrainerScores

#: Trainers by the names of their classes, and those of their parents.
SUPPORTED = ("SFTTrainer", "DPOTrainer")


def attach(
    trainer: Any,
    validation: Any,
    *,
    documents: Any = None,
    samples: str = "documents",
    id_column: str = ID_FIELD,
    **options: Any,
) -> TRLScores:
    """Score every training sample of a ``trl.SFTTrainer`` or ``trl.DPOTrainer`` while it trains.

    Args:
        trainer: The trainer, before ``train()``.
        validation: Callables ``model -> loss`` or rows of the trainer's eval dataset; see :func:`.transformers.attach`.
        documents: For ``SFTConfig(packing=True)``: the dataset that the trainer was given.
        samples: For packed rows: "documents" scores each document in them, "rows" each row (ids are positions of packed rows).
        id_column: The column with sample ids; without it ids are positions: in ``documents``, or in ``trainer.train_dataset``,
            which TRL may have shuffled or filtered.
        options: What :class:`inrun.Accountant` takes.
    """
    names = {c.__name__ for c in type(trainer).__mro__}
    if not names & set(SUPPORTED):
        raise ConfigurationError(
            f"{type(trainer).__name__} is not supported; trl.SFTTrainer and trl.DPOTrainer are. Trainers that generate what they "
            "train on (GRPO, RLOO) have no dataset whose samples could be scored. A trainer whose loss calls the model plainly can "
            "be attached with inrun.integrations.transformers.attach."
        )
    if samples not in ("documents", "rows"):
        raise ConfigurationError(f'samples is {samples!r}; accepted are "documents" and "rows"')
    return TRLScores(trainer, validation, id_column, options, documents, samples, pairs="DPOTrainer" in names)


class TRLScores(TrainerScores):
    """What :func:`attach` returns: the scores of a TRL trainer's run."""

    def __init__(
        self, trainer: Any, validation: Any, id_column: str, options: dict[str, Any], documents: Any, samples: str, pairs: bool
    ) -> None:
        """Set on trainer and model what scoring needs; ``pairs``: a sample is two rows."""
        self.documents, self.samples, self.pairs = documents, samples, pairs
        self._packed: Any = None
        self._head: CalledHead | None = None
        super().__init__(trainer, validation, id_column, options)
        self._call_head()

    def check(self) -> None:
        """Raise for what cannot be scored, as far as it is known before training."""
        trainer = self.trainer
        packing = bool(getattr(trainer.args, "packing", False)) and not self.pairs
        if packing and self.samples == "documents" and not trainer.padding_free:
            raise ConfigurationError(
                f'packing_strategy="{trainer.args.packing_strategy}" packs documents into rows without positions: they see each '
                'other, so that no document has a part of the gradient of its own. Take packing_strategy="bfd", which keeps them '
                'apart by position_ids, or samples="rows" to score packed rows.'
            )
        if packing and self.samples == "documents" and self.documents is None:
            raise ConfigurationError(
                "SFTConfig(packing=True) drops the ids of documents while it packs them; give attach(..., documents=the dataset "
                "that you "
                'gave the trainer), or samples="rows" to score packed rows.'
            )
        if getattr(trainer, "aux_loss_enabled", False) and self._head_is_trained():
            raise ConfigurationError(
                "the load-balancing loss of a mixture of experts is not supported with a head that is trained; take "
                "router_aux_loss_coef=0.0, or freeze the head"
            )
        super().check()

    # The head

    @property
    def _base(self) -> nn.Module:
        model: Any = self.trainer.model
        return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[no-any-return]

    def _head_is_trained(self) -> bool:
        head: Any = self._base.get_output_embeddings()  # type: ignore[operator]
        return head is not None and any(p.requires_grad for p in head.parameters())

    def _call_head(self) -> None:
        """Call the head where TRL would multiply by its weight, if it is trained."""
        base = self._base
        if not self._head_is_trained() or "forward" not in vars(base):  # a forward that nobody replaced calls the head
            return
        self._head = CalledHead(base)
        self._head.tiled = not self._flat
        fused = vars(base)["forward"]
        self._head.install(base)
        self._undo.add(lambda: setattr(base, "forward", fused))

    def begin(self) -> None:
        """Make the accountant, once it is known that the head that is called is TRL's."""
        if self._head is not None:
            self._head.verify(self._base)
        super().begin()

    # Ids

    @property
    def _flat(self) -> bool:
        """Whether rows are laid end to end, so that samples are runs of positions."""
        return not self.pairs and bool(getattr(self.trainer, "padding_free", False))

    def numbered(self, dataset: Any) -> Any:
        """Return the training dataset with ids; packed rows with one per token."""
        if self.pairs or not getattr(self.trainer.args, "packing", False) or self.samples == "rows":
            return with_id_column(dataset, self.id_column)
        if self._packed is None:
            self._packed = pack_again(self.trainer, dataset, self.documents, self.id_column)
        return self._packed

    def keeping(self, collate: Callable[[Any], Any], as_tensor: bool) -> KeepIds:
        """Return the trainer's collator, keeping ids by row or by position."""
        kind = KeepTokenIds if self._flat else KeepIds
        return kind(collate, self.id_column, self.keeps, as_tensor)

    def ids_of_rows(self, ids: Tensor, inputs: Any) -> Tensor:
        """Return the ids of the rows: chosen rows first, then the rejected ones, where samples are pairs."""
        return torch.cat([ids, ids]) if self.pairs else ids

    # Validation, and what comes out

    def batch_loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """Return the loss of a validation batch as the trainer computes it; its metrics are not those of evaluation."""
        trainer = self.trainer
        metrics, tokens = trainer._metrics, trainer._total_train_tokens
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        try:
            return super().batch_loss(model, batch)
        finally:
            trainer._metrics, trainer._total_train_tokens = metrics, tokens

    def scored(self, dataset: Any = None) -> Any:
        """Return the dataset with its scores; by default the one trained on, or the documents that were packed."""
        return super().scored(self.documents if dataset is None and self.documents is not None else dataset)


class KeepTokenIds(KeepIds):
    """Keeps ids where rows are laid end to end: one per position, ``[1, t]``, and −1 for padding."""

    def __call__(self, items: Sequence[Any]) -> Any:
        """Collate items without their ids; add one id per position."""
        each = [self._ids_of(item) for item in items]
        batch = self.collate([{k: v for k, v in item.items() if k != self.column} for item in items])
        if "position_ids" not in batch:
            raise ConfigurationError(
                "the collator packs documents into rows without position_ids: they see each other, so that no document has a part "
                "of the "
                'gradient of its own. Take TRL\'s collator with padding_free=True, or samples="rows".'
            )
        found = torch.cat(each)
        ids = torch.full_like(batch["input_ids"], -1, device="cpu")
        if batch["input_ids"].shape[0] != 1 or found.numel() > ids.numel():
            raise IdsError(f"{found.numel()} tokens have ids, and the collator made rows of shape {tuple(ids.shape)} of them")
        ids[0, : found.numel()] = found
        return self.put(batch, ids)

    def _ids_of(self, item: Any) -> Tensor:
        value = item.get(self.column)
        if isinstance(value, (list, Tensor)) and not (isinstance(value, Tensor) and value.dim() == 0):
            return torch.as_tensor(value, dtype=torch.int64)
        return torch.full((len(item["input_ids"]),), self._id_of(item), dtype=torch.int64)


def pack_again(trainer: Any, packed: Any, documents: Any, column: str) -> Any:
    """Return the trainer's packed dataset with a column of ids, one per token: the documents are packed once more."""
    from trl import pack_dataset  # type: ignore[attr-defined]

    if is_stream(documents) or not is_arrow(documents) or not is_arrow(packed):
        raise IdsError(
            "documents= must be a datasets.Dataset; streams cannot be packed a second time. Pack before training instead."
        )
    args = trainer.args
    plain = copy.copy(args)
    plain.max_length, plain.shuffle_dataset = None, False
    found = with_id_column(documents, column)
    found = trainer._prepare_dataset(
        found, trainer.processing_class, plain, False, getattr(trainer, "_formatting_func", None), "numbered"
    )
    if column not in found.column_names:
        raise IdsError(f"the id column {column!r} was lost while the documents were tokenised; keep it in your formatting_func")
    found = found.map(
        lambda batch: {column: [[i] * len(t) for i, t in zip(batch[column], batch["input_ids"], strict=True)]}, batched=True
    )
    found = found.select_columns(["input_ids", "labels", column])
    if args.shuffle_dataset:
        found = found.shuffle(seed=args.seed)
    found = pack_dataset(found, args.max_length, args.packing_strategy, {"num_proc": args.dataset_num_proc})
    if args.shuffle_dataset:
        found = found.shuffle(seed=args.seed)
    if len(found) != len(packed) or any(_rows(found, c, at) != _rows(packed, c, at) for at in _blocks(packed) for c in _COMPARED):
        raise IdsError(
            "documents= are not what the trainer packed: packing them again gives other rows. Give the dataset that the trainer "
            "was given, as it was."
        )
    return found


_COMPARED = ("input_ids", "labels", "seq_lengths")


def _blocks(dataset: Any, size: int = 10_000) -> list[slice]:
    return [slice(at, at + size) for at in range(0, len(dataset), size)]


def _rows(dataset: Any, column: str, at: slice) -> Any:
    return dataset.with_format("arrow")[at][column].to_pylist()
