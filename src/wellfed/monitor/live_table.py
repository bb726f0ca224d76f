"""Words what is read at the moment: as a table with curves for a terminal, as one plain line for a file or a pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from wellfed.explain.diagnosis.curves.level import STARVED_PCT, WELL_USED_PCT
from wellfed.monitor.board import Board
from wellfed.monitor.seen_gpus import SeenGpu
from wellfed.observe.telemetry.machines import HOST
from wellfed.units import show_duration

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.,-~+*#"
"""From 0 to 100 %."""
CURVE_S = 60
_INDENT = 5


@dataclass(frozen=True)
class _Cell:
    """One figure of a GPU, or a pair of them."""

    head: str
    width: int
    label: str
    """In a plain line; the unit follows the figure there."""
    unit: str
    show: Callable[[SeenGpu, Mapping[str, float]], str]
    """Empty where it is not known."""


def _whole(name: str) -> Callable[[SeenGpu, Mapping[str, float]], str]:
    return lambda gpu, values: f"{values[name]:.0f}" if name in values else ""


def _pair(one: str, other: str) -> Callable[[SeenGpu, Mapping[str, float]], str]:
    def show(gpu: SeenGpu, values: Mapping[str, float]) -> str:
        texts = [_whole(name)(gpu, values) for name in (one, other)]
        return "/".join(text or "-" for text in texts) if any(texts) else ""

    return show


def _memory(gpu: SeenGpu, values: Mapping[str, float]) -> str:
    if "mem_used_gib" not in values:
        return ""
    return f"{values['mem_used_gib']:.1f}" + ("" if gpu.memory_gib is None else f"/{gpu.memory_gib:.1f}")


def _power(gpu: SeenGpu, values: Mapping[str, float]) -> str:
    if "power_w" not in values:
        return ""
    limit_w = gpu.device.power_limit_w
    return f"{values['power_w']:.0f}" + ("" if limit_w is None else f"/{limit_w:.0f}")


_SHOWN = (
    _Cell("util %", 7, "util", "%", _whole("util_pct")),
    _Cell("SM %", 6, "SM", "%", _whole("sm_active_pct")),
    _Cell("memory GiB", 13, "memory", "GiB", _memory),
    _Cell("power W", 11, "power", "W", _power),
    _Cell("SM/mem MHz", 12, "SM/mem", "MHz", _pair("sm_clock_mhz", "mem_clock_mhz")),
    _Cell("PCIe in/out MB/s", 18, "PCIe in/out", "MB/s", _pair("pcie_rx_mb_s", "pcie_tx_mb_s")),
    _Cell("temp C", 8, "at", "C", _whole("temp_c")),
)
"""The most important first: what does not fit into a narrow terminal is left out."""


@dataclass(frozen=True)
class Face:
    """Text of the monitor's present state."""

    board: Board
    gpus: Sequence[SeenGpu]
    num_cores: int
    ram_gib: float
    interval_s: float

    def table(self, now_s: float, until: str, *, width: int, height: int, blocks: str = BLOCKS) -> list[Text]:
        """Lines that fit; the curve of the last minute below each GPU and the host, where there is room for them.

        Args:
            until: when the monitor ends.
        """
        shown = [one for place, one in enumerate(_SHOWN) if _INDENT + _width(place) <= width]
        head = "".join(one.head.rjust(one.width) for one in shown)
        passed = f"{now_s:.0f} s" if now_s < 60 else show_duration(now_s)
        lines = [Text(f"{passed}{until}. Curves: utilisation, the last minute.", "dim")]
        if self.gpus:
            lines.append(Text("GPU".ljust(_INDENT) + head, "bold"))
        num_places = height - len(lines) - 2
        has_curves = 2 * len(self.gpus) <= num_places
        room = len(self.gpus) if has_curves or len(self.gpus) <= num_places else max(0, num_places - 1)
        for gpu in self.gpus[:room]:
            lines.append(self._row(gpu, shown, now_s))
            if has_curves:
                lines.append(self._curve(gpu.index, now_s, width, blocks))
        if room < len(self.gpus):
            lines.append(Text(f"and {len(self.gpus) - room} more: a taller window shows them", "dim"))
        lines += [Text(f"host {self._host_words()}"), self._curve(HOST, now_s, width, blocks)]
        for line in lines:
            line.truncate(width)
        return lines

    def line(self, now_s: float) -> str:
        """The same in words, without the curves."""
        parts = []
        for gpu in self.gpus:
            trouble = self.board.trouble(gpu.index, now_s)
            values = self.board.latest(gpu.index)
            texts = [(one, one.show(gpu, values)) for one in _SHOWN]
            words = trouble or ", ".join(f"{one.label} {text} {one.unit}" for one, text in texts if text)
            parts.append(f"gpu{gpu.index} {words or 'no reading yet'}")
        return "; ".join([*parts, f"host {self._host_words()}"])

    def _row(self, gpu: SeenGpu, shown: Sequence[_Cell], now_s: float) -> Text:
        number = f"{gpu.index}".rjust(3).ljust(_INDENT)
        if (trouble := self.board.trouble(gpu.index, now_s)) is not None:
            return Text(f"{number} {trouble}", "red")
        values, row = self.board.latest(gpu.index), Text(number)
        for one in shown:
            style = _style(values["util_pct"]) if one is _SHOWN[0] and "util_pct" in values else ""
            row.append((one.show(gpu, values) or "-").rjust(one.width), style)
        return row

    def _curve(self, gpu: int, now_s: float, width: int, blocks: str) -> Text:
        cell_s = max(1.0, self.interval_s)
        cells = self.board.cells(gpu, now_s, cell_s, max(1, min(int(CURVE_S / cell_s), width - _INDENT)))
        line = Text(" " * _INDENT)
        for style, run in groupby(cells, key=lambda value: "" if value is None or gpu == HOST else _style(value)):
            line.append("".join(" " if value is None else block(value, blocks) for value in run), style)
        return line

    def _host_words(self) -> str:
        host = self.board.latest(HOST)
        cpu = f"{host['cpu_pct']:.0f} %" if "cpu_pct" in host else "-"
        memory = f"{host['mem_used_gib']:.1f}" if "mem_used_gib" in host else "-"
        return f"CPU {cpu} of {self.num_cores} cores, memory {memory}/{self.ram_gib:.1f} GiB"


def block(value: float, blocks: str) -> str:
    """The character whose height is nearest to so many percent."""
    return blocks[min(len(blocks) - 1, max(0, round(value / 100 * (len(blocks) - 1))))]


def _width(place: int) -> int:
    return sum(one.width for one in _SHOWN[: place + 1])


def _style(util_pct: float) -> str:
    return "green" if util_pct >= WELL_USED_PCT else "yellow" if util_pct >= STARVED_PCT else "red"
