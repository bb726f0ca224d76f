"""RunRecord: the versioned ``run.json`` that a run leaves, written for readers that never saw the run.

Plain data, standard library only. `RunRecord` is changed by the run that owns it and replaced on disk as a whole;
`read` is for everybody else and turns a ``running`` record of a dead process into ``killed``.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

SCHEMA = 1
FILE_NAME = "run.json"

Status = Literal["running", "ok", "oom", "failed", "killed", "timeout", "interrupted", "invalid", "infeasible"]


@dataclass
class RunRecord:
    """Keys are a contract with reports, sweeps, benchmarks and users' scripts: see docs/record.md for each."""

    run_id: str
    schema: int = SCHEMA
    status: Status = "running"
    error: dict[str, Any] | None = None
    exit_code: int | None = None
    started_at: str = ""
    duration_s: float = 0.0
    seed: int | None = None
    resumed_from: str | None = None
    pid: int = 0
    host_name: str = ""
    boot_id: str = ""
    git: dict[str, Any] | None = None
    wandb: dict[str, Any] | None = None
    workload: str = ""
    overrides: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    epochs: float = 0
    samples: int = 0
    machine: dict[str, Any] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, dict[str, Any]] = field(default_factory=dict)
    throughput: dict[str, Any] | None = None
    ceiling: dict[str, Any] | None = None
    readiness_frac: float | None = None
    time: dict[str, Any] | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    gpus: dict[str, Any] = field(default_factory=dict)
    telemetry: dict[str, Any] | None = None
    swing: dict[str, Any] | None = None
    findings: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def start(cls, run_id: str) -> RunRecord:
        """A record of a run that begins now in this process."""
        return cls(
            run_id=run_id,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            pid=os.getpid(),
            host_name=socket.gethostname(),
            boot_id=boot_id(),
        )

    def to_json(self) -> str:
        """Strict JSON: what is not a finite number is null."""
        return json.dumps(plain(asdict(self)), indent=1, allow_nan=False) + "\n"

    def write(self, folder: Path) -> None:
        """Replace ``run.json`` in ``folder`` as a whole; a reader sees the old or the new one.

        Raises:
            OSError: the folder can't be written; the old record is still there.
        """
        write_atomically(folder / FILE_NAME, self.to_json())


def write_atomically(path: Path, text: str) -> None:
    """Write beside the target, flush to disk, rename over it. Leaves no temporary file behind on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:  # a signal's too
        temporary.unlink(missing_ok=True)
        raise


def read(folder: Path) -> dict[str, Any]:
    """The record of a run folder as plain data; ``running`` with a dead process on this host reads as ``killed``.

    Raises:
        OSError: there is no readable record.
        ValueError: the file is not a record of a schema this version knows.
    """
    path = folder / FILE_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as cause:
        raise ValueError(f"{path} is not a run record: {cause}") from cause
    if not isinstance(record, dict) or "schema" not in record:
        raise ValueError(f"{path} is not a run record: it has no key 'schema'.")
    if record["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {record['schema']}; this version of wellfed reads schema {SCHEMA}.")
    if record.get("status") == "running" and not is_alive(record):
        record["status"] = "killed"
    return record


def is_alive(record: Mapping[str, Any]) -> bool:
    """Whether the process of a running record may still be there. Unknown (another host) counts as alive."""
    if record.get("host_name") != socket.gethostname():
        return True
    if record.get("boot_id") != boot_id():
        return False
    pid = int(record.get("pid") or 0)
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # not ours, but there
        return True
    return True


def boot_id() -> str:
    """Identifies one boot of this machine, so that a process id from before a restart is not taken for a live one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def git_state(folder: Path) -> dict[str, Any] | None:
    """``{commit, dirty, diff}`` of the checkout that holds ``folder``; None outside one or without git.

    ``diff`` is the uncommitted change against HEAD, cut at 200,000 characters.
    """

    def git(*arguments: str) -> str:
        # Optional locks off: reading the state must not disturb a git command of the user's.
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            check=True,
            env=environment,
        )
        return done.stdout

    try:
        commit = git("rev-parse", "HEAD").strip()
        diff = git("diff", "HEAD", "--no-color", "--no-ext-diff")
        untracked = git("ls-files", "--others", "--exclude-standard", ":/")  # of the whole checkout, as diff
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(diff.strip() or untracked.strip()), "diff": diff[:200_000]}


def plain(value: Any) -> Any:
    """The value with everything JSON can't hold turned into what it means."""
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, numbers.Integral):  # numpy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)
