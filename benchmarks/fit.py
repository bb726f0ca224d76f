"""How large a micro-batch is found, with how many tries, and how often training then runs out of memory?

    python benchmarks/fit.py [--cards 1000] [--out RECORD]

Cards are simulated: limit, memory at rest, the optimizer's part and the slope over the batch size are drawn at random,
so the largest size that fits is known. Our search stands beside what other tools do. After the choice come 200 steps
that need up to 3 % more than the probe did, as odd batches do.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.measuring import finish  # noqa: E402
from tests.kit.cards import STRATEGIES, Card, card_of  # noqa: E402
from wellfed.plan.predict.size_search import GOOD_FRAC, search  # noqa: E402

MAX_SIZE = 2**16
STEPS = 200
MOST_MORE = 1.03


def ours(card: Card, max_size: int) -> tuple[int | None, list[int]]:
    """`wellfed.plan.predict.size_search.search`, for memory alone."""
    fit = search(card.probe, max_size=max_size, budget_bytes=card.budget, plateau_gain=0)
    return fit.size, [probe.size for probe in fit.probes]


def judge(name: str, strategy: Callable[[Card, int], tuple[int | None, list[int]]], num_cards: int, seed: int) -> dict:
    """What a strategy does on the same cards as all others."""
    rng = random.Random(seed)
    shares, tries, failed_tries, good, fell = [], [], [], 0, 0
    for _ in range(num_cards):
        card = card_of(rng.uniform)
        steps = random.Random(rng.random())
        best = card.largest()
        size, tried = strategy(card, MAX_SIZE)
        tries.append(len(tried))
        failed_tries.append(sum(card.needs(each).total > card.budget for each in tried))
        if size is None:
            shares.append(0.0)
            continue
        more = [steps.uniform(0.99, MOST_MORE) for _ in range(STEPS)]
        falls = any(card.needs(size, each).total > card.budget for each in more)
        fell += falls
        shares.append(size / best)
        good += size >= GOOD_FRAC * best and not falls
    return {
        "strategy": name,
        "n": num_cards,
        "good_frac": good / num_cards,
        "ran_out_in_200_steps_frac": fell / num_cards,
        "of_the_largest_median": statistics.median(shares),
        "of_the_largest_p5": sorted(shares)[num_cards // 20],
        "tries_mean": statistics.mean(tries),
        "tries_sd": statistics.stdev(tries),
        "tries_max": max(tries),
        "tries_out_of_memory_mean": statistics.mean(failed_tries),
    }


def main() -> None:
    """Prints the table; writes the record where told to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cards", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    strategies = {"ours": ours, **STRATEGIES}
    results = [judge(name, each, chosen.cards, chosen.seed) for name, each in strategies.items()]
    print(f"{'':<20} {'good':>6} {'ran out':>8} {'median':>7} {'5th pct':>8} {'tries':>6} {'most':>5} {'failed':>7}")
    for row in results:
        print(
            f"{row['strategy']:<20} {row['good_frac']:>6.1%} {row['ran_out_in_200_steps_frac']:>8.1%} "
            f"{row['of_the_largest_median']:>7.2f} {row['of_the_largest_p5']:>8.2f} {row['tries_mean']:>6.1f} "
            f"{row['tries_max']:>5} {row['tries_out_of_memory_mean']:>7.2f}"
        )
    best = results[0]
    says = (
        f"On {chosen.cards} simulated cards ours is good (at least {GOOD_FRAC} of the largest, no step of {STEPS} "
        f"out of memory) on {best['good_frac']:.1%} with {best['tries_mean']:.1f} tries; the next best is good on "
        f"{max(row['good_frac'] for row in results[1:]):.1%}."
    )
    config = {"seed": chosen.seed, "max_size": MAX_SIZE, "steps": STEPS, "most_more": MOST_MORE}
    finish("fit", results, says, chosen.out, config=config)


if __name__ == "__main__":
    main()
