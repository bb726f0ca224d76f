from __future__ import annotations

from dataclasses import dataclass

import pytest

from wellfed.config import docs
from wellfed.config.docs import help_of, undocumented
from wellfed.config.schema import EvaluateConfig, RunConfig


@pytest.mark.parametrize("schema_type", [RunConfig, EvaluateConfig])
def test_every_field_has_a_help_text(schema_type):
    assert undocumented(schema_type) == []


def test_a_field_without_a_literal_is_named(monkeypatch):
    texts = {name: dict(fields) for name, fields in docs._literals().items()}
    del texts["GpuConfig"]["tf32"]
    monkeypatch.setattr(docs, "_literals", lambda: texts)
    assert undocumented(RunConfig) == ["GpuConfig.tf32"]


def test_a_class_from_elsewhere_has_none():
    @dataclass
    class Foreign:
        knob: int = 1

    assert undocumented(Foreign) == ["Foreign.knob"]


def test_a_text_over_two_lines_is_one():
    text = help_of("gpu.memory_gib")
    assert text.startswith("GPU memory budget in GiB, > 0.")
    assert text.endswith("Lower it to rehearse a smaller card.")
    assert "\n" not in text
    assert "  " not in text


@pytest.mark.parametrize("dotted", ["nope", "gpu.nope", "workload.model.dim", "seed.more", "gpu.tf32.more.still"])
def test_unknown_names_have_an_empty_text(dotted):
    assert help_of(dotted) == ""


def test_groups_have_a_text_too():
    assert help_of("workload.schedule.warmup_steps").startswith("Steps of linear warm-up")
    assert help_of("loader") == "Disk to device."
    assert help_of("checkpoint", EvaluateConfig).startswith("Checkpoint file")
