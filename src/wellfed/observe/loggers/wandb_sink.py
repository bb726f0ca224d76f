"""Sends metrics to wandb: offline unless logged in or requested. The only file that uses wandb directly."""

from __future__ import annotations

import logging
import netrc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from wellfed.masking import hidden, masked_override
from wellfed.observe.loggers.sink import PICTURES, GuardedSink
from wellfed.observe.telemetry.metrics import TIME_AXIS

_LOG = logging.getLogger(__name__)
_INIT_TIMEOUT_S = 30
_SLOW_S = 5.0
_FLUSH_S = 0.1
"""Maximum seconds that wandb buffers rows. With its default, a killed run loses 15 s (wandb PR 12742)."""
_AXES = {
    "step": ("train/*", "val/*", "test/*", "step/*", "throughput/*", "epoch"),
    TIME_AXIS: ("gpu*", "host/*", "node*"),
}
"""Axis of each group of metrics. wandb takes ``*`` at the end only."""
# wandb 0.31 treats these as one deployment; `wandb login` may have written either (sdk/lib/urls.py).
_CLOUD_HOSTS = frozenset({"api.wandb.ai", "api.forge.coreweave.com", "forge.coreweave.com"})


def is_logged_in(environ: Mapping[str, str] | None = None, home: Path | None = None) -> bool:
    """Returns whether wandb 0.31 would find a key, without importing it."""
    environ = os.environ if environ is None else environ
    home = Path.home() if home is None else home
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    wanted = _CLOUD_HOSTS if host in _CLOUD_HOSTS else {host}
    named = environ.get("NETRC")
    for path in [Path(named).expanduser()] if named else [home / ".netrc", home / "_netrc"]:
        try:
            # wandb ignores `default` entries
            return not wanted.isdisjoint(netrc.netrc(str(path)).hosts)
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError):
            return False  # wandb warns and continues without the file
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

        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self.run.log({**_at(step), name: table})

    def _take_file(self, name: str, path: Path, step: int | None) -> None:
        import wandb

        if path.suffix.lower() in PICTURES:
            self.run.log({**_at(step), name: wandb.Image(str(path))})
            return
        with path.open(encoding="utf-8") as page:
            self.run.log({**_at(step), name: wandb.Html(page, inject=False)})  # without wandb's style sheet

    def _close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        try:
            with _warning_if_slow("wandb has not taken all figures yet"):
                try:
                    self.run.summary.update(dict(summary))
                finally:
                    self.run.finish(exit_code=exit_code)
        except Exception:
            _forget_service(exit_code)
            raise


def _at(step: int | None) -> dict[str, int]:
    """Returns the axis of a row."""
    return {} if step is None else {"step": step}


@contextmanager
def _warning_if_slow(what: str) -> Iterator[None]:
    """Logs a warning if the block takes more than `_SLOW_S`."""
    timer = threading.Timer(_SLOW_S, _LOG.warning, ("%s; waiting for it.", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _forget_service(exit_code: int) -> None:
    """Closes a dead service. Otherwise wandb would raise at the end of the process."""
    import wandb

    with suppress(Exception):
        wandb.teardown(exit_code)


@contextmanager
def _without_launch() -> Iterator[None]:
    """Keeps ``wandb.init`` from importing wandb's launch, which takes .4 s of CPU time.

    It looks there for inputs of a launch job, which only code that has imported launch can have declared. The
    substitute is gone before the run is handed out.
    """
    name = "wandb.sdk.launch.inputs.internal"
    if name in sys.modules:
        yield
        return
    substitute = sys.modules[name] = ModuleType(name)
    substitute.StagedLaunchInputs = _NoInputs  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if sys.modules.get(name) is substitute:
            del sys.modules[name]


def _send_nothing() -> None:
    """Keeps wandb's telemetry of its own use out of this process, whose imports take .2 s of CPU time.

    wandb leaves it out of offline runs itself, except for what it records before it knows the mode of the run.
    """
    with suppress(ImportError, AttributeError):  # another version
        from wandb.analytics.opentelemetry import opentelemetry_proxy

        opentelemetry_proxy.disable()


class _NoInputs:
    def apply(self, run: Any) -> None:
        """Does nothing: no inputs were declared."""


def import_wandb(mode: str) -> Any:
    """Returns wandb, imported for runs of this mode."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    if mode == "offline":
        _send_nothing()
    return wandb


def start_service(mode: str) -> threading.Thread:
    """Starts wandb's service in a thread, which takes .2 s. `open_run` tries again if that fails.

    Raises what importing wandb raises.
    """
    thread = threading.Thread(target=_quietly, args=(import_wandb(mode).setup,), name="wandb-start")
    thread.start()
    return thread


def _quietly(call: Callable[[], Any]) -> None:
    with suppress(Exception):
        call()


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
    service: threading.Thread | None = None,
) -> WandbSink:
    """Opens a run in ``folder``; falls back to offline if wandb can't be reached.

    Args:
        mode: online or offline.
        run_id: id of the run to continue; None = a new one.
        on_lost: called once with the reason if wandb can't be reached or written. The run continues.
        service: result of `start_service`; None = it starts now.

    Raises:
        RuntimeError: wandb can't even be started offline.
    """
    wandb = import_wandb(mode)
    settings = wandb.Settings(x_disable_stats=True, init_timeout=_INIT_TIMEOUT_S, console="off", silent=True)
    if hasattr(settings, "x_transaction_log_flush_interval"):  # missing before 0.31
        settings.x_transaction_log_flush_interval = _FLUSH_S

    def start(mode: Any) -> Any:
        typed, sys.argv = (
            sys.argv,
            [*sys.argv[:1], *map(masked_override, sys.argv[1:])],
        )  # wandb records the command line
        try:
            with _without_launch():
                return init(mode)
        finally:
            sys.argv = typed

    def init(mode: Any) -> Any:
        return wandb.init(
            settings=settings,
            mode=mode,
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

    try:
        try:
            with _warning_if_slow(f"wandb does not answer yet (it has {_INIT_TIMEOUT_S} s)"):
                if service is not None:
                    service.join()
                run = start(mode)
        except Exception as error:
            if mode != "online":
                raise
            reason, mode = str(error).splitlines()[0], "offline"
            _LOG.warning("wandb can't be reached (%s); going on offline.", reason)
            on_lost(reason)
            _send_nothing()
            run = start(mode)
    except Exception as error:
        raise RuntimeError(f"wandb can't be started: {error}") from error
    for axis, patterns in _AXES.items():
        run.define_metric(axis, hidden=True)  # hides the curve of the axis itself
        for pattern in patterns:
            run.define_metric(pattern, step_metric=axis)
    return WandbSink(run, mode, on_lost)
