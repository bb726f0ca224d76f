"""Explains why the schema refuses a name or a value, and what it meant: a name of another library, or a near one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches

from wellfed.command_line import command
from wellfed.config.faults.gone import what_instead
from wellfed.config.knobs import FREE_NODES, all_knobs, entries, is_free

_FOREIGN = {
    "workload.effective_batch_size": "batch_size train_batch_size bs global_batch_size",
    "memory.micro_batch": "per_device_train_batch_size micro_batch_size batch_size_per_device",
    "memory.accumulate": "accumulate_grad_batches gradient_accumulation_steps grad_accum",
    "workload.eval_batch_size": "per_device_eval_batch_size val_batch_size test_batch_size valid_batch_size",
    "workload.optimizer.lr": "lr learning_rate base_lr",
    "workload.optimizer.weight_decay": "weight_decay wd",
    "workload.optimizer._target_": "optimizer optim",
    "workload.schedule.name": "scheduler lr_scheduler lr_scheduler_type schedule",
    "workload.schedule.warmup_steps": "num_warmup_steps warmup lr_warmup_steps",
    "trainer.gradient_clip": "gradient_clip_val max_grad_norm clip_grad_norm grad_clip clip",
    "trainer.max_epochs": "epochs num_epochs n_epochs num_train_epochs max_epoch",
    "trainer.max_steps": "steps num_steps num_train_steps max_iters num_training_steps total_steps",
    "trainer.validate_every_steps": "val_check_interval eval_steps eval_every val_every",
    "trainer.checkpoint_every_steps": "save_steps every_n_train_steps save_every",
    "trainer.log_every_steps": "logging_steps log_every_n_steps log_interval",
    "trainer.keep_last": "save_total_limit save_top_k",
    "trainer.limit_batches": "limit_train_batches limit_val_batches limit_test_batches",
    "trainer.sanity_batches": "num_sanity_val_steps",
    "trainer.best_metric": "metric_for_best_model optimized_metric",
    "debug=one_step": "fast_dev_run dry_run",
    "debug=profiler": "detect_anomaly profiler",
    "callbacks=early_stopping": "early_stopping early_stopping_patience patience",
    "trainer.devices": "gpus num_gpus n_gpu n_gpus nproc_per_node num_devices",
    "trainer.accelerator": "device use_cuda cuda",
    "gpu.precision": "precision mixed_precision dtype torch_dtype",
    "gpu.precision=16-mixed": "fp16 amp use_amp use_fp16",
    "gpu.precision=bf16-mixed": "bf16 use_bf16",
    "gpu.compile": "compile torch_compile compile_model",
    "gpu.cudnn_benchmark": "benchmark",
    "memory.checkpoint_activations": "gradient_checkpointing use_checkpoint activation_checkpointing",
    "loader.num_workers": "workers n_workers dataloader_num_workers num_proc num_workers",
    "loader.pin_memory": "pin_memory dataloader_pin_memory pin_mem",
    "loader.prefetch_factor": "prefetch_factor dataloader_prefetch_factor prefetch",
    "loader.persistent_workers": "persistent_workers dataloader_persistent_workers",
    "seed": "seed_everything random_seed manual_seed data_seed",
    "checkpoint resume": "ckpt_path resume_from_checkpoint resume_from checkpoint ckpt",
    "workload": "model data datamodule dataset task_name task",
    "search": "hparams_search optuna sweeper",
    "paths.log_dir": "output_dir default_root_dir log_dir save_dir",
    "logger": "report_to loggers",
}
"""Knobs to type -> last parts of foreign names for them."""
NAMES: Mapping[str, tuple[str, ...]] = {
    name: tuple(ours.split()) for ours, names in _FOREIGN.items() for name in names.split()
}
"""Last part of a foreign name -> overrides to offer; the first that the schema has is shown. An entry without a value
takes the typed value."""

NOTES: Mapping[str, str] = {
    "memory.micro_batch": "It splits the samples of a step; those are workload.effective_batch_size.",
    "trainer.validate_every_steps": "It counts optimizer steps; null = at the end of each epoch.",
    "workload": "Model and data are named in the yaml of a workload.",
    "search": "A search is of many runs: add -m.",
    "callbacks=early_stopping": "Its arguments are in configs/callbacks/early_stopping.yaml.",
}
"""Knob -> difference from the foreign one."""

_OF_LIGHTNING = (
    *("inference_mode", "reload_dataloaders_every_n_epochs", "gradient_clip_algorithm", "use_distributed_sampler"),
    *("min_epochs", "min_steps", "check_val_every_n_epoch", "sync_batchnorm"),
)
"""Arguments of Lightning's Trainer that ``trainer.lightning`` hands through."""
_OF_PARTS = "A run trains, validates and tests. src/evaluate.py checkpoint=<file> only tests."
ABSENT: Mapping[str, str] = {
    **{name: f"With a LightningModule, set trainer.lightning.{name}=<value>." for name in _OF_LIGHTNING},
    **dict.fromkeys(("train", "test", "do_train", "do_eval"), _OF_PARTS),
    "tags": "Set logger.tags=[<tag>,...]; logger.group=<name> groups runs.",
    "enable_progress_bar": "A bar is drawn on a terminal; without one there is a line a minute.",
}
"""Last part of a foreign name without a counterpart -> message about the alternative."""

_PRECISIONS = {
    **dict.fromkeys(("16", "fp16", "float16", "half"), "16-mixed"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16-mixed"),
    **dict.fromkeys(("32", "fp32", "float32", "no"), "32-true"),
}
_OPTIMIZERS = {
    name.lower(): f"torch.optim.{name}"
    for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "RAdam", "NAdam", "Adafactor")
}
VALUES: Mapping[str, Mapping[str, str]] = {
    "gpu.precision": _PRECISIONS,
    "gpu.compile": {"true": "default", "false": "none"},
    "trainer.accelerator": {**dict.fromkeys(("cuda", "true", "cuda:0", "gpus"), "gpu"), "false": "cpu"},
    "trainer.on_nan": {"halve_lr": "skip"},
    "trainer.strategy": dict.fromkeys(("ddp_find_unused_parameters_true", "ddp_spawn", "dp"), "ddp"),
    "workload.optimizer._target_": {**_OPTIMIZERS, "adamw_torch": "torch.optim.AdamW"},
    "workload.schedule.name": {"cosineannealinglr": "cosine", "cosine_annealing": "cosine", "none": "constant"},
    "logger": {"many_loggers": "[wandb,csv]", "null": "none", "false": "none"},
    "debug": {"default": "one_step", "fdr": "one_step", "true": "one_step"},
    "trainer": {"gpu": "trainer.accelerator=gpu", "cpu": "trainer.accelerator=cpu", "ddp_sim": "ddp"},
    "search": {"mnist_optuna": "optuna", "true": "optuna"},
}
"""Knob or group -> foreign value -> our value, or a whole override."""


def ours_for(name: str, value: str, schema: Collection[str]) -> tuple[str, str]:
    """Returns the override that a foreign name most likely means, and a note on it; either may be empty.

    Args:
        name: dotted, as typed.
        schema: names of all knobs and groups.
    """
    word, is_of_runs = name.rpartition(".")[2].replace("-", "_").lower(), "trainer" in schema

    def is_known(ours: str) -> bool:
        knob = ours.partition("=")[0]
        return knob in schema if knob.isidentifier() and knob != "debug" else is_of_runs

    meant = next(filter(is_known, NAMES.get(word, ())), "")
    if not meant:
        return "", ABSENT.get(word, "") if is_of_runs else ""
    if "=" in meant:
        is_off = value.lower() in ("false", "0", "null", "none", "no")
        return ("", "Leave it out.") if is_off else (meant, NOTES.get(meant, ""))
    is_group = "." not in meant and meant not in ("seed", "resume", "checkpoint")
    known = our_value(meant, value) or ("" if is_group else value)
    return f"{meant}={known}" if known else meant, NOTES.get(meant, "")


def our_value(knob: str, value: str) -> str:
    """Returns our value for a foreign one of a knob or a group; empty if unknown."""
    return VALUES.get(knob, {}).get(value.strip("'\"").lower(), "")


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Returns the candidate closest to ``name``; None if none is close."""
    options = list(candidates)
    same_case = {option.lower(): option for option in options}
    found = get_close_matches(name.lower(), same_case, n=1, cutoff=0.6)
    if found:
        return same_case[found[0]]
    parts = [option for option in options if name and (option.startswith(name) or name.startswith(option))]
    return parts[0] if len(parts) == 1 else None


def nearest_knob(schema_type: type, dotted: str) -> str | None:
    """Returns the knob or group closest to a wrong name: similar as a whole, or with the same last part."""
    knobs = all_knobs(schema_type)
    group, _, name = dotted.rpartition(".")
    if not group and (near_group := nearest(name, [entry.name for entry in fields(schema_type)])):
        return near_group
    sibling = nearest(name, [knob.rpartition(".")[2] for knob in knobs if knob.rpartition(".")[0] == group])
    if sibling and group:
        return f"{group}.{sibling}"
    namesakes = [knob for knob in knobs if knob.rpartition(".")[2] == name]
    found = namesakes if len(namesakes) == 1 else get_close_matches(dotted, knobs, n=1, cutoff=0.8)
    return found[0] if found and nearest(name, [found[0].rpartition(".")[2]]) else None


def explain(schema_type: type, dotted: str, error: Exception | None = None, value: str = "") -> tuple[str, str]:
    """Returns problem and way out for a knob that could not be set; ``dotted`` without ``+`` or ``~``.

    Args:
        value: as typed, to be repeated after the knob that was meant.
    """
    dotted = dotted.split("[", maxsplit=1)[0]
    knob = entries(schema_type).get(dotted)
    reason = str((error and error.__cause__) or error).splitlines()[0].rstrip(".")
    if is_free(f"{dotted}.") and error is not None and (knob is None or dotted in FREE_NODES):
        return f"does not fit: {reason}.", ""
    if knob is None:
        return "no such knob.", what_instead(dotted) or _meant_instead(schema_type, dotted, value)
    if not knob.is_enum:
        return f"must be {knob.must_be}.", f"{dotted}: {knob.text}"
    typed = re.search(r"value '(.*?)'", reason, re.IGNORECASE)  # by OmegaConf's message
    text = typed[1] if typed else ""
    near = our_value(dotted, text) or nearest(text, (one.name for one in knob.type))
    return f"must be {knob.must_be}.", f"Did you mean {dotted}={near}?" if near else ""


def _meant_instead(schema_type: type, dotted: str, value: str) -> str:
    meant, note = ours_for(dotted, value, entries(schema_type))
    if (theirs := entries(schema_type).get(meant)) is not None and not theirs.is_group:
        note = f"It must be {theirs.must_be}. {note}".rstrip()
    if not (meant or note) and value and (near := nearest_knob(schema_type, dotted)):
        meant = f"{near}={value}"
    way_out = f"Did you mean {meant}? {note}".rstrip() if meant else note
    return way_out or _where_instead(schema_type, dotted)


def _where_instead(schema_type: type, dotted: str) -> str:
    near = nearest_knob(schema_type, dotted)
    if near:
        return f"Did you mean {near}?"
    group = dotted.rpartition(".")[0]
    if not group:
        return f"There are {', '.join(entry.name for entry in fields(schema_type))}."
    owner = entries(schema_type).get(group)
    if owner is not None and owner.is_group:
        return f"{group} has {', '.join(entry.name for entry in fields(owner.type))}."
    return f"All knobs: {command('train')} --cfg job"
