"""Makes the heat map of a sweep's page, where exactly two knobs vary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wellfed.study.points.space import grid_values
from wellfed.study.ranking.board_entry import Entry, Leaderboard


@dataclass(frozen=True)
class HeatMap:
    """Two axes against each other, the longer one downwards."""

    down: str
    across: str
    values: Mapping[str, tuple[str, ...]]
    """Values of each axis."""
    cells: Mapping[tuple[str, str], Entry]
    """Entry by its values."""
    lowest: float
    """`Entry.of_best` of the worst entry."""

    def heat(self, entry: Entry) -> float:
        """Returns 0 for the worst entry to 1 for the best."""
        return 1.0 if self.lowest == 1 else ((entry.of_best or 0.0) - self.lowest) / (1 - self.lowest)


def heat_map(board: Leaderboard) -> HeatMap | None:
    """Returns the map of two axes; None where another number of axes varies, or no point has a rank."""
    axes = {} if board.is_of_search else grid_values(board.file.space)
    varied = sorted((axis for axis, values in axes.items() if len(values) > 1), key=lambda axis: -len(axes[axis]))
    if len(varied) != 2 or not board.ranked:
        return None
    down, across = varied
    cells = {(entry.values[down], entry.values[across]): entry for entry in board.entries}
    return HeatMap(down, across, axes, cells, min(entry.of_best or 0.0 for entry in board.ranked))
