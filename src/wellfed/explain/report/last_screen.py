"""Words the last screen of a run: its verdict, where the time went, and the command to type next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from rich.text import Text

from wellfed.command_line import command
from wellfed.config.quoting import key_value
from wellfed.explain.diagnosis.evidence import Evidence
from wellfed.explain.diagnosis.finding import colour_of, word_of
from wellfed.explain.diagnosis.run_rules import DOUBTS, EVENT_IDS
from wellfed.explain.diagnosis.script_words import is_script
from wellfed.explain.report.figures import figures_of
from wellfed.explain.report.run_lines import (
    EVERYDAY_EVENTS,
    error_lines,
    gain_of,
    headline,
    show_figure,
    simulated_line,
    wandb_upload,
)
from wellfed.explain.report.write import MARKDOWN, PAGE
from wellfed.record.entries import FindingEntry, RunRecord
from wellfed.units import show_line, show_text, wrapped

_ROWS = ("rate of_ceiling ready", "wait compute copy host step", "gpu memory power cpu")
"""Keys of the figures of each line."""
_BARE = ("rate", "of_ceiling", "power")
"""Figures without their label, and with their note."""
_MOST_METRICS = 6
"""Metrics that the screen shows."""


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
    if record.error is not None:  # the last lines of a failed run are its error
        # What ended the run cost all of it, and has no gain.
        events = (one for one in record.findings if one["id"] in EVENT_IDS and not one["gain"])
        cause = next((one for one in events if one["severity"] == "high"), None)
        yield from _finding(record, cause) if cause else ()
        yield _link(folder)
        yield from _ending(record)
        return
    yield from _ending(record)
    first = record.findings[0] if record.findings else None
    doubts = [one for one in record.findings[1:] if one["severity"] == "info" and one["id"] in DOUBTS]
    notes = [Text(show_text(f"{one['message']} {one['advice']}").rstrip(), "yellow") for one in doubts]
    figures = list(_figures(record))
    if first is None:
        yield from (_badge("NO VERDICT", "the record does not show where time went", "magenta"), *notes, *figures)
    else:
        verdict, *advice = _finding(record, first)
        yield from (verdict, *notes, *figures, *advice)
    yield from _metrics(evidence)
    if record.status == "ok":
        yield Text(headline(record).removeprefix("ok: "))
    others = dict.fromkeys(finding["id"] for finding in record.findings if finding not in (first, *doubts))
    if others:
        yield _badge("Also found", f"{', '.join(others)}: see the report")
    yield from _events(record)
    if simulated := simulated_line(record):
        yield Text(simulated, "blue")
    yield _link(folder)
    if upload := wandb_upload(record):
        yield Text("wandb    offline; to upload it:")
        yield _command(upload)


def _badge(word: str, text: str, style: str = "") -> Text:
    return Text(style=style).append(word, "bold").append(f"  {show_text(text)}")


def _command(words: Sequence[str]) -> Text:
    """Returns a command to copy, which is never broken."""
    return Text(f"  {' '.join(words)}", "bold", no_wrap=True)


def _link(folder: Path) -> Text:
    """Returns where the report is, or the folder."""
    found = next((name for name in (PAGE, MARKDOWN) if (folder / name).exists()), "")
    path = folder / found
    address = f"file://{quote(str(path.absolute()))}"
    return Text(f"{'Report' if found else 'Folder':9}", no_wrap=True).append(show_text(str(path)), f"link {address}")


def _ending(record: RunRecord) -> Iterator[Text]:
    """Yields how a run ended that did not end well, with its error."""
    if record.status in ("ok", "running"):
        return
    word = "out of memory" if record.status == "oom" else record.status
    colour = "yellow" if record.status == "interrupted" else "red"
    yield _badge(word.upper(), headline(record).partition(": ")[2], colour)
    if record.error is not None:
        yield from (Text(f"  {show_line(line)}") for line in error_lines(record))


def _finding(record: RunRecord, finding: FindingEntry) -> Iterator[Text]:
    """Yields the verdict in a word with its message, then the overrides with their gain, else the advice."""
    yield _badge(word_of(finding).upper(), finding["message"], colour_of(finding["id"], finding["severity"]))
    if not finding["change"]:
        if finding["advice"]:
            yield Text("Try: ", "bold").append(show_text(finding["advice"]))
        return
    gain = gain_of(finding).rstrip(".") if finding["gain"] else ""
    brackets = f" ({gain[:1].lower()}{gain[1:]})" if gain else ""
    learning = ", which changes what is learned" if finding["changes_learning"] else ""
    yield Text(f"Try{brackets}{learning}:", "bold")
    if is_script(record):
        yield from (Text(f"  {one}", "bold") for one in finding["change"])
    else:
        yield _command(next_command(record, finding["change"]))


def next_command(record: RunRecord, change: Sequence[str]) -> list[str]:
    """Returns the words of a command that runs the same with a change, quoted for a shell.

    An override of the run gives way to one of the same name, and those of a group's knobs to another option of the
    group. The run gets a folder of its own.
    """
    new = {"hydra.run.dir", *(key_value(one)[0] for one in change)}  # a folder holds one run
    kept = [one for one in record.overrides if (key := key_value(one)[0]) not in new and key.split(".")[0] not in new]
    return [*command("train").split(), *map(shlex.quote, [*record.flags, *kept, *change])]


def _figures(record: RunRecord) -> Iterator[Text]:
    found = figures_of(record)
    for row in _ROWS:
        shown = [Text(found[key].shown) if key in _BARE else found[key].cell for key in row.split() if key in found]
        if shown:
            yield Text("  ").join(shown)


def _metrics(evidence: Evidence) -> Iterator[Text]:
    """Yields the metrics of validation and test, then the losses of training with their first value."""
    record, first = evidence.record, evidence.first_metrics
    best = record.tested is not None and "best" in record.tested.partition("(")[0]
    splits = ("val/", "test/")
    names = [name for name in record.metrics if name.startswith(splits) or name.endswith("loss")]
    names.sort(key=lambda name: (*(not name.startswith(split) for split in splits), not name.endswith("/loss")))
    last_test = next((name for name in reversed(names[:_MOST_METRICS]) if name.startswith("test/")), None)
    shown = []
    for name in names[:_MOST_METRICS]:
        text = f"{name} {show_figure(record.metrics[name], 4)}"
        if name.startswith("train/") and name in first:
            text += f" (first {show_figure(first[name], 4)})"
        shown.append(show_text(text + (" (best weights)" if name == last_test and best else "")))
    if left := len(names[_MOST_METRICS:]):
        shown.append(f"{left} more in the report")
    if shown:
        yield Text("  ".join(shown))


def _events(record: RunRecord) -> Iterator[Text]:
    """Yields the events that need attention, in one line; the report has their facts."""
    by_kind: dict[str, list[Mapping[str, object]]] = {}
    for event in record.events:
        if event["kind"] not in (*EVERYDAY_EVENTS, "signal"):  # the first line has it
            by_kind.setdefault(event["kind"], []).append(event)
    yield from (_badge("Unseen", str(unseen.get("message"))) for unseen in by_kind.pop("unseen", []))
    told = [
        f"{kind.replace('_', ' ')} at step {events[0]['step']}"
        + (f", the first of {len(events)}" if len(events) > 1 else "")
        for kind, events in by_kind.items()
    ]
    if told:
        yield _badge("Happened", "; ".join(told), "yellow")
