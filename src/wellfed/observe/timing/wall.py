"""Accounts for the wall time of training. Each moment goes to one account, such as steps, validation or a hook."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from wellfed.record.entries import WallEntry

START, STEPS, VALIDATION, CHECKPOINT = "start", "steps", "validate", "checkpoint"
EPOCH_END, LOGGING, END = "epoch_end", "logging", "end"
_KEYS = {
    START: "start_s",
    STEPS: "steps_s",
    VALIDATION: "validation_s",
    CHECKPOINT: "checkpoint_s",
    EPOCH_END: "epoch_end_s",
    LOGGING: "logging_s",
    END: "end_s",
}
"""Accounts of the engine -> their keys in the record. Any other account is a hook, such as ``Ema.on_fit_start``."""
_WITHIN_STEPS = frozenset(
    {
        *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward"),
        *("on_after_backward", "on_before_optimizer_step", "step"),
    }
)
"""Hooks whose time is part of a step in steps.csv; ``step`` is a learning-rate scheduler's."""


def is_within_steps(name: str) -> bool:
    """Returns whether a hook, as ``callbacks`` of the record names it, runs while a step is timed."""
    return name.rpartition(".")[2] in _WITHIN_STEPS


def hooks_within_steps_s(wall: WallEntry) -> float:
    """Returns the seconds of the hooks that ran within steps."""
    return sum(spent_s for name, spent_s in wall["callbacks"].items() if is_within_steps(name))


def waited_for_a_core_s(tasks: Path = Path("/proc/self/task")) -> dict[str, float]:
    """Returns the seconds for which each thread of this process was ready to run and had no core.

    Empty if the system does not count them.
    """
    found = {}
    with suppress(OSError, ValueError, IndexError):
        for task in tasks.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
                found[task.name] = 1e-9 * int((task / "schedstat").read_text().split()[1])
    return found if any(found.values()) else {}


class Wall:
    """Division of the time of training among accounts; each moment belongs to one, the innermost."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.perf_counter,
        waited_s: Callable[[], Mapping[str, float]] = waited_for_a_core_s,
    ) -> None:
        """``waited_s`` returns the seconds that each thread of the process has waited for a core."""
        self._now_s, self._waited_s = now_s, waited_s
        self._cores_waited_s = 0.0
        self.account: str | None = None
        """Account of the present; None while nothing is timed."""
        self._since_s = self._began_s = self._before_s = 0.0
        self._spent_s: dict[str, float] = defaultdict(float)
        self.wait_for_device: Callable[[], None] = lambda: None
        """Waits for a GPU, which may be steps behind the host."""

    def switch(self, account: str) -> str | None:
        """Gives the time from now on to this account; returns the previous account, None if nothing is timed."""
        before = self.account
        if before is not None:
            now_s = self._now_s()
            self._spent_s[before] += now_s - self._since_s
            self.account, self._since_s = account, now_s
        return before

    def back(self, before: str | None) -> None:
        """Returns to the account that `switch` returned."""
        if before is not None:
            self.switch(before)

    def settle(self) -> None:
        """Waits for the steps that a GPU still computes, in their account; within a validation there are none."""
        if self.account == VALIDATION:
            return
        before = self.switch(STEPS)
        if before is not None:
            self.wait_for_device()
            self.switch(before)

    @contextmanager
    def during(self, account: str) -> Iterator[None]:
        """Gives the time within the block to this account; waits first for the steps launched before it."""
        self.settle()
        before = self.switch(account)
        try:
            yield
        finally:
            self.back(before)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Divides the time within the block among accounts; several blocks add up."""
        self.account, waited_s = START, self._waited_s()
        self._since_s = self._began_s = self._now_s()
        try:
            yield
        finally:
            self.switch(END)
            later_s = self._waited_s()
            grown_s = (later_s[one] - waited_s[one] for one in later_s.keys() & waited_s)
            self._cores_waited_s += max(grown_s, default=0.0)
            self._before_s += self._since_s - self._began_s
            self.account = None

    @property
    def core_wait_frac(self) -> float | None:
        """Returns the largest share of the time for which a thread was ready to run and had no core.

        None without training, or if the system does not count it.
        """
        return self._cores_waited_s / self._before_s if self._before_s > 0 and self._waited_s() else None

    def entry(self, earlier: WallEntry | None = None) -> WallEntry | None:
        """Returns the accounts so far, with those of the run's earlier processes; None if nothing was timed."""
        self.back(self.account)  # closes what is open
        total_s = self._before_s + (0.0 if self.account is None else self._since_s - self._began_s)
        if total_s <= 0:
            return earlier
        found = {key: self._spent_s.get(account, 0.0) for account, key in _KEYS.items()}
        hooks = {name: spent_s for name, spent_s in self._spent_s.items() if name not in _KEYS}
        if earlier is not None:
            total_s += earlier["total_s"]
            found = {key: spent_s + earlier[key] for key, spent_s in found.items()}  # type: ignore[literal-required]
            before = earlier["callbacks"]
            hooks = {name: hooks.get(name, 0.0) + before.get(name, 0.0) for name in {**hooks, **before}}
        other_s = total_s - sum(found.values()) - sum(hooks.values())
        return {  # type: ignore[return-value]  # the keys of `_KEYS`
            "total_s": round(total_s, 6),
            **{key: round(spent_s, 6) for key, spent_s in found.items()},
            "callbacks": {name: round(hooks[name], 6) for name in sorted(hooks, key=lambda name: -hooks[name])},
            "other_s": round(max(0.0, other_s), 6),
        }
