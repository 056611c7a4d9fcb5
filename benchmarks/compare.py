"""Compare two runs of the benchmarks, and name what of ours has become slower.

    python benchmarks/compare.py OLD.json NEW.json

Figures are compared with those of the same processor and as many threads.

The exit status is 1 if anything takes more than 1.1 times as long. The last line says how much the
time of everything else (torch, and the limits of the machine) has changed: where that is far from 1
the machine was not as busy as before, and both runs should be repeated.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path

from results import Results, load, of_processor

SLOWER = 1.1
Ratios = dict[tuple[str, str, str], float]


def is_ours(implementation: str) -> bool:
    return implementation.split(",")[0] == "ours"


def ratios(old: Results, new: Results) -> Ratios:
    """Return the new time of every row divided by its old time, of rows that both have."""
    return {
        key: figures["seconds"] / old.rows[key]["seconds"]
        for key, figures in new.rows.items()
        if "seconds" in figures and "seconds" in old.rows.get(key, {})
    }


def missing(old: Results, new: Results) -> list[str]:
    """Name what only the old run has of ours: whole benchmarks, and rows of the others."""
    measured = {benchmark for benchmark, _, _ in new.rows}
    rows = [key for key in old.rows if key not in new.rows and is_ours(key[2])]
    names = [", ".join(key) if key[0] in measured else f"benchmarks/{key[0]}.py" for key in rows]
    return list(dict.fromkeys(names))


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def of_one_machine(old: list[Results], new: list[Results]) -> tuple[Results, Results]:
    """Return the results that both files have of a processor, with as many threads."""
    for results in new:
        before = of_processor(old, results.cpu)
        if before is not None and before.about["machine"] == results.about["machine"]:
            return before, results
    first, second = ([x.about["machine"] for x in machines] for machines in (old, new))
    raise SystemExit(f"no machine in common: {first} and {second}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    old, new = of_one_machine(load(arguments.old), load(arguments.new))
    times = ratios(old, new)
    ours = {key: ratio for key, ratio in times.items() if is_ours(key[2])}
    if not ours:
        raise SystemExit("the two runs have measured nothing of ours in common")
    for name in missing(old, new):
        print(f"not measured again: {name}")
    slower = {key: ratio for key, ratio in ours.items() if ratio > SLOWER}
    for key, ratio in sorted(slower.items(), key=lambda item: -item[1]):
        before, now = (results.rows[key]["seconds"] * 1e3 for results in (old, new))
        print(f"{ratio:.2f} times as long: {', '.join(key)}, {before:.4g} to {now:.4g} ms")
    print(f"{len(slower)} of {len(ours)} slower by more than {SLOWER - 1:.0%}; ", end="")
    print(f"on average ours takes {geometric_mean(list(ours.values())):.2f} times as long", end="")
    others = [ratio for key, ratio in times.items() if key not in ours]
    print(f", everything else {geometric_mean(others):.2f} times" if others else "")
    sys.exit(bool(slower))


if __name__ == "__main__":
    main()
