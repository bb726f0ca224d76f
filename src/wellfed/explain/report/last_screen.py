"""Words the last screen of a run: its verdict, where the time went, and the command to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from rich.text import Text

from wellfed.command_line import command
from wellfed.config.quoting import key_value
from wellfed.explain.diagnosis.ceiling_check import contradiction, of_ceiling
from wellfed.explain.diagnosis.curves.curve_verdict import utilisation_colour
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import colour_of, waiting_colour, word_of
from wellfed.explain.diagnosis.run_rules import DOUBTS, EVENT_IDS
from wellfed.explain.diagnosis.script_words import is_script
from wellfed.explain.diagnosis.step_times import phase_shares
from wellfed.explain.diagnosis.thresholds import OTHERS_FRAC
from wellfed.explain.report import run_lines
from wellfed.explain.report.run_lines import gain_of, own_files
from wellfed.explain.report.write import MARKDOWN, PAGE
from wellfed.record.entries import FindingEntry, RunRecord
from wellfed.units import show_count, show_gib, show_ms, show_percent, show_text, wrapped

_ENDINGS = {"oom": "out of memory"}
"""Status of the record -> words, where they differ."""
_MOST_METRICS, _MOST_OPERATIONS, _MOST_FILES = 6, 3, 4
"""Metrics, operations of a profile, and files of the evaluation that the screen shows."""
_LONGEST_EVENT, _LONGEST_ERROR = 120, 400
"""Characters of the facts of an event, and of an error."""
_LABEL = 9
"""Columns of ``Report`` and the other labels of links."""
_ORDER: Mapping[str, int] = {"val": 0, "test": 1}
"""Order of the splits of metrics; the others follow."""


def last_lines(evidence: Evidence, folder: Path, width: int | None) -> Iterator[Text]:
    """Yields the lines of the screen, broken between words. ``width``: columns of the terminal; None = unlimited."""
    for line in _lines(evidence, folder):
        starts, end = [], 0
        for text in [] if width is None or line.no_wrap else wrapped(line.plain, width - 1):
            starts.append(line.plain.index(text, end))
            end = starts[-1] + len(text)
        for part in line.divide(starts[1:]):
            part.rstrip()
            yield Text(" ").append_text(part)


def _lines(evidence: Evidence, folder: Path) -> Iterator[Text]:
    record = evidence.record
    found = next((name for name in (PAGE, MARKDOWN) if (folder / name).exists()), "")
    link = Text(("Report" if found else "Folder").ljust(_LABEL), no_wrap=True)
    link.append(show_text(str(folder / found)), f"link {_address(folder / found)}")
    if record.error is not None:  # the last lines of a failed run are its error
        events = [one for one in record.findings if one["id"] in EVENT_IDS]
        # What ended the run cost all of it, and has no gain.
        cause = next((one for one in events if one["severity"] == "high" and not one["gain"]), None)
        if cause is not None:
            yield _badge(*verdict_of(cause), colour_of(cause["id"], cause["severity"]))
            yield from _advice(record, cause)
        yield link
        yield from _ending(record)
        return
    yield from _ending(record)
    first = record.findings[0] if record.findings else None
    if first is None:
        yield _badge("NO VERDICT", "the record does not show where time went", "magenta")
    else:
        yield _badge(*verdict_of(first), colour_of(first["id"], first["severity"]))
    doubts = [one for one in record.findings[1:] if one["severity"] == "info" and one["id"] in DOUBTS]
    for one in doubts:
        yield Text(f"{verdict_of(one)[1]} {one['advice']}".rstrip(), "yellow")
    yield from _joined(_speed(record))
    yield from _joined(_shares(record))
    yield from _joined([*_devices(record), *_host(evidence)])
    if first is not None:
        yield from _advice(record, first)
    yield from _joined(_metrics(evidence))
    if record.status == "ok":
        yield Text(run_lines.headline(record).removeprefix("ok: "))
    shown = [first, *doubts]
    if others := dict.fromkeys(finding["id"] for finding in record.findings if finding not in shown):
        yield _badge("Also found", f"{', '.join(others)}: see the report")
    yield from _events(record)
    if run_lines.simulated_lines(record):
        yield Text("Simulated GPU: figures show how wellfed works, not how fast a GPU is.", "blue")
    yield from _profile(record)
    yield link
    yield from _files(record, folder)
    if upload := run_lines.wandb_upload(record):
        yield Text(f"{'wandb'.ljust(_LABEL)}offline; to upload it:")
        yield _command(upload)


def _badge(word: str, text: str, style: str = "") -> Text:
    return Text(style=style).append(word, "bold").append(f"  {text}")


def _joined(parts: Iterator[Text] | Sequence[Text]) -> Iterator[Text]:
    """Yields the parts as one line with gaps between them; nothing without parts."""
    if line := Text("  ").join(parts):
        yield line


def _command(words: Sequence[str]) -> Text:
    """Returns a command to copy, which is never broken."""
    return Text(f"  {' '.join(words)}", "bold", no_wrap=True)


def verdict_of(finding: FindingEntry) -> tuple[str, str]:
    """Returns the verdict in a word, and the message of the finding."""
    return word_of(finding).upper(), show_text(finding["message"])


def gain_in_brackets(finding: FindingEntry) -> str:
    """Returns the predicted gain of a finding, after a blank; empty without one."""
    gain = gain_of(finding).rstrip(".")
    return f" ({gain[:1].lower()}{gain[1:]})" if finding["gain"] and gain else ""


def next_command(record: RunRecord, change: Sequence[str]) -> list[str]:
    """Returns the words of a command that runs the same with a change, quoted for a shell.

    An override of the run gives way to one of the same name, and those of a group's knobs to another option of the
    group. The run gets a folder of its own.
    """
    new = {"hydra.run.dir", *(key_value(one)[0] for one in change)}  # a folder holds one run
    kept = [one for one in record.overrides if (key := key_value(one)[0]) not in new and key.split(".")[0] not in new]
    return [*command("train").split(), *map(shlex.quote, [*record.flags, *kept, *change])]


def _ending(record: RunRecord) -> Iterator[Text]:
    """Yields how a run ended that did not end well, with its error."""
    if record.status in ("ok", "running"):
        return
    word = _ENDINGS.get(record.status, record.status)
    colour = "yellow" if record.status == "interrupted" else "red"
    yield _badge(word.upper(), run_lines.headline(record).partition(": ")[2], colour)
    if record.error is not None:
        for line in run_lines.error_lines(record):
            yield Text(f"  {_cut(line, _LONGEST_ERROR)}")


def _speed(record: RunRecord) -> Iterator[Text]:
    throughput, ceiling = record.throughput, record.ceiling
    if not throughput:
        return
    unit = f"{throughput['sample_unit']}/s"
    rate = f"{show_count(throughput['samples_per_s'])} {unit}"
    if throughput["ci95"] and throughput["ci95"][0] > 0:
        low, high = throughput["ci95"]
        rate += f" ({show_count(low)}-{show_count(high)})"
    yield Text(rate)
    if ceiling and (share := of_ceiling(record)) is not None:
        top = show_count(ceiling["samples_per_s"])
        text = f"{show_percent(share)} of {top} possible" if share < 1 else f"no slower than its ceiling of {top}"
        yield Text(f"{text} (doubtful)" if contradiction(record) else text)
    elif record.ceiling is None and record.status == "ok" and not is_script(record):
        yield Text("no ceiling measured")
    if record.readiness_frac is not None:
        yield Text(f"batches ready {100 * record.readiness_frac:.0f} %")


def _shares(record: RunRecord) -> Iterator[Text]:
    time = record.time
    if not time:
        return
    shares = {name: time[f"{name}_frac"] for name in ("wait", "compute", "copy", "host")}  # type: ignore[literal-required]
    for name, share in shares.items():
        if share is not None:
            style = waiting_colour(share) if name == "wait" else ""
            phases = phase_shares(time).items() if name == "compute" else ()
            split = ", ".join(f"{phase.removesuffix(' compute')} {100 * part:.0f}" for phase, part in phases)
            yield Text(f"{name} {100 * share:.0f} %{f' ({split})' if split else ''}", style)
    yield Text(f"{show_ms(time['step_ms_mean'])} a step")


def _devices(record: RunRecord) -> Iterator[Text]:
    is_on_gpu = record.time is not None and record.time["copy_frac"] is not None
    figures = list(record.gpus.values()) if is_on_gpu else []
    utils = [one["mean"] for gpu in figures if (one := run_lines.figure_of(gpu, "util_pct", "mean"))]
    yield from show_utilisation(utils)
    memory = record.memory
    if memory and is_on_gpu and memory.get("budget_gib") is not None:
        yield Text(f"memory {show_of_budget(memory['measured_peak_gib'], memory['budget_gib'])}")
    elif memory:
        yield Text(f"memory {'' if is_on_gpu else 'grew by '}{show_gib(memory['measured_peak_gib'])}")
    powers = [one["mean"] for gpu in figures if (one := run_lines.figure_of(gpu, "power_w", "mean"))]
    if powers:
        yield Text(f"{sum(powers):.0f} W")


def show_utilisation(means: Sequence[float]) -> Iterator[Text]:
    """Yields the utilisation of one GPU, or the range of several: ``GPU 3 %``; nothing if it is unknown."""
    if means:
        low, high = min(means), max(means)
        text = f"GPU {low:.0f} %" if len(means) == 1 else f"{len(means)} GPUs {low:.0f}-{high:.0f} %"
        yield Text(text, utilisation_colour(low))


def show_of_budget(used_gib: float, budget_gib: float | None) -> str:
    """Returns memory beside its budget: ``0.05 of 21.6 GiB``."""
    used = f"{used_gib:.1f}" if used_gib >= 1 else f"{used_gib:.2f}"
    return f"{used} GiB" if budget_gib is None else f"{used} of {budget_gib:.1f} GiB"


def _host(evidence: Evidence) -> Iterator[Text]:
    host, cores, others = evidence.record.host, evidence.cores, evidence.telemetry.mean_others_cores
    if not host or "cpu_pct" not in host:
        return
    of = "" if cores is None else f" of {cores:.3g} cores"
    text = Text(f"CPU {host['cpu_pct'] / 100:.1f}{of}")
    if others is not None:
        is_much = cores is not None and others >= OTHERS_FRAC * cores
        text.append(", other programs ").append(f"{others:.1f}", "yellow" if is_much else "")
    yield text


def _advice(record: RunRecord, finding: FindingEntry) -> Iterator[Text]:
    """Yields the overrides of a finding with their gain, else its advice."""
    if not finding["change"]:
        if finding["advice"]:
            yield Text("Try: ", "bold").append(finding["advice"])
        return
    learning = ", which changes what is learned" if finding["changes_learning"] else ""
    yield Text(f"Try{gain_in_brackets(finding)}{learning}:", "bold")
    if is_script(record):
        yield from (Text(f"  {one}", "bold") for one in finding["change"])
    else:
        yield _command(next_command(record, finding["change"]))


def _metrics(evidence: Evidence) -> Iterator[Text]:
    """Yields the metrics of validation and test, then the losses of training with their first value."""
    record, first = evidence.record, evidence.first_metrics
    best = record.tested is not None and "best" in record.tested.partition("(")[0]
    names = sorted(record.metrics, key=lambda name: (_ORDER.get(name.partition("/")[0], 2), not name.endswith("/loss")))
    names = [name for name in names if name.startswith(("val/", "test/")) or name.endswith("loss")]
    last_test = next((name for name in reversed(names[:_MOST_METRICS]) if name.startswith("test/")), None)
    for name in names[:_MOST_METRICS]:
        text = f"{name} {run_lines.show_figure(record.metrics[name], 4)}"
        if name.startswith("train/") and name in first:
            text += f" (first {run_lines.show_figure(first[name], 4)})"
        if name == last_test and best:
            text += " (best weights)"
        yield Text(show_text(text))
    if left := len(names[_MOST_METRICS:]):
        yield Text(f"{left} more in the report")


def _events(record: RunRecord) -> Iterator[Text]:
    """Yields the events that need attention, in one line; the report has their facts."""
    by_kind: dict[str, list[Mapping[str, object]]] = {}
    for event in record.events:
        if event["kind"] not in (*run_lines.EVERYDAY_EVENTS, "signal"):  # the first line has it
            by_kind.setdefault(event["kind"], []).append(event)
    for unseen in by_kind.pop("unseen", []):
        yield _badge("Unseen", str(unseen.get("message")))
    told = []
    for kind, events in by_kind.items():
        often = f", the first of {len(events)}" if len(events) > 1 else ""
        told.append(f"{kind.replace('_', ' ')} at step {events[0]['step']}{often}")
    if told:
        yield _badge("Happened", _cut("; ".join(told), _LONGEST_EVENT), "yellow")


def _cut(text: str, longest: int) -> str:
    """Returns the beginning of a text, on one line."""
    text = " ".join(show_text(text).split())
    start = text[:longest]
    return text if text == start else f"{start.rpartition(' ')[0] or start} ..."


def _profile(record: RunRecord) -> Iterator[Text]:
    if record.profile is not None:
        shown = record.profile["operations"][:_MOST_OPERATIONS]
        largest = [f"{_cut(one['name'], 40)[:40]} {show_percent(one['share_frac'])}" for one in shown]
        yield Text(f"{'Profile'.ljust(_LABEL)}{', '.join([*largest, 'profile/trace.json'])}")


def _files(record: RunRecord, folder: Path) -> Iterator[Text]:
    if files := list(own_files(record).values()):
        names = [Text(show_text(name), f"link {_address(folder / name)}") for name in files[:_MOST_FILES]]
        left = [Text(f"{len(files) - _MOST_FILES} more")] if len(files) > _MOST_FILES else []
        yield Text("Files".ljust(_LABEL)).append_text(Text("  ").join([*names, *left]))


def _address(path: Path) -> str:
    return f"file://{quote(str(path.absolute()))}"
