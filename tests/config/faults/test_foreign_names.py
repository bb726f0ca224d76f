"""What people of Lightning, lightning-hydra-template, Hugging Face and PyTorch type leads to the knob they mean."""

import re
from typing import Any

import pytest

from wellfed.config.compose import compose
from wellfed.config.faults.explain_refusal import ABSENT, NAMES, NOTES, VALUES
from wellfed.config.faults.gone import GONE
from wellfed.config.faults.target_faults import check_imported
from wellfed.config.knobs import entries
from wellfed.config.schema import RunConfig
from wellfed.errors import ConfigError

MEANT = {
    "batch_size=64": "workload.effective_batch_size=64",
    "data.batch_size=64": "workload.effective_batch_size=64",
    "loader.batch_size=64": "workload.effective_batch_size=64",
    "per_device_train_batch_size=8": "memory.micro_batch=8",
    "per_device_eval_batch_size=8": "workload.eval_batch_size=8",
    "accumulate_grad_batches=4": "memory.accumulate=4",
    "trainer.accumulate_grad_batches=4": "memory.accumulate=4",
    "gradient_accumulation_steps=4": "memory.accumulate=4",
    "lr=0.1": "workload.optimizer.lr=0.1",
    "model.lr=0.1": "workload.optimizer.lr=0.1",
    "optimizer.lr=0.1": "workload.optimizer.lr=0.1",
    "learning_rate=1e-3": "workload.optimizer.lr=1e-3",
    "weight_decay=0.1": "workload.optimizer.weight_decay=0.1",
    "optimizer=adam": "workload.optimizer._target_=torch.optim.Adam",
    "optim=adamw_torch": "workload.optimizer._target_=torch.optim.AdamW",
    "scheduler=cosine": "workload.schedule.name=cosine",
    "lr_scheduler_type=linear": "workload.schedule.name=linear",
    "warmup_steps=10": "workload.schedule.warmup_steps=10",
    "num_warmup_steps=10": "workload.schedule.warmup_steps=10",
    "gradient_clip_val=1.0": "trainer.gradient_clip=1.0",
    "trainer.gradient_clip_val=0.5": "trainer.gradient_clip=0.5",
    "max_grad_norm=1": "trainer.gradient_clip=1",
    "epochs=5": "trainer.max_epochs=5",
    "num_epochs=5": "trainer.max_epochs=5",
    "max_epochs=5": "trainer.max_epochs=5",
    "num_train_epochs=5": "trainer.max_epochs=5",
    "max_steps=5": "trainer.max_steps=5",
    "val_check_interval=100": "trainer.validate_every_steps=100",
    "val_check_interval=0.25": "trainer.validate_every_steps=0.25",
    "eval_steps=100": "trainer.validate_every_steps=100",
    "save_steps=100": "trainer.checkpoint_every_steps=100",
    "logging_steps=10": "trainer.log_every_steps=10",
    "trainer.log_every_n_steps=10": "trainer.log_every_steps=10",
    "limit_train_batches=5": "trainer.limit_batches=5",
    "overfit_batches=4": "trainer.overfit_batches=4",
    "trainer.fast_dev_run=true": "debug=one_step",
    "debug=default": "debug=one_step",
    "debug=fdr": "debug=one_step",
    "hparams_search=mnist_optuna": "search=optuna",
    "precision=16": "gpu.precision=16-mixed",
    "trainer.precision=bf16": "gpu.precision=bf16-mixed",
    "gpu.precision=32": "gpu.precision=32-true",
    "bf16=true": "gpu.precision=bf16-mixed",
    "fp16=True": "gpu.precision=16-mixed",
    "compile=true": "gpu.compile=default",
    "torch_compile=true": "gpu.compile=default",
    "gpus=2": "trainer.devices=2",
    "trainer.gpus=2": "trainer.devices=2",
    "devices=2": "trainer.devices=2",
    "trainer=gpu": "trainer.accelerator=gpu",
    "trainer.accelerator=cuda": "trainer.accelerator=gpu",
    "num_workers=4": "loader.num_workers=4",
    "data.num_workers=4": "loader.num_workers=4",
    "dataloader_num_workers=4": "loader.num_workers=4",
    "pin_memory=true": "loader.pin_memory=true",
    "prefetch_factor=4": "loader.prefetch_factor=4",
    "persistent_workers=true": "loader.persistent_workers=true",
    "model=recsys": "workload",
    "data=mnist": "workload",
    "datamodule=mnist": "workload",
    "seed_everything=3": "seed=3",
    "ckpt_path=last.ckpt": "resume=last.ckpt",
    "resume_from_checkpoint=last.ckpt": "resume=last.ckpt",
    "logger=many_loggers": "logger=[wandb,csv]",
    "gradient_checkpointing=true": "memory.checkpoint_activations=true",
    "output_dir=out": "paths.log_dir=out",
    "workload.optimizer.learning_rate=0.1": "workload.optimizer.lr=0.1",
    "workload.optimizer._target_=torch.optim.AdamWW": "workload.optimizer._target_=torch.optim.AdamW",
    "workload.optimizer._target_=torch.optim.Sgd": "workload.optimizer._target_=torch.optim.SGD",
}
"""Typed -> offered."""


def faults_of(overrides: list[str], config_name: str = "train", **places: Any) -> dict[str, str]:
    """Override as typed -> way out; all in one composition, which takes most of the time."""
    try:
        composed = compose(overrides, config_name, **places)
    except ConfigError as error:
        faults = error.faults
    else:
        faults = check_imported(composed.config)
    assert faults
    return {fault.where: fault.way_out for fault in faults}


def offered(text: str) -> str:
    found = re.search(r"Did you mean (.+?)\?(?= |$)", text)
    assert found, text
    return found.group(1)


def test_what_people_type_leads_to_the_knob_that_they_mean() -> None:
    at_once = [typed for typed in MEANT if "_target_" not in typed and "workload.optimizer." not in typed]
    found = faults_of(at_once)
    for typed in sorted(set(MEANT) - set(at_once)):
        found |= faults_of([typed])
    assert {typed: offered(found[typed]) for typed in MEANT} == MEANT


def test_whatever_is_offered_is_a_knob_or_an_option() -> None:
    found = faults_of([f"{name}=1" for name in NAMES if name not in entries(RunConfig)])
    assert len(found) > 100
    offers = {offered(text).partition("=")[0] for text in found.values()}
    own = {each for each in offers if each.startswith("workload.optimizer.") or each in ("callbacks", "debug")}
    assert offers - own <= set(entries(RunConfig))


def test_what_there_is_none_of_says_what_there_is() -> None:
    found = faults_of([f"trainer.{name}=1" for name in ABSENT])
    assert found == {f"trainer.{name}=1": text for name, text in ABSENT.items()}


def test_a_knob_that_is_gone_says_what_to_do_instead() -> None:
    typed = {
        name if "=" in name else f"{name}=1": told for name, told in GONE.items() if not name.startswith("wellfed ")
    }
    assert len(typed) >= 7
    found = faults_of(list(typed))
    assert all(typed[where] in way_out for where, way_out in found.items())
    assert found.keys() == typed.keys()


def test_the_table_names_what_there_is() -> None:
    knobs = entries(RunConfig)
    for name in (*NOTES, *VALUES):
        owner = name.partition("=")[0]
        assert owner in knobs or owner in ("debug", "callbacks") or owner.startswith("workload.optimizer."), name


def test_other_values() -> None:
    found = faults_of(["num_workers=-1", "fp16=false"])
    assert found["num_workers=-1"] == "Did you mean loader.num_workers=-1?"
    assert found["fp16=false"] == "Leave it out."


def test_evaluate_has_its_own_names() -> None:
    assert "Did you mean checkpoint=a.ckpt?" in faults_of(["ckpt_path=a.ckpt"], "evaluate")["ckpt_path=a.ckpt"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("workload.oops.x", "Did you mean the package workloads?"),
        ("torch.optim.adamw", "Name one of those in it: AdamW"),
        ("workloads.recsys.model", "TwoTowerRecommender"),
    ],
)
def test_a_target_that_is_none_leads_to_one(target: str, said: str) -> None:
    (way_out,) = faults_of([f"workload.model={{_target_:{target}}}"]).values()
    assert said in way_out


def test_a_knob_of_tune_is_named_as_that_and_not_taken_for_another():
    with pytest.raises(ConfigError, match=r"no such knob\. It is a knob of .*tune.*: write it there"):
        compose(["tune.max_minutes=5"])
