"""How long the command line takes to answer before torch is imported, beside Hydra alone on the same configs.

    python benchmarks/startup.py [--runs 7] [--date 2026-11-21] [--whole [--before TREE]]

Each pair is run in turns: the entry script, then a script of a few lines in which Hydra composes the same overrides
over the same ``configs/`` and schema and checks nothing. Wall time of the whole process and its CPU time (which other
processes on the machine disturb less). The first round is dropped.

``--whole`` measures whole commands instead, of one training step each, in turns with the bare imports of torch and
Lightning; ``--before`` names a checkout of an earlier commit, whose commands run in the same turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from write_record import write_record

REPO = Path(__file__).resolve().parents[1]

HYDRA_ALONE = """
import sys
import hydra
from hydra.core.config_store import ConfigStore
from wellfed.config.schema import RunConfig
ConfigStore.instance().store(name="run_schema", node=RunConfig)
@hydra.main(version_base="1.3", config_path={configs!r}, config_name="train")
def main(cfg):
    pass
main()
"""

# name -> (arguments, exit code of ours, arguments of the same composition by Hydra alone)
CASES = {
    "--help": (["--help"], 0, ["--cfg", "job"]),
    "--cfg job": (["--cfg", "job"], 0, ["--cfg", "job"]),
    "typo in an option": (["gpu=42gb"], 2, ["--cfg", "job"]),
    "typo in a knob": (["loader.num_worker=3"], 2, ["--cfg", "job"]),
    "five faults": (["gpu=42gb", "loader.num_worker=3", "seed=x", "lodaer=a", "a=["], 2, ["--cfg", "job"]),
}


ONE_STEP = ["trainer.max_steps=1", "workload.model.text=none"]
"""Without the default workload's GPT-2, whose library takes as long to import as Lightning."""
WHOLE = {
    "one step": [*ONE_STEP, "logger=none"],
    "one step, wandb offline": [*ONE_STEP, "logger=wandb", "logger.mode=offline"],
}
BARE = "bare imports"
VERSIONS = (
    "hydra-core",
    "omegaconf",
    "antlr4-python3-runtime",
    "PyYAML",
    "torch",
    "lightning",
    "torchmetrics",
    "wandb",
)


def timed(command: list[str], folder: Path, expected: int | None, tree: Path = REPO) -> tuple[float, float]:
    """(wall, CPU) seconds of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_at_s = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    wall_s = time.perf_counter() - began_at_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if expected is not None and done.returncode != expected:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stderr.decode()}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = zip(*pairs, strict=True)
    return {
        "wall_s_mean": statistics.mean(wall),
        "wall_s_sd": statistics.stdev(wall),
        "wall_s_min": min(wall),
        "cpu_s_mean": statistics.mean(cpu),
        "cpu_s_sd": statistics.stdev(cpu),
        "cpu_s_min": min(cpu),
    }


def measure(runs: int) -> tuple[list[dict[str, object]], dict[str, object]]:
    results: list[dict[str, object]] = []
    raw: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "alone.py"
        alone.write_text(HYDRA_ALONE.format(configs=str(REPO / "configs")))
        for name, (ours_args, code, alone_args) in CASES.items():
            ours, hydra = [], []
            for _ in range(runs + 1):
                ours.append(timed([sys.executable, str(REPO / "src" / "train.py"), *ours_args], Path(folder), code))
                hydra.append(timed([sys.executable, str(alone), *alone_args], Path(folder), 0))
            pairs = zip(ours[1:], hydra[1:], strict=True)
            ratios = [mine[1] / theirs[1] for mine, theirs in pairs]
            results.append(
                {
                    "case": name,
                    "n": runs,
                    "wellfed": summary(ours[1:]),
                    "hydra_alone": summary(hydra[1:]),
                    "cpu_ratio_median": statistics.median(ratios),
                    "cpu_ratio_max": max(ratios),
                }
            )
            raw[name] = {"wellfed_wall_cpu_s": ours[1:], "hydra_alone_wall_cpu_s": hydra[1:]}
            print(f"{name:<20} {summary(ours[1:])} x{statistics.median(ratios):.2f}")
    return results, raw


def measure_whole(runs: int, earlier: Path | None) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Whole commands of both trees and the bare imports, in turns."""
    trees = {"": REPO} if earlier is None else {"": REPO, "before: ": earlier.resolve()}
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(runs + 1):
            bare = [sys.executable, "-c", "import torch, lightning.pytorch"]
            found.setdefault(BARE, []).append(timed(bare, Path(scratch), 0))
            for which, tree in trees.items():
                for name, words in WHOLE.items():
                    logs = f"paths.log_dir={scratch}/{number}"
                    command = [sys.executable, str(tree / "src" / "train.py"), *words, logs]
                    found.setdefault(which + name, []).append(timed(command, tree, 0, tree))
            print(number, {name: pairs[-1] for name, pairs in found.items()}, flush=True)
    results: list[dict[str, object]] = [
        {
            "case": name,
            "n": runs,
            **summary(pairs[1:]),
            "cpu_s_over_bare_median": statistics.median(
                mine[1] - bare[1] for mine, bare in zip(pairs[1:], found[BARE][1:], strict=True)
            ),
        }
        for name, pairs in found.items()
    ]
    return results, {f"{name}: wall_cpu_s": pairs[1:] for name, pairs in found.items()}


def git() -> dict[str, object]:
    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=False).stdout.strip()

    return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--date", default=datetime.now(UTC).strftime("%Y-%m-%d"))
    parser.add_argument("--whole", action="store_true", help="whole commands of one step instead")
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit, for --whole")
    args = parser.parse_args()
    load_before = os.getloadavg()
    if args.whole:
        theme, (results, raw) = "startup_whole", measure_whole(args.runs, args.before)
        config: dict[str, object] = {**WHOLE, BARE: "import torch, lightning.pytorch"}
        over = {str(one["case"]): float(str(one["cpu_s_over_bare_median"])) for one in results}
        says = ", ".join(f"{name} {value:+.2f} s" for name, value in over.items() if name != BARE)
        says = f"CPU time over the bare imports of torch and Lightning, median of {args.runs} turns: {says}."
    else:
        theme, (results, raw) = "startup", measure(args.runs)
        config = {name: {"wellfed": case[0], "hydra_alone": case[2]} for name, case in CASES.items()}
        slowest = max(results, key=lambda one: float(str(one["cpu_ratio_median"])))
        says = (
            f"Every answer takes at most {slowest['cpu_ratio_median']:.2f} x Hydra alone "
            f"(CPU time, median of pairs; slowest: {slowest['case']})."
        )
    flags = " --whole --before TREE" if args.before else " --whole" if args.whole else ""
    record = {
        "theme": theme,
        "date": args.date,
        "command": f"python benchmarks/startup.py --runs {args.runs} --date {args.date}{flags}",
        "git": git(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "load_before": load_before,
            "load_after": os.getloadavg(),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in VERSIONS},
            },
        },
        "config": config,
        "results": results,
        "raw": raw,
        "says": says,
    }
    target = REPO / "benchmarks" / "records" / f"{args.date}_{theme}_cpu.json"
    target.parent.mkdir(exist_ok=True)
    write_record(record, target)
    print(record["says"])
    print(target.relative_to(REPO))


if __name__ == "__main__":
    main()
