"""Findings in the words of a script: no knob of our own runs is left in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from wellfed.explain.diagnosis import rules
from wellfed.explain.diagnosis.finding import Finding, Gain
from wellfed.explain.diagnosis.script_words import HANDOVER_MS, in_script_words, in_words
from wellfed.record.entries import RunRecord

KNOB = re.compile(r"\b(loader|trainer|gpu|memory|workload|telemetry|debug|logger|config)(\.\w+|=\w)|\bon_device\b")
GROUPS = "trainer.|loader.|workload.|memory.|gpu.|debug="


def texts() -> Iterator[tuple[str, str]]:
    """Each literal text of a rule with a blank in it, as sentences have, without its docstrings."""
    for path in sorted(Path(rules.__path__[0]).rglob("*.py")):
        tree = ast.parse(path.read_text())
        described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [one.value if isinstance(one, ast.Constant) else "{}" for one in node.values]
                yield path.stem, "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
                yield path.stem, node.value


def test_no_sentence_names_a_knob():
    found = [(rule, text) for rule, text in texts() if " " in text.strip()]
    assert len(found) > 200
    assert len([text for _, text in found if KNOB.search(text)]) > 10
    left = {(rule, text) for rule, text in found if KNOB.search(in_words(text))}
    of_runs = {"loss_blows_up", "memory_unused", "host_memory_full", "device_memory_full"}
    assert all(rule in of_runs or "memory.on_oom=fail" in text for rule, text in left), left


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
        (("workload.effective_batch_size=64", "memory.micro_batch=null"), {}, ["DataLoader(batch_size=64)"]),
        (("memory.on_oom=retry", "loader=auto"), {}, []),
    ],
)
def test_overrides_become_code(overrides: tuple[str, ...], loader: dict[str, object], code: list[str]):
    finding = Finding("too_few_workers", "Text.", {"build_ms": 9.0}, overrides, gain=Gain(2, 1, 2))
    assert list(in_script_words(finding, script(**loader)).change) == code


def test_a_larger_step_of_ranks_and_accumulated_gradients_has_larger_batches():
    record = script(batch_size=8)
    record.config["workload"] = {"effective_batch_size": 64}
    finding = Finding("small_batch", "Text.", {}, ("workload.effective_batch_size=128",))
    assert in_script_words(finding, record).change == ("DataLoader(batch_size=16)",)


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
