"""``leaderboard.html``: one file without script or network, for light and dark screens, for paper, without colour."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import combinations
from statistics import fmean
from string import Template

from wellfed.sweep.leaderboard import Entry, Leaderboard
from wellfed.sweep.leaderboard_columns import columns, interval, what_became
from wellfed.sweep.memory_picture import memory_picture
from wellfed.units import counted, show_count, show_gib, show_percent

MOST_MAPS = 6
"""Pairs of axes that get a heat map."""


def to_html(board: Leaderboard) -> str:
    """The page. Every text of the user's is escaped."""
    parts = [
        *_opening(board),
        *_ranks(board),
        *_unranked(board),
        *_pending(board),
        *_effects(board),
        *_heat_maps(board),
        *_memory(board),
        *_reading(board),
    ]
    return _PAGE.substitute(title=escape(f"{board.name}: {board.workload}"), style=_STYLE, body="\n".join(parts))


def _opening(board: Leaderboard) -> Iterator[str]:
    yield f"<h1>Sweep {escape(board.name)} <small>{escape(board.workload)}</small></h1>"
    counts = ", ".join(f"{number}&nbsp;{status}" for status, number in board.counts.items())
    facts = [
        ("points", f"{len(board.entries)}: {counts}"),
        ("axes", ", ".join(f"<code>{escape(axis)}</code> ({len(values)})" for axis, values in board.axes.items())),
        ("shared", f"<code>{escape(shlex.join(board.fixed))}</code>" if board.fixed else ""),
        ("machine", escape(board.machine)),
        ("code", f"<code>{escape(board.code)}</code>"),
    ]
    yield f"<dl>{''.join(f'<dt>{name}</dt><dd>{text}</dd>' for name, text in facts if text)}</dl>"
    if not board.ranked:
        yield "<p class=best>No point has a rate.</p>"
        return
    best = board.ranked[0]
    tied = sum(entry.rank == 1 for entry in board.ranked) - 1
    values = " ".join(f"<code>{escape(axis)}={escape(value)}</code>" for axis, value in best.values.items())
    between = f" (95&nbsp;%: {interval(best)})" if best.ci95 else ""
    also = f", not told apart from {counted(tied, 'other point')}" if best.tie == "=" else ""
    yield (
        f"<p class=best>Fastest{also}: {values or escape(best.point)} with "
        f"<strong>{show_count(best.samples_per_s or 0)}</strong> {escape(board.sample_unit)}/s{between}. "
        f"Keep it: <code>python -m wellfed choose {escape(shlex.quote(board.name))} --name mine</code></p>"
    )


def _ranks(board: Leaderboard) -> Iterator[str]:
    if not board.ranked:
        return
    figures = columns(board)
    top = max(max([_rate(entry), *(entry.ci95 or ())]) for entry in board.ranked)
    rows = []
    for entry in board.ranked:
        cells = [f"<td class=n>{entry.label}</td>", f"<td><code>{escape(entry.point)}</code>{_marks(entry)}</td>"]
        cells += [f"<td class=v>{escape(value)}</td>" for value in entry.values.values()]
        cells += [f"<td class=n>{escape(column.text(entry))}</td>" for column in figures[:1]]
        cells.append(f"<td>{_strip(entry, top)}</td>")
        cells += [f"<td class=n>{escape(column.text(entry))}</td>" for column in figures[1:]]
        rows.append(f"<tr{' class=first' if entry.rank == 1 else ''}>{''.join(cells)}</tr>")
    first, *others = [
        f'<th scope=col class=n title="{escape(column.meaning)}">{escape(column.head)}</th>' for column in figures
    ]
    head = ["<th scope=col class=n>rank</th>", "<th scope=col>point</th>", *_heads(board), first]
    head += [f"<th scope=col class=strip>0 to {show_count(top)}</th>", *others]
    yield "<h2>Ranks</h2>"
    yield _table(head, rows)
    meanings = "; ".join(f"<b>{escape(column.head)}</b>: {escape(column.meaning)}" for column in figures)
    yield f"<p class=note>{meanings}. Strip: bar up to the rate, line over its 95&nbsp;% interval.</p>"


def _marks(entry: Entry) -> str:
    return f" <em class=mark>{escape('; '.join(entry.marks))}</em>" if entry.marks else ""


def _strip(entry: Entry, top: float) -> str:
    """Rate and interval as lengths; the figures beside it say the same."""
    whisker = ""
    if entry.ci95 is not None:
        left, width = 100 * entry.ci95[0] / top, 100 * (entry.ci95[1] - entry.ci95[0]) / top
        whisker = f'<i style="left:{left:.2f}%;width:{width:.2f}%"></i>'
    return f'<span class=strip aria-hidden=true><b style="width:{100 * _rate(entry) / top:.2f}%"></b>{whisker}</span>'


def _unranked(board: Leaderboard) -> Iterator[str]:
    if not board.unranked:
        return
    yield f"<h2>Without a rate: {counted(len(board.unranked), 'point')}</h2>"
    for entry in board.unranked:
        values = " ".join(f"{escape(axis)}={escape(value)}" for axis, value in entry.values.items())
        facts = [
            ("error", escape(str(entry.error.get("kind") or "")) if entry.error else ""),
            ("exit code", "" if entry.exit_code is None else str(entry.exit_code)),
            ("attempts", str(entry.attempt)),
            ("folder", f"<code>{escape(entry.folder)}</code>" if entry.folder else ""),
            ("alone", f"<code>python src/train.py {escape(shlex.join(entry.overrides))}</code>"),
        ]
        listed = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts if text)
        lines = f"<pre>{escape(chr(10).join(entry.stderr))}</pre>" if entry.stderr else ""
        yield (
            f"<details><summary><span class=status>{entry.status}</span> <code>{escape(entry.point)}</code> "
            f"<span class=v>{values}</span><br><span class=why>{escape(what_became(entry))}</span></summary>"
            f"<dl>{listed}</dl>{lines}</details>"
        )


def _pending(board: Leaderboard) -> Iterator[str]:
    waiting = [entry for entry in board.entries if entry.status == "pending"]
    if waiting:
        rows = [
            f"<tr><td><code>{escape(entry.point)}</code></td>"
            + "".join(f"<td class=v>{escape(value)}</td>" for value in entry.values.values())
            + "</tr>"
            for entry in waiting
        ]
        yield (
            f"<h2>Pending: {counted(len(waiting), 'point')}</h2>"
            "<p class=note>No trial of these has ended yet; the sweep's command again runs what is missing.</p>"
            f"<details><summary>which</summary>{_table(['<th scope=col>point</th>', *_heads(board)], rows)}</details>"
        )


def _effects(board: Leaderboard) -> Iterator[str]:
    effects = board.effects
    yield "<h2>Which knob mattered</h2>"
    if effects.shares:
        shown = [(f"<code>{escape(axis)}</code>", effects.shares[axis]) for axis in effects.by_importance]
        shown.append(("interactions and noise", effects.rest or 0.0))
        rows = [
            f"<tr><th scope=row>{name}</th><td class=n>{show_percent(share)}</td>"
            f'<td class=wide><span class=strip aria-hidden=true><b style="width:{100 * share:.1f}%"></b></span></td>'
            "</tr>"
            for name, share in shown
        ]
        yield _table(["<th scope=col>knob</th>", "<th scope=col class=n>share</th>", "<td></td>"], rows)
        yield (
            f"<p class=note>Share of the variance of log rate over {counted(effects.points, 'point')} that each knob "
            "explains taken alone; the rest depends on combinations, or is noise.</p>"
        )
    yield from (
        f"<p class=note><code>{escape(axis)}</code>: {escape(why)}.</p>" for axis, why in effects.absent.items()
    )
    yield from (f"<p class=note>{escape(note)}</p>" for note in effects.notes)


def _heat_maps(board: Leaderboard) -> Iterator[str]:
    varied = [axis for axis, values in board.axes.items() if len(values) > 1]
    if not board.ranked or len(varied) < 2:
        return
    share = {axis: board.effects.shares.get(axis, 0.0) for axis in varied}
    pairs = sorted(combinations(varied, 2), key=lambda pair: -(share[pair[0]] + share[pair[1]]))
    yield "<h2>Two knobs at a time</h2>"
    yield (
        "<p class=note>Mean rate relative to the best, over the points that share both values; below it those without "
        "a rate.</p><div class=maps>"
    )
    lowest = min(entry.of_best or 0.0 for entry in board.ranked)
    yield from (_heat_map(board, pair, lowest) for pair in pairs[:MOST_MAPS])
    yield "</div>"
    if len(pairs) > MOST_MAPS:
        left = ", ".join(f"{escape(one)} × {escape(other)}" for one, other in pairs[MOST_MAPS:])
        yield f"<p class=note>Left out, as these knobs mattered least: {left}.</p>"


def _heat_map(board: Leaderboard, pair: tuple[str, str], lowest: float) -> str:
    down, across = sorted(pair, key=lambda axis: -len(board.axes[axis]))
    cells: dict[tuple[str, str], list[Entry]] = {}
    for entry in board.entries:
        cells.setdefault((entry.values[down], entry.values[across]), []).append(entry)
    head = [f"<th scope=col>{escape(down)}</th>"]
    head += [f"<th scope=col class=v>{escape(value)}</th>" for value in board.axes[across]]
    rows = [
        f"<tr><th scope=row class=v>{escape(value)}</th>"
        + "".join(_cell(cells[value, other], lowest) for other in board.axes[across])
        + "</tr>"
        for value in board.axes[down]
    ]
    caption = f"<code>{escape(down)}</code> down, <code>{escape(across)}</code> across"
    return _table(head, rows, caption=caption, kind="map")


def _cell(entries: Sequence[Entry], lowest: float) -> str:
    rates = [entry.of_best for entry in entries if entry.of_best is not None]
    others = Counter(entry.status for entry in entries if entry.of_best is None)
    told = ", ".join(
        status if number == len(entries) == 1 else f"{number} {status}" for status, number in others.items()
    )
    if not rates:
        return f"<td class=none>{told}</td>"
    mean = fmean(rates)
    heat = (mean - lowest) / (1 - lowest) if lowest < 1 else 1.0
    return (
        f'<td style="--heat:{100 * heat:.0f}%">{100 * mean:.0f}&nbsp;%{f"<small>{told}</small>" if told else ""}</td>'
    )


def _memory(board: Leaderboard) -> Iterator[str]:
    picture = memory_picture(board)
    if picture is None:
        return
    front = sorted((entry for entry in board.ranked if entry.on_front), key=lambda entry: entry.peak_memory_gib or 0)
    told = "; ".join(
        f"rank {entry.label}, {show_gib(entry.peak_memory_gib or 0)}, {show_count(_rate(entry))}/s" for entry in front
    )
    label = escape(f"Rate against peak memory. On the front: {told}.")
    yield "<h2>Throughput against memory</h2>"
    yield picture.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    rows = [
        f"<tr><td class=n>{entry.label}</td><td><code>{escape(entry.point)}</code></td>"
        + "".join(f"<td class=v>{escape(value)}</td>" for value in entry.values.values())
        + f"<td class=n>{show_gib(entry.peak_memory_gib or 0)}</td><td class=n>{show_count(_rate(entry))}</td></tr>"
        for entry in front
    ]
    yield (
        f"<p class=note>Rates in {escape(board.sample_unit)}/s; lines are 95&nbsp;% intervals. Filled, and below: the "
        "Pareto front, points that no other beats in rate and memory at once.</p>"
    )
    head = ["<th scope=col class=n>rank</th>", "<th scope=col>point</th>", *_heads(board)]
    unit = f"<th scope=col class=n>{escape(board.sample_unit)}/s</th>"
    yield _table([*head, "<th scope=col class=n>peak</th>", unit], rows)


def _reading(board: Leaderboard) -> Iterator[str]:
    yield "<h2>How to read this</h2><ul class=note>"
    yield from (f"<li>{escape(note)}</li>" for note in board.notes)
    yield (
        "<li>A rate is the mean over a point's trial and the runs that confirmed it. Its 95&nbsp;% interval is the "
        "wider of two: what its own runs say, by their steps or by how they differ, and Student's t of the noise "
        "between runs, pooled over all points that were measured more than once.</li>"
        "<li>Ranks with '=' are shared: the interval overlaps that of the first with this rank. Points were picked to "
        "be confirmed because they were fast, so their first measurement tends to flatter them.</li>"
        "<li>Each figure can be computed again from <code>ledger.jsonl</code>; unrounded: <code>leaderboard.csv</code>."
        "</li></ul>"
    )


def _rate(entry: Entry) -> float:
    return entry.samples_per_s or 0.0


def _heads(board: Leaderboard) -> list[str]:
    return [f"<th scope=col class=v>{escape(axis)}</th>" for axis in board.axes]


def _table(head: Iterable[str], rows: Iterable[str], *, caption: str = "", kind: str = "list") -> str:
    told = f"<caption>{caption}</caption>" if caption else ""
    body = "\n".join(rows)
    return (
        f'<div class="scroll {kind}"><table>{told}<thead><tr>{"".join(head)}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


_PAGE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
"""
)
_STYLE = """
:root { --paper: #fff; --ink: #1b1f24; --soft: #5b6470; --line: #dde1e6; --wash: #f4f6f8; --accent: #0b6bcb;
  --cold: #f7fafd; --hot: #7fbcf5; --bar: #9cc7f0; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e4e8ec; --soft: #9aa4af; --line: #333a43;
  --wash: #1c2127; --accent: #6cb2f7; --cold: #181c21; --hot: #1f6198; --bar: #2c5b88; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 92rem; margin: 0 auto; padding: 1.5rem 1.5rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .6rem; } h1 small { color: var(--soft); font-weight: 400; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
code, pre { font: .86em/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--wash); border: 1px solid var(--line); padding: .7rem; white-space: pre-wrap; margin: .5rem 0 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .4rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.best { border-left: 4px solid var(--accent); background: var(--wash); padding: .6rem .9rem; margin: 1rem 0; }
.note { color: var(--soft); font-size: .88rem; max-width: 62rem; margin: .5rem 0; } ul.note { padding-left: 1.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { padding: .28rem .45rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { border-bottom: 2px solid var(--soft); vertical-align: bottom; font-weight: 600; }
tbody th { font-weight: 400; }
.n { text-align: right; white-space: nowrap; }
.v { overflow-wrap: break-word; } td.v, th.v { max-width: 18rem; } td code { overflow-wrap: normal; }
tr.first td { background: var(--wash); } tr.first td.n:first-child { font-weight: 700; }
.mark { color: var(--soft); font-size: .85em; }
.strip { display: block; position: relative; height: .75rem; margin-top: .3rem; min-width: 6rem; }
th.strip { display: table-cell; height: auto; font-weight: 400; color: var(--soft); }
.strip b { position: absolute; inset: 0 auto 0 0; background: var(--bar); }
.strip i { position: absolute; top: 50%; margin-top: -1px; border-top: 2px solid var(--ink); min-width: 2px; }
.wide { width: 28rem; }
.list table { min-width: min(100%, 30rem); }
details { border: 1px solid var(--line); margin: .4rem 0; padding: .45rem .8rem; } summary { cursor: pointer; }
.status { display: inline-block; min-width: 5.5rem; font-weight: 600; }
.why { color: var(--soft); font-size: .88rem; overflow-wrap: anywhere; }
.maps { display: flex; flex-wrap: wrap; gap: 1.6rem 2.4rem; align-items: flex-start; }
caption { text-align: left; padding-bottom: .35rem; }
.map { max-width: 100%; } .map td { text-align: center; border: 1px solid var(--paper); min-width: 5rem;
  background: color-mix(in srgb, var(--hot) var(--heat), var(--cold)); print-color-adjust: exact; }
.map td small { display: block; color: var(--ink); opacity: .8; }
.map td.none { color: var(--soft); font-size: .82rem;
  background: repeating-linear-gradient(45deg, var(--paper) 0 5px, var(--wash) 5px 10px); }
svg { display: block; width: 100%; max-width: 52rem; height: auto; }
@media print { main { max-width: none; padding: 0; } details { break-inside: avoid; } .strip b { print-color-adjust:
  exact; } }
"""
