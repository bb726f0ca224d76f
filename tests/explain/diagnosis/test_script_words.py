"""Findings in the words of a script: no knob of our own runs is left in them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from wellfed.explain.diagnosis import words
from wellfed.explain.diagnosis.finding import Finding, Gain, found
from wellfed.explain.diagnosis.script_words import HANDOVER_MS, in_script_words
from wellfed.record.entries import RunRecord

KNOB = re.compile(r"\b(loader|trainer|gpu|memory|workload|telemetry|debug|logger|config)(\.\w+|=\w)|\bon_device\b")
WORDS: Mapping[str, Any] = tomllib.loads(Path(words.__file__).with_name("findings.toml").read_text())
TEXTS = ("message", "advice", "otherwise")


def cases() -> Iterator[tuple[str, str]]:
    """Each finding with each of its cases, and with none."""
    for name, table in WORDS.items():
        if name[0] == "_":
            continue
        yield from ((name, case) for case in ("", *(key for key, one in table.items() if isinstance(one, dict))))


def test_no_words_for_a_script_name_a_knob():
    of_runs = [words.template(name, key, case) for name, case in cases() for key in TEXTS]
    assert len([text for text in of_runs if KNOB.search(text)]) > 10
    for_scripts = {(name, words.template(name, key, case, for_script=True)) for name, case in cases() for key in TEXTS}
    left = {name for name, text in for_scripts if KNOB.search(text)}
    assert left == {"slow_samples"}, "of samples that a run skipped"


def test_a_clause_of_a_figure_that_is_missing_is_left_out():
    text = "{a_frac} waits[, {b_ms} each][{is_so}: so][, {c|step}][, {d:g}]."
    figures = {"a_frac": 0.5, "b_ms": None, "is_so": False, "c": 1}
    assert words.rendered(text, figures) == "50.0 % waits, 1 step."
    assert words.rendered(text, {**figures, "b_ms": 3.0, "is_so": True, "d": 2.5}) == (
        "50.0 % waits, 3 ms each: so, 1 step, 2.5."
    )


def test_figures_of_words_alone_are_not_recorded():
    run = found("steps_varied", {"half_interval_frac": 0.6, "_known": "known to within 60 %", "missing": None})
    assert run.evidence == {"half_interval_frac": 0.6}
    assert run.message == "Steps varied, so the rate is known to within 60 %."
    assert "trainer.max_steps" in run.advice
    assert "trainer" not in in_script_words(run, script()).text


def script(**loader: object) -> RunRecord:
    return RunRecord("a", config={"script": "train.py", "loader": {"num_workers": 0, **loader}})


@pytest.mark.parametrize(
    ("overrides", "loader", "code"),
    [
        (("loader.backend=auto", "loader.num_workers=4"), {}, ["DataLoader(num_workers=4, persistent_workers=True)"]),
        (("loader.num_workers=4",), {"persistent_workers": True}, ["DataLoader(num_workers=4)"]),
        (
            ("loader.num_workers=4",),
            {"is_iterable": True, "persistent_workers": True},
            [
                "DataLoader(num_workers=4)",
                "split the stream by get_worker_info(), else each worker repeats all samples",
            ],
        ),
        (("loader.num_workers=1",), {"is_iterable": True, "persistent_workers": True}, ["DataLoader(num_workers=1)"]),
        (("loader.persistent_workers=true",), {"num_workers": 2}, ["DataLoader(persistent_workers=True)"]),
        (
            ("loader.pin_memory=true", "loader.device_prefetch=2"),
            {},
            [
                "DataLoader(pin_memory=True)",
                "copy the next batch in a torch.cuda.Stream of its own (x.to(device, non_blocking=True) of pinned "
                "memory), and wait_stream before its step",
            ],
        ),
        (("gpu.precision=bf16-mixed",), {}, ['torch.autocast("cuda", torch.bfloat16)']),
        (("gpu.compile=reduce-overhead",), {}, ['torch.compile(model, mode="reduce-overhead")']),
        (("gpu.compile=default",), {}, ["torch.compile(model)"]),
        (("memory.on_oom=retry", "loader=auto"), {}, []),
    ],
)
def test_overrides_become_code(overrides: tuple[str, ...], loader: dict[str, object], code: list[str]):
    finding = Finding("too_few_workers", "Text.", {"build_ms": 9.0}, overrides, gain=Gain(2, 1, 2))
    assert list(in_script_words(finding, script(**loader)).change) == code


def test_workers_are_not_advised_where_handing_over_takes_as_long():
    overrides, gain = ("loader.num_workers=2",), Gain(1.5, 1.0, 1.5)
    slow, quick = (
        in_script_words(Finding("loading_in_main_process", "T.", {"build_ms": ms}, overrides, gain=gain), script())
        for ms in (2 * HANDOVER_MS, 0.5 * HANDOVER_MS)
    )
    assert slow.change
    assert slow.gain == gain
    assert (quick.change, quick.gain) == ((), None)
    assert quick.time_lost_frac == pytest.approx(1 / 3)
    assert "Workers hardly pay" in quick.advice
