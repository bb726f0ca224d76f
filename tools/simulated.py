"""Runs a command on a machine with simulated GPUs, to try wellfed without one.

    python tools/simulated.py 24gb -- python src/train.py trainer.max_steps=200
    make train SIMULATED=24gb

torch.cuda and NVML are the real libraries; below them stand the stand-ins of the tests (tests/fake_cuda,
tests/fake_nvml). The first time a driver is compiled, which takes a minute. Figures of such a run are of no real GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fake_cuda.machine import MODELS, Cards, compile_driver, machine_environment  # noqa: E402
from tests.fake_nvml.driver import FakeDriver  # noqa: E402

SIZES_GIB = {"8gb": 8, "16gb": 16, "24gb": 24, "80gb": 80}


def main(words: list[str]) -> int:
    """Runs the command and returns its exit code; 2 if such a machine can't be simulated here."""
    parser = argparse.ArgumentParser(
        prog="python tools/simulated.py",
        description=(__doc__ or "").splitlines()[0],
        epilog="The command comes after --, for example: -- python src/train.py trainer.max_steps=200",
    )
    parser.add_argument("card", choices=SIZES_GIB, help="memory of a card, taken from this machine as it is used")
    parser.add_argument("--cards", type=int, default=1, metavar="N", help="how many (default 1, at most 8)")
    parser.add_argument("--slowdown", type=float, default=1.0, metavar="X",
                        help="a kernel takes X times the time that it takes this CPU (default 1)")  # fmt: skip
    parser.add_argument("--kernel-us", type=float, default=0.0, metavar="US", help="and so many microseconds more")
    parser.add_argument("--launch-us", type=float, default=0.0, metavar="US",
                        help="microseconds that each launch takes of this CPU (default 0)")  # fmt: skip
    parser.add_argument("--pinned-gbps", type=float, default=0.0, metavar="GB/S",
                        help="rate of copies from and to pinned memory; 0 = they take no time (default)")  # fmt: skip
    parser.add_argument("--pageable-gbps", type=float, default=0.0, metavar="GB/S", help="the same of other memory")
    parser.add_argument("--others-gib", type=float, default=0.0, metavar="GIB", help="held by other processes")
    parser.add_argument("--sm-share", type=float, default=1.0, metavar="FRAC",
                        help="share of its multiprocessors that a busy card uses, 0 to 1 (default 1)")  # fmt: skip
    parser.add_argument("--model", choices=MODELS,
                        help="kernels take the time of their arithmetic and bytes on a card much slower than this CPU, "
                        "whose parts NVML shows; fast = with rates like those of a card of 24 GB, computes nothing: "
                        "its losses and metrics mean nothing (default: the time that they take this CPU)")  # fmt: skip
    parser.add_argument("--dram-gbps", type=float, metavar="GB/S", help="another rate of its memory than the model's")
    parser.add_argument("--capability", default="9.0", metavar="N.N",
                        help="compute capability (default 9.0); below 9.0 NVML has no GPM")  # fmt: skip
    parser.add_argument("--throttle", default="", metavar="S:FRAC:WHY",
                        help="10:0.5:heat = from 10 busy seconds on half the clock; WHY is heat or power")  # fmt: skip
    given, command = _split(words)
    chosen = parser.parse_args(given)
    if not command:
        parser.error("no command: write it after --")
    if not 1 <= chosen.cards <= 8:
        parser.error(f"--cards {chosen.cards}: 1 to 8 cards can be simulated")
    if (problem := why_not()) is not None:
        print(f"simulated: {problem}", file=sys.stderr)
        return 2
    model = dict(MODELS[chosen.model]) if chosen.model else {}
    if chosen.kernel_us:
        model["kernel_us"] = chosen.kernel_us
    if chosen.dram_gbps:
        model["dram_gbps"] = chosen.dram_gbps
    cards = Cards(
        cards=chosen.cards,
        mib=SIZES_GIB[chosen.card] * 1024,
        context_mib=500,
        slowdown=chosen.slowdown,
        launch_us=chosen.launch_us,
        copy_gbps=chosen.pinned_gbps,
        pageable_gbps=chosen.pageable_gbps,
        others_mib=round(chosen.others_gib * 1024),
        capability=chosen.capability,
        throttle=chosen.throttle,
        **model,
    )
    with tempfile.TemporaryDirectory(prefix="wellfed-simulated-") as folder:
        driver = FakeDriver(Path(shutil.which("cc") or "cc"), Path(folder))
        variables = machine_environment(driver, Path(folder), cards, sm_share_frac=chosen.sm_share)
        return run(command, variables)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def why_not() -> str | None:
    """Compiles the simulated driver. Returns why this computer can't simulate a GPU; None if it can."""
    if sys.platform != "linux":
        return f"the simulated cards are Linux libraries, and this is {sys.platform}"
    if shutil.which("cc") is None:
        return "needs a C compiler, cc: apt-get install gcc libc6-dev"
    version = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.version.cuda or torch.version.hip or '')"],
        capture_output=True,
        text=True,
        check=False,
    )
    if version.returncode:
        return "torch can't be imported. Run: make install"
    if built_for := version.stdout.strip():
        return f"this torch is built for GPUs ({built_for}); the simulated cards need the CPU build of the same version"
    print("Preparing the simulated cards (the first time takes about a minute) ...", file=sys.stderr)
    try:
        compile_driver()
    except RuntimeError as error:
        return str(error)
    return None


def run(command: list[str], variables: dict[str, str]) -> int:
    """Runs the command, passes signals on to it, and returns its exit code."""
    process = subprocess.Popen(command, env={**os.environ, **variables})
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the terminal sends Ctrl-C to the command too
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = process.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
