"""Keeps the rows of one sweep: those on disk and each new one, what is missing, what is best, and the ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from wellfed.config.schema import LoggerConfig, SweepConfig
from wellfed.errors import EXIT_FAILED, EXIT_OK
from wellfed.observe.loggers.wandb_sink import decide_mode
from wellfed.study.sweep import leaderboard_files, ledger
from wellfed.study.sweep.grid import SweepFile
from wellfed.study.sweep.ledger import Row
from wellfed.study.sweep.objective import OBJECTIVES
from wellfed.study.sweep.ranking import leaderboard
from wellfed.study.trials.sweep_screen import SweepScreen
from wellfed.study.trials.trial_ledger import TrialLedger

CONFIRMED = 3
"""So many of the best are measured again..."""
CONFIRM_ROUNDS = 3
"""...so often, in turn: a machine that slows down slows all of them."""


class SweepLedger(TrialLedger):
    """The rows of a sweep in its folder, which nobody else writes to; its machine is the one before until
    `note_machine`."""

    def __init__(self, folder: Path, file: SweepFile, config: SweepConfig, screen: SweepScreen) -> None:
        super().__init__(folder, file.code, screen, [status.value for status in config.retry])
        self.file, self._screen = file, screen
        self._trial_steps = config.trial_steps
        self._objective = OBJECTIVES[file.objective]

    # -- what is there already ------------------------------------------------------------------------------------

    def say_what_changed(self) -> None:
        """A ledger that is there already is gone on with; what makes its rows another matter is said."""
        say = self._screen.say
        for text in self.says_damaged():
            say(text)
        try:
            earlier = SweepFile.read(self.folder)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            say(f"{error} It is written anew.")
            return
        self.file = replace(self.file, machine=earlier.machine)
        now, before, rows = set(self.file.ids), set(earlier.ids), self._latest()
        if now == before:
            say(f"Going on in {self.folder}: {len(rows)} of {len(now)} points have a row.")
        else:
            say(
                f"{self.folder} was made with another grid: {len(now - before)} points are new, {len(rows)} have a "
                f"row, {len(before - now)} that this grid lacks stay in {ledger.FILE_NAME}."
            )
        kept = "rows measured before are kept"
        again = "To measure them again: sweep.retry=[ok], or another sweep.name."
        codes = {row.code for row in rows if row.status == "ok"}
        if changed := sorted(codes - {self.file.code}):
            say(f"The code has changed since ({', '.join(changed)} -> {self.file.code}): {kept} and marked. {again}")
        if codes and earlier.trial_steps not in (0, self._trial_steps):
            say(f"sweep.trial_steps was {earlier.trial_steps} and is {self._trial_steps}: {kept}. {again}")
        for text in self.says_kept("sweep"):
            say(text)

    def note_machine(self, machine: str, processor: str) -> None:
        """Trials run on this one now, whose processor is one of them."""
        super().note_machine(machine, processor)
        if self.file.machine not in ("", machine):
            self._screen.say(
                f"This is another machine than before ({self.file.machine} -> {machine}): rates of two machines are "
                "no comparison. Take another sweep.name to keep them apart."
            )
        self.file = replace(self.file, machine=machine)

    def missing(self, among: Collection[str]) -> list[str]:
        """Ids of the points that still have to be run."""
        return [point for point in ledger.missing(self.file.ids, self._found, self._retry) if point in among]

    def best_among(self, points: Collection[str]) -> list[str]:
        """Those that are measured again, the best first."""
        return [row.point for row in self._best_first() if row.point in points][:CONFIRMED]

    def to_confirm(self, among: Collection[str]) -> list[str]:
        """The best in turn, a round after the other; none where there is nothing to compare."""
        best = self.best_among(among)
        if len(best) < 2:
            return []
        done = min(len(self._found.confirms(point)) for point in best)
        # Every other round backwards: nobody always follows the same one.
        return [point for number in range(done, CONFIRM_ROUNDS) for point in (best if number % 2 == 0 else best[::-1])]

    def host_of(self, point: str) -> str:
        """Returns the machine that measured a point."""
        return self._found.latest()[point].host

    def best(self) -> Row | None:
        """The row that would be first."""
        return next(iter(self._best_first()), None)

    def _best_first(self) -> list[Row]:
        """The latest rows that rank, by their trial alone."""
        found = [(self._objective(row), row) for row in self._latest() if row.status == "ok"]
        good = [(self._objective.goodness(figure), row) for figure, row in found if figure is not None]
        return [row for _, row in sorted(good, key=lambda each: -each[0])]

    # -- what comes to it -----------------------------------------------------------------------------------------

    def add(self, row: Row) -> None:
        """A trial has ended."""
        self._compare_machine(row)
        super().add(row)
        self._screen.ended(row, self.best())

    def _compare_machine(self, row: Row) -> None:
        """A first trial on another kind of machine is told."""
        if row.status != "ok" or not row.machine:
            return
        if not self.file.machine:
            self.file = replace(self.file, machine=f"{row.machine}; {row.device}")
        known = [each for each in self._latest() if each.status == "ok" and each.machine]
        is_new = row.host not in {each.host for each in known}
        if known and is_new and (row.machine, row.device) not in {(each.machine, each.device) for each in known}:
            self._screen.say(
                f"{row.host} is another kind of machine than those before ({row.machine}; {row.device}): rates of two "
                "kinds are no comparison, and the leaderboard marks them."
            )

    # -- when all is measured -------------------------------------------------------------------------------------

    def rank(self) -> int:
        """Ranks what is there; the exit code."""
        self._screen.end()
        board = leaderboard(self.file, self._found)
        try:
            self.file.write(self.folder)  # it may have ended before there was one
            written = leaderboard_files.write(self.folder, board)
        except OSError as error:
            self._screen.say(f"The leaderboard can't be written: {error}. The rows are in {ledger.FILE_NAME}.")
        else:
            self._screen.finished(board, written)
        return EXIT_FAILED if self.best() is None else EXIT_OK

    def publish(self, logger: LoggerConfig) -> None:
        """To wandb; its troubles are no trouble of the sweep."""
        from wellfed.study.trials.publish import is_published, publish

        number = len(self._found.rows)
        is_off = decide_mode(logger.mode.value) == "disabled"
        if is_off or self.best() is None or is_published(self.folder, number):
            return
        self._screen.say("Putting the trials into wandb")
        try:
            publish(self.folder, self.file, self._latest(), logger, number_of_rows=number)
        except (RuntimeError, OSError) as error:
            self._screen.say(f"{error}; the files have every figure.")

    def _latest(self) -> list[Row]:
        """The last trial of each point that has one, in the grid's order."""
        latest = self._found.latest()
        return [latest[point] for point in self.file.ids if point in latest]
