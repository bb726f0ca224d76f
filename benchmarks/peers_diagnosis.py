"""Why is a training slow? `wellfed watch` and TraceML on the same scripts, with the same planted faults, in turns.

    python benchmarks/peers_diagnosis.py [--only prints fed] [--scripts plain] [--out RECORD]
    python benchmarks/peers_diagnosis.py --cost [--rounds 5] [--out RECORD]
    python benchmarks/peers_diagnosis.py --examples [--out RECORD]

Each also with `--gpu`, on the GPU that is there.

Each fault of `peers/planted.py` is planted in a plain PyTorch script and in a Lightning script. Both tools run each of
them; the one that comes first changes from run to run. The plain script has the two lines that TraceML needs in a loop
of one's own; `wellfed watch` and Lightning need none. A verdict is right if its kind of bottleneck is one of those
written down for the fault, see `peers/planted.py`. That is all that TraceML's verdict says, so no more is asked of
either. Whether ours names the cause as well is a column of its own.

- `wellfed watch`: the first finding, without the remark that other programs used the machine. If it accuses nothing,
  the kind is `compute` where the shares it shows have 90 % compute, which is what TraceML's COMPUTE-BOUND means.
- TraceML: `primary_diagnosis` of its `final_summary.json`.
- A healthy script is accused by a finding of ours that names a cause, and by a kind of TraceML's other than `compute`.
- What a verdict says to type is followed in the plain script: trainings with and without it, in turns in one process.
  Samples/s after over before, one a pair. Advice in words (TraceML's, and ours without a setting) can't be typed.
- `--cost`: microseconds a step of a loop of small steps, each kind in a process of its own, in turns, minus those of
  the loop alone in the same round: of the training thread's CPU, of the process's CPU, and of the wall.
- `--examples`: both on three scripts in the manner of nanoGPT, torchvision's references, and transformers.

TraceML gets a virtual environment of its own (`--traceml-env`), which sees the packages of this one, so that both run
the same torch. Without `--gpu` no script sees a GPU, so that there are no copies and no launches. The faults of
simulated cards (tests/fake_cuda) run under ours alone, and are no comparison. With `--gpu`, both tools get faults of
the real one instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "peers")]

from parts import Settings, changed  # noqa: E402
from planted import (  # noqa: E402
    ALL,
    COMPUTE,
    COMPUTES_FRAC,
    FAULTS,
    HEALTHY,
    INPUT,
    NONE,
    ON_GPU,
    OURS,
    SIMULATED,
    THEIRS,
    Fault,
)

from benchmarks.measuring import finish, turned  # noqa: E402
from wellfed.record import RunRecord  # noqa: E402

PEERS = ROOT / "benchmarks" / "peers"
SCRIPTS = {"plain": PEERS / "plain_script.py", "lightning": PEERS / "lightning_script.py"}
EXAMPLES = ("nanogpt_style", "torchvision_style", "transformers_style")
TRACEML = "0.5.0"
PAGE = ROOT / "docs" / "peers.md"
PAGE_BEGIN = """# Does wellfed watch find more than TraceML?

`benchmarks/peers_diagnosis.py` plants 24 faults in a plain PyTorch script and in a Lightning script, and runs
`wellfed watch` and [TraceML](https://pypi.org/project/traceml-ai/) on each, in turns. A verdict is right if it names
the kind of bottleneck:

| kind | means |
|---|---|
| `input` | steps wait for data |
| `copy` | steps wait for copies to the device |
| `between` | time passes outside of the passes and the optimizer |
| `compute` | the passes and the optimizer take the time |
| `start` | the first steps take it |
| `none` | nothing is wrong |

`benchmarks/peers/planted.py` lists the kinds that are right for each fault, for both tools alike. The name of the cause
is not judged, since TraceML names none. TraceML has no verdict on the start of a script.

The plain script has the two lines that TraceML needs in a loop of one's own. Our remark that other programs used the
machine (`busy_machine`) is no verdict on a script, and is left out. Without a GPU, faults of copies and launches are
those of simulated cards, run under `wellfed watch` alone. On a GPU, both tools get three further scripts, and eight
workers are too many for 2 cores alone. Scripts that share a GPU wait for one another's kernels and copies, which both
tools see. So a verdict that accuses a healthy one may be true there.

Gains are samples/s with what our verdict says to type over those without it: median (lowest-highest) of 3 pairs of
trainings. TraceML's advice is in words, so there is nothing to type.
"""
TIMEOUT_S, PAIRS = 300, 3
SAID = 300
"""Characters of a verdict's text that a record keeps."""
OLDER = ("2026-11-26_peers_diagnosis_cpu.json", "2026-11-26_peers_diagnosis_gpu.json")
"""Records from before `contended_loading` was found in scripts."""
ON_MACHINE = ("busy_machine", "machine_was_slower")
"""Our remarks on the machine, which are no verdict on the script."""


@dataclass
class Verdict:
    """Verdict of one tool on one script."""

    fault: str
    script: str
    tool: str
    kind: str
    """Kind of bottleneck; empty if the tool came to no verdict."""
    is_right: bool
    id: str
    """The tool's own name for it."""
    says: str
    advice: str
    """Suggested change, if there is something to type."""
    names_cause: bool = False
    others_cores: float | None = None
    """Cores that other programs used, by our readings."""
    wall_s: float = 0.0
    gains: list[float] = field(default_factory=list)
    """Samples/s with the advice over those without it, one a pair of trainings."""


def our_kind(
    findings: Sequence[Mapping[str, Any]], time_: Mapping[str, Any] | None
) -> tuple[str, Mapping[str, Any] | None]:
    """Returns the kind of bottleneck, and the first finding that is about the script."""
    first = next((one for one in findings if one["id"] not in ON_MACHINE), None)
    if first is not None and first["id"] == "unexplained" and "wait_frac" in first["evidence"]:
        return INPUT, first
    if first is not None and first["id"] in OURS:
        return OURS[first["id"]], first
    is_compute = time_ is not None and time_["compute_frac"] >= COMPUTES_FRAC
    return (COMPUTE if is_compute else NONE), first


class Machine:
    """Runs scripts under either tool, below a folder; a run that leaves no verdict is one with an empty kind."""

    def __init__(self, folder: Path, traceml: Path, *, has_gpu: bool = False) -> None:
        self._folder, self.traceml = folder, traceml
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        self._variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **({} if has_gpu else {"CUDA_VISIBLE_DEVICES": ""}),
        }

    def run(self, tool: str, fault: Fault, name: str, script: Path, words: Sequence[str]) -> Verdict:
        """Runs a script under a tool, and returns its verdict."""
        place = self.place(f"{tool}_{name}_{fault.name}")
        began_s = time.perf_counter()
        found = (
            self._ours(place, fault, script, words) if tool == "wellfed" else self._theirs(place, script, words, name)
        )
        kind, identity, says, advice, more = found
        is_right = kind in fault.kinds
        if _is_healthy(fault):
            is_right = bool(kind) and not _accuses(tool, kind, identity)
        verdict = Verdict(fault.name, name, tool, kind, is_right, identity, says, advice, **more)
        verdict.wall_s = time.perf_counter() - began_s
        shutil.rmtree(place, ignore_errors=True)
        return verdict

    def place(self, name: str) -> Path:
        """Returns a new folder."""
        return Path(tempfile.mkdtemp(prefix=f"{name}_", dir=self._folder))

    def ended(self, command: Sequence[str | Path], place: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in a folder."""
        words, env = [*map(str, command)], {**self._variables, **variables}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(words, cwd=place, env=env, errors="replace", start_new_session=True, **pipes) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return subprocess.CompletedProcess(words, 124, "", f"not ended after {TIMEOUT_S} s")
            finally:
                with suppress(ProcessLookupError):  # none is left of those that the tool started
                    os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def _ours(self, place: Path, fault: Fault, script: Path, words: Sequence[str]) -> tuple[Any, ...]:
        command: list[str | Path] = [sys.executable, "-m", "wellfed", "watch", script, *words]
        done = self.ended(command, place, **_card(fault, place))
        folders = [*place.glob("logs/watch/runs/*")]
        if done.returncode or not folders:
            return "", f"exit code {done.returncode}", done.stderr[-400:], "", {}
        record = RunRecord.read(folders[0])
        kind, one = our_kind(record.findings, record.time)
        ids = [each["id"] for each in record.findings]
        others = next(
            (each["evidence"].get("others_cores") for each in record.findings if each["id"] in ON_MACHINE), None
        )
        more = {"names_cause": bool(set(ids) & set(fault.causes)), "others_cores": others}
        if one is None:
            return kind, ids[0] if ids else "", record.findings[0]["text"] if ids else "", "", more
        return kind, one["id"], one["text"], "; ".join(one["change"]), more

    def _theirs(self, place: Path, script: Path, words: Sequence[str], name: str) -> tuple[Any, ...]:
        command: list[str | Path] = [
            *(self.traceml, "run", script, "--logs-dir", place / "logs", "--run-name", "run"),
            *("--aggregator-port", str(free_port()), "--master-port", str(free_port())),
            *("--args", *words, *(["--traceml"] if name not in ("lightning", "transformers_style") else [])),
        ]
        done = self.ended(command, place)
        summary = place / "logs" / "run" / "final_summary.json"
        if done.returncode or not summary.exists():
            return "", f"exit code {done.returncode}", (done.stderr or done.stdout)[-400:], "", {}
        said = json.loads(summary.read_text())["primary_diagnosis"]
        kind = THEIRS.get(said["kind"], "" if said["kind"].startswith("INSUFFICIENT") else NONE)
        return kind, said["kind"], f"{said['summary']} {said['action']}", "", {}

    def gains(self, fault: Fault, advice: str) -> list[float]:
        """Returns the gain of typed advice in the plain script, one a pair of trainings."""
        place = self.place(f"gain_{fault.name}")
        words = ["--fault", fault.name, "--change", advice, "--turns", str(PAIRS)]
        done = self.ended([sys.executable, SCRIPTS["plain"], *words], place)
        shutil.rmtree(place, ignore_errors=True)
        if done.returncode:
            print(f"{fault.name}: the advice could not be followed: {done.stderr[-400:]}", flush=True)
            return []
        return [after / before for before, after in json.loads(done.stdout.splitlines()[-1])["pairs"]]


def _card(fault: Fault, place: Path) -> Mapping[str, str]:
    """Returns the variables of a simulated card, if the fault needs one."""
    if fault.card is None:
        return {}
    from tests.fake_cuda.machine import Cards, compile_driver, machine_environment
    from tests.fake_nvml.driver import FakeDriver

    compile_driver()
    card = {"mib": 2048, "slowdown": 3.0, **fault.card}
    found = dict(machine_environment(FakeDriver(Path("cc"), place), place, Cards(**card)))
    found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(ROOT / "src")])
    found["CUDA_VISIBLE_DEVICES"] = "0"
    return found


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def traceml_in(folder: Path) -> Path:
    """Returns TraceML's command in an environment of its own, made if it is not there. It sees our packages, whose
    torch both use."""
    command = folder / "bin" / "traceml"
    if command.exists():
        return command
    venv.EnvBuilder(with_pip=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages_beside.pth").write_text("\n".join(ours) + "\n")
    words = ["-m", "pip", "install", "--quiet", f"traceml-ai=={TRACEML}"]
    subprocess.run([str(folder / "bin" / "python"), *words], check=True)
    return command


def compare(
    machine: Machine, names: Sequence[str], scripts: Sequence[str], *, jobs: int, until_s: float
) -> list[Verdict]:
    """Returns the verdicts of both tools on all scripts, in turns."""
    cases = [(ALL[name], script) for name in names for script in scripts]

    def of_case(number: int) -> list[Verdict]:
        fault, script = cases[number]
        if time.monotonic() > until_s:
            return []
        turn = number + number // len(scripts)  # each script begins with either tool
        tools = ["wellfed"] if fault.card is not None else turned(["wellfed", "traceml"], turn)
        found = [machine.run(tool, fault, script, SCRIPTS[script], ["--fault", fault.name]) for tool in tools]
        for verdict in found:
            show(verdict)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return [verdict for found in pool.map(of_case, range(len(cases))) for verdict in found]


def follow(machine: Machine, verdicts: Sequence[Verdict], until_s: float) -> None:
    """Adds what typed advice won in the plain script, one training after the other."""
    for verdict in verdicts:
        fault = ALL[verdict.fault]
        settings = Settings(**fault.settings)
        is_typed = bool(verdict.advice) and changed(settings, verdict.advice) != settings
        if verdict.script == "plain" and is_typed and fault.card is None and time.monotonic() < until_s:
            verdict.gains = machine.gains(fault, verdict.advice)
            show(verdict)


def show(verdict: Verdict) -> None:
    """Prints a verdict as it comes."""
    sign = ("right" if verdict.is_right else "WRONG") if verdict.fault else ""
    gains = f", gain {statistics.median(verdict.gains):.2f}" if verdict.gains else ""
    print(f"{verdict.fault:24} {verdict.script:9} {verdict.tool:8} {sign} {verdict.kind or '-':8} {verdict.id}{gains}")
    print(f"    {verdict.says[:240]} {verdict.advice}", flush=True)


def _is_healthy(fault: Fault) -> bool:
    return fault.says.startswith("no fault")


def _accuses(tool: str, kind: str, identity: str) -> bool:
    if tool == "wellfed":
        return identity in OURS or kind == INPUT
    return kind not in ("", NONE, COMPUTE)


def by_kind(verdicts: Sequence[Verdict]) -> dict[str, dict[str, Any]]:
    """Returns how many verdicts were right, by kind of fault, script and tool, for the faults that both were given."""
    found: dict[str, dict[str, Any]] = {}
    for one in verdicts:
        fault = ALL[one.fault]
        if fault.card is None:
            group = "healthy" if _is_healthy(fault) else fault.kinds[0]
            row = found.setdefault(group, {})
            right, number = row.get(f"{one.tool}_{one.script}", (0, 0))
            row[f"{one.tool}_{one.script}"] = (right + one.is_right, number + 1)
    return found


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Returns the figures that the whole is held to."""
    found: dict[str, Any] = {}
    for tool in ("wellfed", "traceml"):
        of_tool = [one for one in verdicts if one.tool == tool and ALL[one.fault].card is None]
        healthy = [one for one in of_tool if _is_healthy(ALL[one.fault])]
        accused = [one for one in healthy if _accuses(tool, one.kind, one.id)]
        planted = [one for one in of_tool if one not in healthy]
        found[f"{tool}_right"], found[f"{tool}_planted"] = sum(one.is_right for one in planted), len(planted)
        found[f"{tool}_typed"] = sum(bool(one.advice) for one in planted)
        found[f"{tool}_accused"], found[f"{tool}_healthy"] = len(accused), len(healthy)
        found[f"{tool}_without_verdict"] = sum(not one.kind for one in of_tool)
    found["wellfed_cause_named"] = sum(
        one.names_cause for one in verdicts if ALL[one.fault].card is None and not _is_healthy(ALL[one.fault])
    )
    kinds = by_kind(verdicts)
    found["kinds_below_traceml"] = sorted(
        f"{kind} {script}"
        for kind, row in kinds.items()
        for script in SCRIPTS
        if row.get(f"wellfed_{script}", (0, 0))[0] < row.get(f"traceml_{script}", (0, 0))[0]
    )
    simulated = [one for one in verdicts if ALL[one.fault].card is not None]
    found["wellfed_simulated_right"], found["wellfed_simulated"] = (
        sum(one.is_right for one in simulated),
        len(simulated),
    )
    return found


def sentence(found: Mapping[str, Any]) -> str:
    """Returns the summary in words."""
    said = " ".join(
        f"{name} named the kind of bottleneck in {found[f'{tool}_right']} of {found[f'{tool}_planted']} scripts with a "
        f"fault. It accused {found[f'{tool}_accused']} of {found[f'{tool}_healthy']} healthy ones"
        + (f", and gave no verdict on {left}." if (left := found[f"{tool}_without_verdict"]) else ".")
        for tool, name in (("wellfed", "`wellfed watch`"), ("traceml", f"TraceML {TRACEML}"))
    )
    below = ", ".join(found["kinds_below_traceml"]) or "none"
    return f"{said} Kinds in which ours was right less often: {below}."


def cost(machine: Machine, rounds: int, steps: int) -> tuple[list[dict[str, Any]], str]:
    """Returns the cost a step of each way to watch, over the loop alone in the same round."""
    script, taken = PEERS / "cost_script.py", dict[str, list[dict[str, float]]]()
    commands: dict[str, list[Any]] = {
        "alone": [sys.executable, script, "--mode", "alone"],
        "step clock": [sys.executable, script, "--mode", "clock"],
        "wellfed watch": [sys.executable, "-m", "wellfed", "watch", script, "--mode", "alone"],
        "TraceML auto": ["auto"],
        "TraceML manual": ["manual"],
    }
    for number in range(rounds + 1):
        for name in turned(commands, number):
            place = machine.place(name.replace(" ", "_"))
            command = commands[name]
            if name.startswith("TraceML"):
                ports = ["--aggregator-port", free_port(), "--master-port", free_port()]
                run = [machine.traceml, "run", script, "--logs-dir", place / "logs", "--run-name", "run", *ports]
                command = [*run, "--args", "--mode", *command]
            done = machine.ended([*command, "--steps", str(steps), "--out", place / "cost.json"], place)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr[-1000:]}")
            if number:
                taken.setdefault(name, []).append(json.loads((place / "cost.json").read_text()))
            shutil.rmtree(place, ignore_errors=True)
    results = []
    for name, rows in taken.items():
        row: dict[str, Any] = {"watch": name, "n": len(rows)}
        for clock in rows[0]:
            alone = [one[clock] for one in taken["alone"]]
            values = [one[clock] - (0.0 if name == "alone" else a) for one, a in zip(rows, alone, strict=True)]
            key = clock if name == "alone" else f"extra_{clock}"
            row[key] = [statistics.median(values), min(values), max(values)]
        results.append(row)
        print(json.dumps(row), flush=True)
    extra = [f"{row['watch']} {row['extra_thread_us'][0]:.0f} us" for row in results if row["watch"] != "alone"]
    return results, f"CPU time of the training thread added a step, median of {rounds}: {', '.join(extra)}."


def examples(machine: Machine) -> list[Verdict]:
    """Returns both verdicts on the scripts in the manner of others."""
    found, none = [], Fault("", "", ())
    for number, name in enumerate(EXAMPLES):
        for tool in turned(["wellfed", "traceml"], number):
            found.append(machine.run(tool, none, name, PEERS / f"{name}.py", []))
            show(found[-1])
    return found


def newest(theme: str) -> dict[str, Any] | None:
    """Returns the newest record of ``peers_<theme>``; the theme ends with ``_cpu`` or ``_gpu``."""
    found = sorted((ROOT / "benchmarks" / "records").glob(f"*_peers_{theme}.json"))
    return json.loads(found[-1].read_text()) | {"file": found[-1].name} if found else None


def page() -> str:
    """Returns `docs/peers.md`, made from the newest records."""
    text = PAGE_BEGIN
    sections = {"diagnosis": _verdicts, "cost": _costs, "examples": _examples}
    for theme, section in sections.items():
        for where in ("cpu", "gpu"):
            record = newest(f"{theme}_{where}")
            if record is None:
                continue
            machine = record["machine"]
            on = f"{machine['cpu_quota_cores']:g} cores of {machine['cpu']}"
            if where == "gpu":
                on += f" with an {machine['gpus'][0]['name']}"
            if theme != "cost" and (jobs := record["config"]["jobs"]) > 1:
                on += f", which {jobs} scripts shared at a time"
            on += f", beside {record['config']['beside']}" if "beside" in record["config"] else ""
            made = f"`{record['command']}`, {record['date']}, on {on}; record `benchmarks/records/{record['file']}`."
            text += f"\n{section(record)}\n{made}\n".replace("\n\n", f"{'' if where == 'cpu' else ', on a GPU'}\n\n", 1)
    return text


def _verdicts(record: Mapping[str, Any]) -> str:
    said = sentence(record["summary"])
    rows = [
        "| script with | right | ours, plain | ours, Lightning | TraceML, plain | TraceML, Lightning | typed, gain |"
    ]
    rows.append("|" + "---|" * 7)
    for expected in record["expected"]:
        of_fault = {(one["tool"], one["script"]): one for one in record["results"] if one["fault"] == expected["fault"]}
        if not of_fault:
            continue
        cells = []
        for key in (("wellfed", "plain"), ("wellfed", "lightning"), ("traceml", "plain"), ("traceml", "lightning")):
            one = of_fault.get(key)
            cells.append("" if one is None else f"{one['id']}{'' if one['is_right'] else ' **wrong**'}")
        ours = of_fault.get(("wellfed", "plain"), {})
        gain = f" {ours['gains'][0]:.2f} ({ours['gains'][1]:.2f}-{ours['gains'][2]:.2f})" if ours.get("gains") else ""
        typed = f"`{ours['advice']}`{gain}" if ours.get("advice") else ""
        says = expected["says"] + (", on a simulated card" if expected.get("simulated") else "")
        rows.append(f"| {says} | {', '.join(expected['right'])} | {' | '.join(cells)} | {typed} |")
    ours = [one for one in record["results"] if one["tool"] == "wellfed"]
    if busy := sum(bool(one.get("others_cores")) for one in ours):
        said += f" Other programs used the machine during {busy} of {len(ours)} runs of ours."
    gains = [one["gains"][0] for one in ours if one.get("gains")]
    if slower := [f"{gain:.2f}" for gain in gains if gain < 1]:
        said += f" {len(slower)} of the {len(gains)} settings whose gain was measured made the script slower: "
        said += f"{' and '.join(slower)} times its rate."
    if record["file"] in OLDER:
        said += " This record is older than a mend: workers that wait for a shared lock are now named "
        said += "(`contended_loading`), and more of them are not advised. The scripts have not been run again."
    left = f"\n\nNot run yet: {', '.join(record['not_run'])}." if record["not_run"] else ""
    return "## Planted faults\n\n" + "\n".join(rows) + f"\n\n{said}{left}\n"


def _costs(record: Mapping[str, Any]) -> str:
    rows = ["| watched by | CPU of the training thread | CPU of the process | wall |", "|---|---|---|---|"]
    for row in record["results"]:
        if row["watch"] != "alone":
            figures = [row[f"extra_{clock}"] for clock in ("thread_us", "process_us", "wall_us")]
            cells = [f"{middle:.0f} ({low:.0f} to {high:.0f})" for middle, low, high in figures]
            rows.append(f"| {row['watch']} | {' | '.join(cells)} |")
    begin = "## Cost\n\nMicroseconds a step beyond the loop alone in the same round: median (lowest to highest) of "
    return f"{begin}{record['n']} rounds.\n\n" + "\n".join(rows) + "\n"


def shown(said: str) -> str:
    """Returns a tool's text as one line, without lines that hold a path, and cut at a sentence if a record cut it."""
    text = " ".join(" ".join(line for line in said.splitlines() if not re.search(r"/\S+/", line)).split())
    if len(said) >= SAID and not text.endswith("."):
        whole, found, _ = text.rpartition(". ")
        text = f"{whole}." if found else f"{text.rpartition(' ')[0]} ..."
    return text.replace("|", "\\|")


def _examples(record: Mapping[str, Any]) -> str:
    rows = ["| script | tool | verdict |", "|---|---|---|"]
    rows += [f"| {one['script']} | {one['tool']} | {one['id']}: {shown(one['says'])} |" for one in record["results"]]
    return "## Scripts in the manner of others\n\n" + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ALL, help="faults; default: all of this kind of machine")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=[*SCRIPTS])
    parser.add_argument("--jobs", type=int, default=1, help="scripts at the same time; the cost and gains: one")
    parser.add_argument("--minutes", type=float, default=60.0, help="nothing is begun after that")
    parser.add_argument("--no-gains", action="store_true", help="don't follow the advice")
    parser.add_argument("--cost", action="store_true", help="the cost a step instead")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of --cost")
    parser.add_argument("--steps", type=int, default=4000, help="steps of each loop of --cost")
    parser.add_argument("--examples", action="store_true", help="the scripts in the manner of others instead")
    parser.add_argument("--gpu", action="store_true", help="on the GPU that is there")
    parser.add_argument("--page", action="store_true", help="write docs/peers.md from the newest records")
    parser.add_argument("--traceml-env", type=Path, default=ROOT / "build" / "traceml")
    parser.add_argument("--out", type=Path, help="record to write")
    given = parser.parse_args()
    if given.page:
        PAGE.write_text(page())
        return
    names = given.only or [fault.name for fault in (*FAULTS, *(ON_GPU if given.gpu else SIMULATED), *HEALTHY)]
    traceml = traceml_in(given.traceml_env.absolute())
    config = {
        "traceml": TRACEML,
        "lightning": importlib.metadata.version("lightning"),
        "jobs": given.jobs,
    }
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
        machine = Machine(Path(folder), traceml, has_gpu=given.gpu)
        if given.cost:
            results, says = cost(machine, given.rounds, given.steps)
            finish("cost a step of watching a training", results, says, given.out, config=config, n=given.rounds)
            return
        if given.examples:
            rows = [_row(one) for one in examples(machine)]
            finish("verdicts on scripts in the manner of others", rows, "", given.out, config=config, n=1)
            return
        until_s = time.monotonic() + 60 * given.minutes
        verdicts = compare(machine, names, given.scripts, jobs=given.jobs, until_s=until_s)
        finish_verdicts(verdicts, names, given.out, config)
        if not given.no_gains:
            follow(machine, verdicts, until_s)
            finish_verdicts(verdicts, names, given.out, config)


def finish_verdicts(
    verdicts: Sequence[Verdict], names: Sequence[str], out: Path | None, config: Mapping[str, Any]
) -> None:
    """Prints the summary, and writes the record."""
    found = summary(verdicts)
    expected = [
        {"fault": one.name, "says": one.says, "right": list(one.kinds)} | ({"simulated": True} if one.card else {})
        for one in map(ALL.__getitem__, names)
    ]
    finish(
        "verdicts on planted faults beside TraceML's",
        [_row(one) for one in verdicts],
        sentence(found),
        out,
        config=config,
        n={"verdicts": 1, "gains": PAIRS},
        expected=expected,
        not_run=[name for name in names if not any(one.fault == name for one in verdicts)],
        by_kind=by_kind(verdicts),
        summary=found,
    )


def _row(verdict: Verdict) -> dict[str, Any]:
    row = {key: value for key, value in asdict(verdict).items() if value not in (None, "", [])}
    if verdict.gains:
        row["gains"] = [statistics.median(verdict.gains), min(verdict.gains), max(verdict.gains)]
    row["says"] = verdict.says[:SAID]
    return row


if __name__ == "__main__":
    main()
