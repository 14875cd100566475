"""Ways of spreading a run over devices that cannot be scored, by name; what torch spreads itself is the engine's to judge."""

from __future__ import annotations

from typing import Any

from inrun.errors import ConfigurationError


def check_accelerator(accelerator: Any) -> None:
    """Raise for DeepSpeed, Megatron, and parallelism over anything but samples, as an ``accelerate.Accelerator`` knows them."""
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind == "DEEPSPEED":
        plugin = getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None)
        stage = getattr(plugin, "zero_stage", "?")
        raise ConfigurationError(
            f"DeepSpeed (ZeRO-{stage}) is not supported: its engine runs the backward and the optimizer itself"
            f"{', and with ZeRO-3 no process holds a whole weight or gradient' if stage == 3 else ''}, so that a sample's part of "
            "the update cannot be told. Train with DDP or FSDP2 of torch, or in one process."
        )
    if kind == "MEGATRON_LM":
        raise ConfigurationError(
            "Megatron-LM (tensor and pipeline parallel) is not supported: no process sees a sample's whole gradient. Train with "
            "DDP or FSDP2 of torch, or in one process."
        )
    sharding = getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    if kind == "FSDP" and getattr(sharding, "fsdp_version", 1) == 1:
        raise ConfigurationError(
            "FSDP1 (FullyShardedDataParallel) is not supported: its flat parameters hide those of the layers. Take FSDP2: "
            'fsdp_version=2 in FullyShardedDataParallelPlugin or TrainingArguments(fsdp_config={"version": 2}), or DDP.'
        )
    plan = getattr(accelerator, "parallelism_config", None)
    for name, words in (("tp", "tensor"), ("cp", "context"), ("sp", "sequence")):
        if plan is not None and getattr(plan, f"{name}_size", 1) > 1:
            raise ConfigurationError(
                f"{words} parallelism ({name}_size={getattr(plan, f'{name}_size')}) is not supported: no process sees a sample's "
                f"whole gradient. Take {name}_size=1 and spread samples over the processes (DDP or FSDP2 of torch)."
            )


def check_prepared(accelerator: Any, model: Any) -> None:
    """Raise for a model that ``prepare`` will split over processes and has not yet: its parameters will be others."""
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if kind == "FSDP" and not any(hasattr(m, "_get_fsdp_state") for m in model.modules()):
        raise ConfigurationError(
            "with FSDP2 attach() comes after prepare(), with what it returned: fully_shard gives the model and the optimizer other "
            "parameters"
        )


def check_placement(model: Any) -> None:
    """Raise for a model of transformers whose layers lie on several devices, or whose weights are split over processes."""
    if getattr(model, "_tp_size", None) not in (None, 1):
        raise ConfigurationError(
            f"the model was loaded with tensor parallelism (tp_plan=, {model._tp_size} processes), which is not supported: no "
            "process sees a sample's whole gradient. Load it without tp_plan."
        )
    places = {str(d) for d in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1:
        raise ConfigurationError(
            f"the model's layers lie on several devices ({', '.join(sorted(places))}: device_map, a pipeline), which is not "
            "supported. Load it on one device per process."
        )


def check_lightning(strategy: Any) -> None:
    """Raise for a strategy of Lightning that is none of one device or torch's data parallelism."""
    name = type(strategy).__name__
    if "DeepSpeed" in name:
        raise ConfigurationError(
            f"{name} is not supported: DeepSpeed runs the backward and the optimizer itself, and with ZeRO-3 no process holds a "
            'whole weight or gradient. Take strategy="ddp", or one device.'
        )
    if name in ("ModelParallelStrategy", "XLAStrategy", "XLAFSDPStrategy", "FSDPStrategy"):
        raise ConfigurationError(
            f"{name} is not supported: parameters that it shards are not torch's own parameters (tensor parallel, FSDP1, XLA), so "
            'that no process sees a sample\'s whole gradient. Take strategy="ddp", or one device.'
        )
