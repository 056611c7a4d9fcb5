"""The active mutant in Python, as mutant.h has it in C++; and pytest's plugin that runs mutants.

The plugin collects the tests once and then forks a process for each mutant that the file MUTANTS
lists. The process runs the tests up to the first failure, beginning with what is listed. The file
`mutant-<number>.noticed` gets the name of the test that failed, crashed or hung.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

# Seconds: a test that takes longer hangs.
LONGEST_TEST = 300

active = 0
current_test: Path | None = None


def read_mutant() -> None:
    global active
    active = int(os.environ.get("MUTANT", "0"))


read_mutant()
os.register_at_fork(after_in_child=read_mutant)


def mutant(number: int) -> bool:
    return number == active


def become(log: Path, first: list[str], session: Any) -> None:
    global current_test
    current_test = log.with_suffix(".test")
    current_test.write_text("pytest")
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    order = {name: place for place, name in enumerate(first)}
    # An error shows in some operators alone, and a function's tests go through them one by one.
    random.Random(0).shuffle(session.items)
    files = {item: item.nodeid.partition("::")[0] for item in session.items}
    in_file = {item: order.get(file, len(order)) for item, file in files.items()}
    session.items.sort(key=lambda x: (order.get(x.nodeid, in_file[x]), files[x]))


def pytest_runtest_logstart(nodeid: str) -> None:
    if current_test:
        signal.alarm(LONGEST_TEST)
        current_test.write_text(nodeid)


def pytest_runtestloop(session: Any) -> bool | None:
    # Without the variable, a test that runs pytest runs it as usual.
    listed = Path(os.environ.pop("MUTANTS"))
    waiting = list(json.loads(listed.read_text()).items())
    running: dict[int, tuple[str, Path, float]] = {}
    while waiting or running:
        if waiting and len(running) < int(os.environ["MUTANT_JOBS"]):
            number, first = waiting.pop(0)
            log = listed.with_name(f"mutant-{number}.log")
            if log.with_suffix(".noticed").exists():
                continue
            os.environ["MUTANT"] = number
            if not (process := os.fork()):
                become(log, first, session)
                return None
            running[process] = number, log, time.monotonic()
            continue
        process, status = os.wait()
        number, log, start = running.pop(process)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # the processes of its tests
        by = log.with_suffix(".test").read_text()
        if status:
            log.with_suffix(".noticed").write_text(by)
        if status and number == "0":
            waiting.clear()
        seconds = time.monotonic() - start
        print(f"{number}: {by if status else 'survived'}, {seconds:.0f} s", flush=True)
    return True
