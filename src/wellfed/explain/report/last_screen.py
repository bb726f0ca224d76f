"""Words the last screen of a run: its verdict, where the time went, and the command to type next.

A terminal gets `MOST_LINES` lines, the most important ones; report.md and report.html have the rest.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from rich.text import Text

from wellfed.command_line import command, typed_arguments
from wellfed.config.quoting import key_value
from wellfed.explain.diagnosis.ceiling_check import contradiction
from wellfed.explain.diagnosis.curves.curve_verdict import utilisation_colour
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import colour_of, waiting_colour, word_of
from wellfed.explain.diagnosis.script_words import is_script
from wellfed.explain.diagnosis.step_times import phase_shares
from wellfed.explain.diagnosis.thresholds import OTHERS_FRAC
from wellfed.explain.report import run_lines
from wellfed.explain.report.run_lines import gain_of, own_files
from wellfed.explain.report.write import MARKDOWN, PAGE
from wellfed.record import FindingEntry, RunRecord
from wellfed.units import show_count, show_gib, show_ms, show_percent, show_text, wrapped

MOST_LINES = 12
"""Lines of the screen on a terminal of `_WIDE` columns. Only a long verdict or command takes more."""
_WIDE = 60
"""Columns below which all lines are shown, since a line holds little."""
_ENDINGS = {"oom": "out of memory"}
"""Status of the record -> words, where they differ."""
_CELLS = 16
"""Columns of all bars of a step together."""
_MOST_METRICS, _MOST_OPERATIONS, _MOST_FILES = 6, 3, 4
"""Metrics, operations of a profile, and files of the evaluation that the screen shows."""
_LONGEST_MESSAGE, _SHORT_MESSAGE, _LONGEST_EVENT = 140, 60, 120
"""Characters of a finding, of a short one, and of the facts of an event. Findings are cut between clauses."""
_LONG_ADVICE = 4
"""Lines of the advice above which the finding is as short as each of two."""
_LABEL = 9
"""Columns of ``Report`` and the other labels of links."""
_CONFIGS = {"--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
"""Flags that choose configurations; the value of one may be the next word."""
_ORDER: Mapping[str, int] = {"val": 0, "test": 1}
"""Order of the splits of metrics; the others follow."""
_ABOUT = ("kind", "step", "time_s")
"""Facts of every event."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9])")
_CLAUSE = re.compile(r"(?<=[;:])\s+")


class Screen:
    """Lines for a terminal of some width: parts stay whole, and sentences break between words.

    Args:
        width: columns; None = unlimited, for a file.
        is_utf: whether the terminal can show blocks.
    """

    def __init__(self, width: int | None, *, is_utf: bool = True) -> None:
        self.width, self.is_utf = width, is_utf

    @property
    def is_limited(self) -> bool:
        """Whether only the most important lines are shown. A file gets all, and so does a narrow terminal."""
        return self.width is not None and self.width >= _WIDE

    def parts(self, parts: Sequence[Text], indent: str = " ", gap: str = "  ") -> Iterator[Text]:
        """Yields lines of parts with gaps between them. A part that is longer than a line breaks between its words."""
        line = Text(indent)
        for part in parts:
            is_empty = len(line) <= len(indent)
            if self.width is not None and len(line) + len(gap) * (not is_empty) + len(part) > self.width:
                if not is_empty:
                    yield line
                line, is_empty = Text(indent), True
                words = part.split(" ")
                if len(indent) + len(part) > self.width and len(words) > 1:
                    yield from self.parts(list(words), indent, " ")
                    continue
            line.append("" if is_empty else gap).append_text(part)
        if len(line) > len(indent):
            yield line

    def sentence(self, text: str, indent: str = " ", style: str = "", *, first: str = "") -> Iterator[Text]:
        """Yields the lines of a sentence. ``first`` begins its first line in bold."""
        whole = f"{first}  {text}" if first else text
        lines = [f"{indent}{whole}"]
        if self.width is not None and len(lines[0]) > self.width:
            lines = wrapped(whole, self.width, indent, indent + " " * bool(first))
        for number, line in enumerate(lines):
            shown = Text(line, style)
            if number == 0 and first and line.startswith(f"{indent}{first}"):
                shown.stylize("bold", len(indent), len(indent) + len(first))
            yield shown

    def shell(self, words: Sequence[str], indent: str = "   ") -> Iterator[Text]:
        """Yields a command; a line that is too long goes on after a backslash, as shells read it."""
        line = indent
        for word in words:
            if self.width is not None and line.strip() and len(line) + len(word) + 3 > self.width:
                yield Text(f"{line} \\", "bold")
                line = f"{indent}  "
            line += word if not line.strip() else f" {word}"
        yield Text(line, "bold")


def last_lines(evidence: Evidence, folder: Path, screen: Screen) -> Iterator[Text]:
    """Yields the lines, of a wide terminal only those that matter most."""
    blocks = [(rank, list(lines)) for rank, lines in _blocks(evidence, folder, screen)]
    shown, left = set[int](), MOST_LINES if screen.is_limited else math.inf
    for place in sorted(range(len(blocks)), key=lambda place: blocks[place][0]):
        rank, lines = blocks[place]
        if rank == 0 or len(lines) <= left:
            shown.add(place)
            left -= len(lines)
    for place in sorted(shown):
        yield from blocks[place][1]


def _blocks(evidence: Evidence, folder: Path, screen: Screen) -> Iterator[tuple[int, Iterable[Text]]]:
    """Yields lines in their order, each with its rank: 0 is always shown, and the highest is left out first."""
    record = evidence.record
    shown = list(_shown(record.findings))
    advice = list(_advice(record, shown, screen))
    is_short = len(shown) > 1 or (screen.is_limited and len(advice) > _LONG_ADVICE)
    yield 0, _ending(record, screen)
    for finding in shown:
        word, sentence = verdict_of(finding, _SHORT_MESSAGE if is_short else _LONGEST_MESSAGE)
        yield 0, screen.sentence(sentence, style=colour_of(finding["id"], finding["severity"]), first=word)
    if not shown and record.status == "ok" and record.throughput:
        yield 0, screen.sentence("no rule found a cause of lost time", first="NOTHING FOUND")
    elif not shown:
        yield 0, screen.sentence("the record does not show where time went", style="magenta", first="NO VERDICT")
    yield from _broken(2, 7, screen.parts(list(_speed(record))))
    yield from _broken(3, 7, screen.parts(list(_shares(record, screen))))
    yield from _broken(5, 7, screen.parts([*_devices(record), *_host(evidence)]))
    yield 0, advice
    yield from _broken(4, 10, screen.parts(list(_metrics(evidence))))
    if record.status == "ok":
        yield 3, screen.sentence(run_lines.headline(record).removeprefix("ok: "))
    others = dict.fromkeys(finding["id"] for finding in record.findings if finding not in shown)
    if others:
        yield 9, screen.sentence(f"{', '.join(others)}: see the report", first="Also found")
    yield 1, _events(record, screen)
    if run_lines.simulated_lines(record):
        text = "Simulated GPU: figures show how wellfed works, not how fast a GPU is."
        yield 2, screen.sentence(text, style="blue")
    yield 6, _profile(record, screen)
    found = next((name for name in (PAGE, MARKDOWN) if (folder / name).exists()), "")
    label, path = "Report" if found else "Folder", folder / found
    yield 0, [Text(f" {label.ljust(_LABEL)}").append(show_text(str(path)), f"link {_address(path)}")]
    yield 11, _files(record, folder, screen)
    if upload := run_lines.wandb_upload(record):
        told = screen.parts([Text("wandb".ljust(_LABEL - 2)), Text("offline; to upload it:")])
        yield 8, [*told, *screen.shell(upload)]


def _broken(rank: int, of_the_rest: int, lines: Iterable[Text]) -> Iterator[tuple[int, Iterable[Text]]]:
    """Yields the first line, and those that it goes on in, each with its rank."""
    found = list(lines)
    yield rank, found[:1]
    yield of_the_rest, found[1:]


def verdict_of(finding: FindingEntry, most: int = _LONGEST_MESSAGE) -> tuple[str, str]:
    """Returns the verdict in a word, and at most so many characters of the finding, but at least its first clause."""
    sentences = _SENTENCE.split(show_text(finding["message"]))
    first = _beginning(sentences, most).removeprefix("Don't judge this run: ")
    if len(first) > most:
        first = _beginning(_CLAUSE.split(first), most).rstrip(";:")
    return word_of(finding).upper(), first


def _beginning(pieces: Sequence[str], most: int) -> str:
    """Returns the first piece, and the next ones while all have at most so many characters."""
    first, *rest = pieces
    for piece in rest:
        if len(first) + 1 + len(piece) > most:
            break
        first = f"{first} {piece}"
    return first


def gain_in_brackets(finding: FindingEntry) -> str:
    """Returns the predicted gain of a finding, after a blank; empty without one."""
    gain = gain_of(finding).rstrip(".")
    return f" ({gain[:1].lower()}{gain[1:]})" if finding["gain"] and gain else ""


def next_command(record: RunRecord, change: Sequence[str]) -> list[str]:
    """Returns the words of a command that runs the same with a change, quoted for a shell.

    An override of the run gives way to one of the same name, and those of a group's knobs to another option of the
    group. The run gets a folder of its own.
    """
    words = typed_arguments()
    flags = [word for word, last in zip(words, ["", *words], strict=False) if _CONFIGS & {word.partition("=")[0], last}]
    new = {"hydra.run.dir", *(key_value(one)[0] for one in change)}  # a folder holds one run
    kept = [one for one in record.overrides if (key := key_value(one)[0]) not in new and key.split(".")[0] not in new]
    return [*command("train").split(), *map(shlex.quote, [*flags, *kept, *change])]


def _shown(findings: Sequence[FindingEntry]) -> Iterator[FindingEntry]:
    """Yields the verdict. One that only names other programs is followed by the costliest finding."""
    yield from findings[:1]
    if findings and findings[0]["id"] in ("busy_machine", "machine_was_slower", "too_few_steps"):
        yield from (one for one in findings[1:2] if one["severity"] in ("high", "medium"))


def _ending(record: RunRecord, screen: Screen) -> Iterator[Text]:
    """Yields how a run ended that did not end well. The error itself is on stderr, above."""
    if record.status in ("ok", "running"):
        return
    word = _ENDINGS.get(record.status, record.status)
    text = run_lines.headline(record).partition(": ")[2]
    if record.error:
        text += f"; the error is above, and in {MARKDOWN}"
    colour = "yellow" if record.status == "interrupted" else "red"
    yield from screen.sentence(text, style=colour, first=word.upper())


def _speed(record: RunRecord) -> Iterator[Text]:
    throughput, ceiling = record.throughput, record.ceiling
    if not throughput:
        return
    unit = f"{throughput['sample_unit']}/s"
    rate = f"{show_count(throughput['samples_per_s'])} {unit}"
    if throughput["ci95"]:
        low, high = throughput["ci95"]
        rate += f" ({show_count(low)}-{show_count(high)})"
    yield Text(rate)
    if ceiling and ceiling["samples_per_s"] > 0:
        top, share = show_count(ceiling["samples_per_s"]), throughput["samples_per_s"] / ceiling["samples_per_s"]
        text = f"{show_percent(share)} of {top} possible" if share < 1 else f"no slower than its ceiling of {top}"
        yield Text(f"{text} (doubtful)" if contradiction(record) else text)
    elif record.ceiling is None and record.status == "ok" and not is_script(record):
        yield Text("no ceiling measured")
    if record.readiness_frac is not None:
        yield Text(f"batches ready {100 * record.readiness_frac:.0f} %")


def _shares(record: RunRecord, screen: Screen) -> Iterator[Text]:
    time = record.time
    if not time:
        return
    block = "\u2588" if screen.is_utf else "#"
    shares = {name: time[f"{name}_frac"] for name in ("wait", "compute", "copy", "host")}  # type: ignore[literal-required]
    for name, share in shares.items():
        if share is not None:
            bar = block * round(_CELLS * share) if screen.width is None or screen.width >= 40 else ""
            style = waiting_colour(share) if name == "wait" else ""
            phases = phase_shares(time).items() if name == "compute" else ()
            split = ", ".join(f"{phase.removesuffix(' compute')} {100 * part:.0f}" for phase, part in phases)
            yield Text(" ".join(filter(None, [name, bar, f"{100 * share:.0f} %", split and f"({split})"])), style)
    mean_ms = time.get("step_ms_mean")
    yield Text(f"median {show_ms(time['step_ms_p50'])} a step" if mean_ms is None else f"{show_ms(mean_ms)} a step")


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


def _advice(record: RunRecord, shown: Sequence[FindingEntry], screen: Screen) -> Iterator[Text]:
    finding = next((one for one in shown if one["change"]), None)
    if finding is None:
        return
    learning = ", which changes what is learned" if finding["changes_learning"] else ""
    yield from screen.sentence(f"Try{gain_in_brackets(finding)}{learning}:", style="bold")
    if is_script(record):
        for one in finding["change"]:
            yield from screen.sentence(one, "   ", "bold")
    else:
        yield from screen.shell(next_command(record, finding["change"]))


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


def _events(record: RunRecord, screen: Screen) -> Iterator[Text]:
    """Yields the events that need attention. A kind alone has its facts, several have one line."""
    by_kind: dict[str, list[Mapping[str, object]]] = {}
    for event in record.events:
        if event["kind"] not in (*run_lines.EVERYDAY_EVENTS, "signal"):  # the first line has it
            by_kind.setdefault(event["kind"], []).append(event)
    for unseen in by_kind.pop("unseen", []):
        yield from screen.sentence(str(unseen.get("message")), first="Unseen")
    told = []
    for kind, events in by_kind.items():
        often = f", the first of {len(events)}" if len(events) > 1 else ""
        told.append(f"{kind.replace('_', ' ')} at step {events[0]['step']}{often}")
    if len(by_kind) == 1:
        ((first, *_),) = by_kind.values()
        facts = [f"{name}={value}" for name, value in first.items() if not (name in _ABOUT or value is None)]
        told[0] += f": {', '.join(facts)}" if facts else ""
    if told:
        yield from screen.sentence(_cut("; ".join(told)), style="yellow", first="Happened")


def _cut(text: str) -> str:
    """Returns the beginning of a text, on one line."""
    text = " ".join(show_text(text).split())
    start = text[:_LONGEST_EVENT]
    return text if text == start else f"{start.rpartition(' ')[0] or start} ..."


def _profile(record: RunRecord, screen: Screen) -> Iterator[Text]:
    if record.profile is not None:
        shown = record.profile["operations"][:_MOST_OPERATIONS]
        largest = [f"{_cut(one['name'])[:40]} {show_percent(one['share_frac'])}" for one in shown]
        text = ", ".join([*largest, "profile/trace.json"])
        yield from screen.parts([Text("Profile".ljust(_LABEL - 2)), Text(text)])


def _files(record: RunRecord, folder: Path, screen: Screen) -> Iterator[Text]:
    if files := list(own_files(record).values()):
        names = [Text(show_text(name), f"link {_address(folder / name)}") for name in files[:_MOST_FILES]]
        left = [Text(f"{len(files) - _MOST_FILES} more")] if len(files) > _MOST_FILES else []
        yield from screen.parts([Text("Files".ljust(_LABEL - 2)), *names, *left])


def _address(path: Path) -> str:
    return f"file://{quote(str(path.absolute()))}"
