"""How long the command line takes to answer before torch is imported, beside Hydra alone on the same configs.

    python benchmarks/startup.py [--runs 7] [--whole [--before TREE]] [--out RECORD]

Each pair is run in turns: the entry script, then a script of a few lines in which Hydra composes the same overrides
over the same ``configs/`` and schema and checks nothing. Wall time of the whole process and its CPU time (which other
processes on the machine disturb less). The first round is dropped.

``--whole`` measures whole commands instead: of one training step with the time to that step, of training without any
override less the wall time of its steps and validations, and of evaluating a checkpoint. They take turns with the bare
imports of torch and Lightning and with Lightning composed by Hydra (`by_hand.py`). ``--before`` names a checkout of an
earlier commit, whose commands run in the same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from measuring import compared, finish, turned

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
TRAIN, EVALUATION = "training", "evaluation"
WHOLE = {
    "one step": [*ONE_STEP, "logger=none"],
    "one step, wandb offline": [*ONE_STEP, "logger=wandb", "logger.mode=offline"],
    TRAIN: ["logger.mode=offline"],
}
BARE = "bare imports"
BY_HAND = "Lightning composed by Hydra"
FIRST_STEP = """
import importlib.util, os, runpy, sys, time
pid, out, name = os.getpid(), sys.argv[1], "torch.optim.optimizer"
def note(*_):
    if os.getpid() == pid and not os.path.exists(out):
        with open(out, "w") as file:
            file.write(str(time.time()))
class Finder:
    def find_spec(self, asked, path=None, target=None):
        if asked != name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.register_optimizer_step_post_hook(note)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder())
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script, and writes the time of its first optimizer step to a file. Imports nothing before the script does."""


def timed(command: list[str], folder: Path, expected: int | None, tree: Path = REPO) -> tuple[float, float]:
    """(wall, CPU) seconds of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_at_s = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, check=False)
    wall_s = time.perf_counter() - began_at_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if expected is not None and done.returncode != expected:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stderr.decode()}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def trained_s(folder: Path) -> float:
    """Wall time of the steps and validations of a run."""
    wall = json.loads((folder / "run.json").read_text(encoding="utf-8"))["wall"]
    return float(wall["steps_s"] + wall["validation_s"])


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


def measure(runs: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    results: list[dict[str, object]] = []
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "alone.py"
        alone.write_text(HYDRA_ALONE.format(configs=str(REPO / "configs")))
        for name, (ours_args, code, alone_args) in CASES.items():
            ours, hydra = [], []
            for _ in range(runs + 1):
                ours.append(timed([str(REPO / "src" / "train.py"), *ours_args], Path(folder), code))
                hydra.append(timed([str(alone), *alone_args], Path(folder), 0))
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
            walls = [[pair[0] for pair in pairs[1:]] for pairs in (ours, hydra)]
            rows += compared(f"the answer to {name}", "s", walls[0], {"Hydra alone": walls[1]}, less_is_better=True)
    return results, rows


def measure_whole(runs: int, earlier: Path | None) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Whole commands of both trees, their peer and the bare imports, in turns; rows of figures and of comparisons."""
    one_step = next(iter(WHOLE))
    commands = {name: (REPO, [str(REPO / "src" / "train.py"), *words]) for name, words in WHOLE.items()}
    if earlier is not None:
        tree = earlier.resolve()
        commands |= {
            f"before: {name}": (tree, [str(tree / "src" / "train.py"), *words]) for name, words in WHOLE.items()
        }
    commands[EVALUATION] = (REPO, [str(REPO / "src" / "evaluate.py")])
    commands[BY_HAND] = (REPO, [str(REPO / "benchmarks" / "by_hand.py"), "one_step"])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (BARE, *commands)}
    first: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as scratch:
        trained = Path(scratch) / "trained"
        timed([*commands[one_step][1], f"hydra.run.dir={trained}"], REPO, 0)
        for number in range(runs + 1):
            for name in turned(found, number):
                if name == BARE:
                    found[name].append(timed(["-c", "import torch, lightning.pytorch"], Path(scratch), 0))
                    continue
                tree, words = commands[name]
                if name == EVALUATION:
                    found[name].append(timed([*words, f"checkpoint={trained}/checkpoints/last.ckpt"], REPO, 0))
                    continue
                folder, stepped = Path(scratch) / f"{number}_{list(found).index(name)}", Path(scratch) / "stepped"
                stepped.unlink(missing_ok=True)
                began_at_s = time.time()
                command = ["-c", FIRST_STEP, str(stepped), *words, f"hydra.run.dir={folder}"]
                wall_s, cpu_s = timed(command, tree, 0, tree)
                found[name].append((wall_s - trained_s(folder) if name.endswith(TRAIN) else wall_s, cpu_s))
                first[name].append(float(stepped.read_text()) - began_at_s)
            print(number, {name: pairs[-1] for name, pairs in found.items()}, flush=True)

    def walls(name: str) -> list[float]:
        return [pair[0] for pair in found[name][1:]]

    rows: list[dict[str, object]] = []
    bare = {f"{BARE} of torch and Lightning": walls(BARE)}
    for name in WHOLE:
        if name == TRAIN:
            what = "training without an override, beside its steps and validations"
            rows += compared(what, "s", walls(name), bare, less_is_better=True)
            continue
        peers = {BY_HAND: walls(BY_HAND), **bare}
        rows += compared(f"a command of {name}", "s", walls(name), peers, less_is_better=True)
    rows += compared("an evaluation of a checkpoint", "s", walls(EVALUATION), bare, less_is_better=True)
    rows += compared(
        f"the first optimizer step, {one_step}",
        "s",
        first[one_step][1:],
        {BY_HAND: first[BY_HAND][1:]},
        less_is_better=True,
    )
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
    return results, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--date", default=f"{datetime.now(UTC):%Y-%m-%d}", help="in the name of the record")
    parser.add_argument("--whole", action="store_true", help="whole commands of one step instead")
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit, for --whole")
    parser.add_argument("--out", type=Path, help="file of the record, instead of one that --date names")
    args = parser.parse_args()
    if args.whole:
        theme, (results, rows) = "startup_whole", measure_whole(args.runs, args.before)
        config: dict[str, object] = {**WHOLE, BARE: "import torch, lightning.pytorch"}
        over = {str(one["case"]): float(str(one["cpu_s_over_bare_median"])) for one in results}
        says = ", ".join(f"{name} {value:+.2f} s" for name, value in over.items() if name != BARE)
        says = f"CPU time over the bare imports of torch and Lightning, median of {args.runs} turns: {says}."
    else:
        theme, (results, rows) = "startup", measure(args.runs)
        config = {name: {"wellfed": case[0], "hydra_alone": case[2]} for name, case in CASES.items()}
        slowest = max(results, key=lambda one: float(str(one["cpu_ratio_median"])))
        says = (
            f"Every answer takes at most {slowest['cpu_ratio_median']:.2f} x Hydra alone "
            f"(CPU time, median of pairs; slowest: {slowest['case']})."
        )
    target = args.out or REPO / "benchmarks" / "records" / f"{args.date}_{theme}_cpu.json"
    finish(theme, results, says, target, config=config, compared=rows)


if __name__ == "__main__":
    main()
