"""Runs random cases of all classes in turns until the time is up.

    python tests/fuzz/run.py --seconds 600 --seed 1 --only 'valid/*'
    python tests/fuzz/run.py --replay valid/attention_update:12345

Every case has a seed of its own, so that one line replays it. Exit status 1: there were findings.
The cases run in a process of their own: one that a case crashes, or that hangs, is a finding too.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import fnmatch
import hashlib
import importlib
import itertools
import mmap
import os
import pkgutil
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
if __name__ == "__main__":
    # In place of this folder, whose modules are those of a package.
    sys.path[:1] = [str(FOLDER.parent), str(FOLDER.parents[1] / "python")]
    # Threads that wait in a loop take the processors from those that compute; read by libgomp as it
    # is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import ascend_attn_ops  # noqa: E402

from fuzz.calls import threads  # noqa: E402
from fuzz.case import Case, Finding  # noqa: E402

CORPUS = FOLDER / "corpus.txt"
OPEN = "open "  # before a line of the corpus whose finding is not mended
SHOWN = 3  # findings of a class that are printed in full
LABELS = 6  # labels of a class in the table
PROGRESS_SECONDS = 10
CASE_SECONDS = 120  # one that takes longer hangs
WATCH_SECONDS = 0.1  # between two looks at it
_JOURNAL_BYTES = 512


def classes() -> dict[str, Case]:
    """Returns the classes of every module of this package."""
    found: dict[str, Case] = {}
    for module in pkgutil.iter_modules([str(FOLDER)]):
        if module.name not in ("run", "test_fuzz"):
            found |= getattr(importlib.import_module(f"fuzz.{module.name}"), "CASES", {})
    return found


def corpus() -> list[str]:
    """Returns the lines for `--replay`, one per earlier finding; OPEN stands before some."""
    lines = (line.partition("#")[0].strip() for line in CORPUS.read_text().splitlines())
    return [line for line in lines if line]


def case_seed(campaign: int, name: str, number: int) -> int:
    """64 bits, different for every case of a campaign."""
    digest = hashlib.blake2b(f"{campaign}/{name}/{number}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def run_case(case: Case, seed: int) -> str:
    """Its label. An exception that is no Finding becomes one."""
    try:
        # The shapes are far smaller than those that the device's tables allow.
        with ascend_attn_ops.limits(None), threads(1):
            return case(random.Random(seed))
    except Finding:
        raise
    except Exception as error:
        raise Finding(f"unexpected exception\n{traceback.format_exc(limit=-3)}") from error


def replay(line: str) -> str:
    name, _, seed = line.rpartition(":")
    return run_case(classes()[name], int(seed))


@dataclass
class Count:
    """The results of the cases of one class."""

    cases: int = 0
    seconds: float = 0.0
    findings: list[int] = field(default_factory=list)  # their seeds
    labels: Counter[str] = field(default_factory=Counter)


def campaign(
    chosen: dict[str, Case], seed: int, seconds: float, journal: Journal | None = None
) -> dict[str, Count]:
    """Runs the classes in turns; one that has had twice its share of the time misses its turn."""
    counts = {name: Count() for name in chosen}
    start = time.perf_counter()
    reported = start
    latest: dict[str, str] = {}  # by the folder of their class, whose cases may share processes
    for number in itertools.count():
        for name, case in chosen.items():
            before = time.perf_counter()
            if before - start >= seconds:
                return counts
            if counts[name].seconds > 2 * (before - start) / len(chosen) and number:
                continue
            if before - reported >= PROGRESS_SECONDS:
                reported = before
                print(progress(counts, before - start), flush=True)
                if journal is not None:
                    limit_memory()
            own = case_seed(seed, name, number)
            line = f"{name}:{own}"
            if journal is not None:
                journal.remember(line)
            folder = name.partition("/")[0]
            run_one(name, case, own, counts[name], latest.get(folder, ""))
            latest[folder] = line
    raise AssertionError("itertools.count has no end")


def run_one(name: str, case: Case, seed: int, count: Count, earlier: str = "") -> None:
    """`earlier`: the case before, which a finding may follow from."""
    before = time.perf_counter()
    try:
        count.labels[run_case(case, seed)] += 1
    except Finding as finding:
        count.findings.append(seed)
        if len(count.findings) <= SHOWN:
            print(f"FINDING {name} seed {seed}\n{finding}\n    {command(name, seed)}", flush=True)
            print(f"    the case before: {earlier or 'none'}", flush=True)
        elif len(count.findings) == SHOWN + 1:
            print(f"FINDING {name}: more of them are counted only", flush=True)
    count.cases += 1
    count.seconds += time.perf_counter() - before


def command(name: str, seed: int) -> str:
    return f"python tests/fuzz/run.py --replay {name}:{seed}"


def progress(counts: dict[str, Count], elapsed: float) -> str:
    cases = sum(x.cases for x in counts.values())
    findings = sum(len(x.findings) for x in counts.values())
    return f"{elapsed:.0f} s: {cases} cases, {findings} findings"


def table(counts: dict[str, Count]) -> str:
    width = max(map(len, counts), default=0)
    lines = [f"{'class':{width}} {'cases':>8} {'findings':>8} {'per s':>8}  labels"]
    for name, count in counts.items():
        rate = count.cases / count.seconds if count.seconds else 0.0
        common = ", ".join(f"{label} {n}" for label, n in count.labels.most_common(LABELS))
        others = len(count.labels) - LABELS
        more = f", {others} others" if others > 0 else ""
        lines.append(
            f"{name:{width}} {count.cases:8} {len(count.findings):8} {rate:8.1f}  {common}{more}"
        )
    return "\n".join(lines)


class Journal:
    """A line in a file that outlives the process which wrote it.

    A process that a signal kills writes nothing more, so the line is written before every case. The
    file is mapped into memory: a line costs a copy, not a call of the system.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_JOURNAL_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _JOURNAL_BYTES)

    def remember(self, line: str) -> None:
        self._map[:] = line.encode()[:_JOURNAL_BYTES].ljust(_JOURNAL_BYTES, b"\0")


def remembered(path: Path) -> str:
    """The last line of the journal at `path`, also while another process writes to it."""
    return path.read_bytes().rstrip(b"\0").decode(errors="replace")


def has_sanitizer() -> bool:
    """Returns whether AddressSanitizer is loaded, as tools/sanitize.py does."""
    return hasattr(ctypes.CDLL(None), "__asan_init")


def protect() -> None:
    """Makes crashes of this process say where, and limits its memory."""
    # A sanitizer says more of a crash.
    if not has_sanitizer():
        faulthandler.enable()
    limit_memory()
    # A core of every crash would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def limit_memory(memory: int = 6 * 2**30) -> None:
    """Let the process take so much more. torch keeps the code of products of every size: the
    addresses of a long run would reach a limit that stays where it is."""
    # A sanitizer maps terabytes of addresses for what it knows of memory.
    if has_sanitizer():
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, most))


def watch(command_line: list[str]) -> int:
    """Run a process whose last argument is its journal, and say which case ended it, if one did."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        Journal(path)
        process = subprocess.Popen([*command_line, str(path)])
        line, waited = "", 0.0
        while process.poll() is None:
            time.sleep(WATCH_SECONDS)
            waited += WATCH_SECONDS  # not by the clock: somebody may have stopped both processes
            if line != (now := remembered(path)) or not line:
                line, waited = now, 0.0
            elif waited > CASE_SECONDS:
                process.send_signal(signal.SIGABRT)  # whose handler prints where it is
                process.wait()
        if process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            case, _, seed = remembered(path).rpartition(":")
            print(f"FINDING {case} seed {seed}\nended by {name}\n    {command(case, int(seed))}")
            return 1
        return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=lambda text: int(text, 0), default=0)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of classes: 'valid/*'")
    parser.add_argument("--replay", nargs="+", metavar="CLASS:SEED", help="runs cases in turn")
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for line in arguments.replay or ():
        try:
            print(f"nothing found: {replay(line)}")
        except Finding as finding:
            print(f"FINDING {line}\n{finding}")
            return 1
    if arguments.replay:
        return 0
    chosen = {name: x for name, x in classes().items() if fnmatch.fnmatch(name, arguments.only)}
    if not chosen:
        parser.error(f"no class matches {arguments.only}: {', '.join(classes())}")
    if arguments.journal is None:
        return watch([sys.executable, __file__, *sys.argv[1:], "--journal"])
    protect()
    print(f"seed {arguments.seed}, {arguments.seconds:g} s, {len(chosen)} classes", flush=True)
    journal = Journal(arguments.journal)
    counts = campaign(chosen, arguments.seed, arguments.seconds, journal)
    print(table(counts))
    return int(any(count.findings for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
