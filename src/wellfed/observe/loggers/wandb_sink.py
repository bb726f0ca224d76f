"""Sends metrics to wandb: offline unless logged in or requested. The only file that uses wandb directly."""

from __future__ import annotations

import logging
import netrc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from wellfed.errors import first_line
from wellfed.masking import hidden, masked_override
from wellfed.observe.loggers.sink import PICTURES, GuardedSink
from wellfed.observe.telemetry.metrics import TIME_AXIS

_LOG = logging.getLogger(__name__)
_INIT_TIMEOUT_S = 30
_FLUSH_S = 0.1
"""Maximum seconds that wandb buffers rows. With its default, a killed run loses 15 s (wandb PR 12742)."""
_AXES = {
    "step": ("train/*", "val/*", "test/*", "step/*", "throughput/*", "epoch"),
    TIME_AXIS: ("gpu*", "host/*"),
}
"""Axis of each group of metrics. wandb takes ``*`` at the end only."""
_CLOUD_HOSTS = frozenset({"api.wandb.ai", "api.forge.coreweave.com", "forge.coreweave.com"})
"""Hosts that wandb 0.31 treats as one; `wandb login` may have written any of them."""


def is_logged_in(environ: Mapping[str, str] | None = None, home: Path | None = None) -> bool:
    """Returns whether wandb would find a key, without importing it: in the environment, or in ``.netrc``."""
    environ = os.environ if environ is None else environ
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    wanted = _CLOUD_HOSTS if host in _CLOUD_HOSTS else {host}
    path = Path(environ.get("NETRC") or (home or Path.home()) / ".netrc").expanduser()
    try:
        return not wanted.isdisjoint(netrc.netrc(str(path)).hosts)  # wandb ignores `default` entries
    except (OSError, netrc.NetrcParseError):
        return False


def decide_mode(asked: str) -> str:
    """Returns ``online``, ``offline`` or ``disabled``. logger.mode=auto takes WANDB_MODE, then checks for a login."""
    if asked != "auto":
        return asked
    from_environment = os.environ.get("WANDB_MODE", "")
    if from_environment in ("online", "offline", "disabled"):
        return from_environment
    return "online" if is_logged_in() else "offline"


class WandbSink(GuardedSink):
    """Sink of an open wandb run. Rows contain their axes, so wandb's step counter is unused. wandb 0.31 makes one row
    of each ``run.log(row)``. A row sent while the run closes is lost or raises, so one thread calls at a time."""

    def __init__(self, run: Any, mode: str, on_lost: Callable[[str], None]) -> None:
        super().__init__("wandb", on_lost)
        self.run, self.mode = run, mode

    @property
    def id(self) -> str:
        """Id of the run in wandb; a resumed run keeps it."""
        return str(self.run.id)

    @property
    def folder(self) -> Path:
        """Folder that wandb writes this process's files to."""
        return Path(self.run.dir).parent

    def _take(self, row: dict[str, float | int]) -> None:
        self.run.log(row)

    def _take_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> None:
        import wandb

        with _without_pandas():
            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
            self._show(name, table, step)

    def _take_file(self, name: str, path: Path, step: int | None) -> None:
        import wandb

        if path.suffix.lower() in PICTURES:
            self._show(name, wandb.Image(str(path)), step)
            return
        with path.open(encoding="utf-8") as page, _without_pandas():
            self._show(name, wandb.Html(page, inject=False), step)  # without wandb's style sheet

    def _show(self, name: str, shown: Any, step: int | None) -> None:
        self.run.log({**({} if step is None else {"step": step}), name: shown})

    def _close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        try:
            self.run.summary.update(dict(summary))
        finally:
            self.run.finish(exit_code=exit_code)


@contextmanager
def _without_pandas() -> Iterator[None]:
    """Keeps wandb from importing pandas only to see that rows are no DataFrame, which takes half as long as torch."""
    from wandb import util

    before = getattr(util, "pd_available", False)
    util.pd_available = before and "pandas" in sys.modules
    try:
        yield
    finally:
        util.pd_available = before


@contextmanager
def _without_launch() -> Iterator[None]:
    """Keeps ``wandb.init`` from importing wandb's launch, which takes as long as half of torch.

    It asks there for inputs of a launch job. Only code that has imported launch can have declared some.
    """
    name = "wandb.sdk.launch.inputs.internal"
    if name in sys.modules:
        yield
        return
    substitute = sys.modules[name] = ModuleType(name)
    substitute.StagedLaunchInputs = lambda: SimpleNamespace(apply=lambda run: None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if sys.modules.get(name) is substitute:
            del sys.modules[name]


def _keep_every_row(run: Any, wandb: Any) -> None:
    """Makes ``wandb.log(row, step=n)`` of the user's code a row of its own, with n in the column ``step``, its axis.

    wandb drops rows whose step is below its own counter, which each row without a step advances, ours too.
    """
    log, drawn = run.log, set[str]()

    @wraps(log)
    def log_row(data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if step is None:
            log(data, commit=commit)
            return
        for name in data.keys() - drawn - {"step"}:
            drawn.add(name)
            with suppress(Exception):  # a name that is no metric's keeps wandb's own axis
                run.define_metric(name, step_metric="step")
        log({"step": step, **data})

    run.log = wandb.log = log_row


def import_wandb() -> Any:
    """Returns wandb, which then prints nothing."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    return wandb


def open_run(
    folder: Path,
    *,
    mode: str,
    project: str,
    entity: str | None,
    group: str | None,
    name: str,
    tags: Sequence[str] = (),
    run_id: str | None,
    config: Mapping[str, Any],
    on_lost: Callable[[str], None] = lambda message: None,
) -> WandbSink:
    """Opens a run in ``folder``; falls back to offline if wandb can't be reached.

    Args:
        mode: online or offline.
        run_id: id of the run to continue; None = a new one.
        on_lost: called once with the reason if wandb can't be reached or written. The run continues.

    Raises:
        Exception: wandb can't even be started offline.
    """
    wandb = import_wandb()
    if mode == "offline":
        with suppress(ImportError, AttributeError):  # another version
            from wandb.analytics.opentelemetry import opentelemetry_proxy

            opentelemetry_proxy.disable()  # what it imports to send nothing takes as long as a tenth of torch
    settings = wandb.Settings(x_disable_stats=True, init_timeout=_INIT_TIMEOUT_S, console="off", silent=True)
    if hasattr(settings, "x_transaction_log_flush_interval"):  # missing before 0.31
        settings.x_transaction_log_flush_interval = _FLUSH_S
    start = partial(
        wandb.init,
        settings=settings,
        project=project,
        entity=entity,
        group=group and hidden(group),
        name=hidden(name),
        tags=[hidden(tag) for tag in tags] or None,
        id=run_id,
        dir=str(folder),
        config=dict(config),
        resume="allow" if run_id else None,
        reinit="finish_previous",
    )
    typed = sys.argv
    sys.argv = [*typed[:1], *map(masked_override, typed[1:])]  # wandb records the command line
    try:
        with _without_launch():
            try:
                run = start(mode=mode)
            except Exception as error:
                if mode != "online":
                    raise
                reason, mode = first_line(error), "offline"
                _LOG.warning("wandb can't be reached (%s); going on offline.", reason)
                on_lost(reason)
                run = start(mode=mode)
    finally:
        sys.argv = typed
    for axis, patterns in _AXES.items():
        run.define_metric(axis, hidden=True)  # hides the curve of the axis itself
        for pattern in patterns:
            run.define_metric(pattern, step_metric=axis)
    _keep_every_row(run, wandb)
    return WandbSink(run, mode, on_lost)
