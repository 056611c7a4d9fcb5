"""The command `check`: which probes run, what is printed and what is written."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import ascend_attn_ops
from ascend_attn_ops._core import library
from ascend_attn_ops._core.device_limits import device_in_force
from ascend_attn_ops.debug.report import Words

from ascend_attn_check import results as files
from ascend_attn_check.kernel_calls import PATTERNS, files_in
from ascend_attn_check.results import CHINESE, Lines, Result, Table
from ascend_attn_check.runner import Runner, Stopped, Task, child_command


def run(options: argparse.Namespace, command: Sequence[str] | None = None) -> int:
    """Run the check; return 0 if it has come to its end and nothing differs.

    Args:
        options: The options of `python -m ascend_attn_check`.
        command: The child process, which tests replace.
    """
    if options.compare:
        return files.compare(*options.compare)
    device = options.device or _device()
    if options.replay:
        return _replay(options.replay, device)
    print(f"device: {device}")
    if options.recorded and not files_in(options.recorded):
        raise SystemExit(
            f"--recorded: expected a folder with {' or '.join(PATTERNS)}, got {options.recorded}"
        )
    header = {
        "format": files.FORMAT,
        "ascend_attn_ops": ascend_attn_ops.__version__,
        "device": device,
        "quick": options.quick,
    }
    done = _resumed(options.resume, header) if options.resume else []
    target = options.json or (options.resume and options.resume.with_suffix(".json"))
    lines = Lines(target and target.with_suffix(".jsonl"), header)
    table = Table(Words(options.lang, CHINESE))
    results: list[Result] = []

    deviations = files.known_deviations()
    in_use = "{}:{}".format(*(device_in_force() or ("none", "")))
    if options.deviations:
        deviations += files.known_deviations(options.deviations)

    def add(result: Result) -> None:
        result = files.explained(result, in_use, deviations)
        results.append(result)
        lines.add(result)
        table.add(result)

    finished = False
    command = command or child_command(device, options.quick, options.memory, options.recorded)
    try:
        with Runner(command, options.hang) as runner:
            tasks = _chosen(runner.tasks(), options)
            results += done
            for result in done:
                lines.add(result)
                table.add(result)
            ids = {result.id for result in done}
            left = [task for task in tasks if task.id not in ids]
            started = time.monotonic()
            for number, task in enumerate(left, 1):
                _show_progress(f"{number} of {len(left)}, {time.monotonic() - started:.0f} s")
                if task.danger and not options.dangerous:
                    text = f"not probed: {task.danger}; --dangerous runs it"
                    add(Result(task.section, task.group, task.id, "skipped", text))
                else:
                    add(runner.run(task))
        finished = True
    except Stopped as how:
        print(f"the check cannot start: {how}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    _show_progress("")
    table.total(results)
    if target:
        files.write(target, {**header, "finished": finished}, results)
        print(f"written: {target}")
    lines.close(remove=True)
    return 0 if finished and all(result.verdict != "differs" for result in results) else 1


def _device() -> str:
    """The NPU, or the CPU where no torch_npu is installed."""
    if library.npu_module() is not None:
        return "npu:0"
    if importlib.util.find_spec("torch_npu") is None:
        return "cpu"
    raise SystemExit(
        f"--device: expected cpu or an NPU that can be used, got none: {library.npu_unavailable}"
    )


def _replay(paths: Sequence[Path], device: str) -> int:
    """Run recorded calls; return 0 if each is within the bounds."""
    from ascend_attn_ops.debug.recording import replay

    status = 0
    for path in paths:
        try:
            outcome = replay(path, device)
        except (OSError, ValueError, ImportError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            status = 1
        else:
            print(f"{path}\n{outcome}")
            status |= outcome.error is not None or outcome.difference is not None
    return int(status)


def _resumed(path: Any, header: dict[str, Any]) -> list[Result]:
    earlier, done = files.read(path)
    for name, value in header.items():
        if earlier.get(name) != value:
            raise SystemExit(
                f"{path}: expected a run with {name} {value}, got one with {earlier.get(name)}"
            )
    return done


def _chosen(tasks: Sequence[Task], options: argparse.Namespace) -> list[Task]:
    """Tasks of --only, which names sections, groups such as an operator, or probes."""
    if options.quick:
        tasks = [task for task in tasks if task.quick]
    for name in options.only:
        if not any(_matches(task, name) for task in tasks):
            raise SystemExit(f"--only: expected {_names_like(name, tasks)}, got {name!r}")
    return [
        task for task in tasks
        if not options.only or any(_matches(task, name) for name in options.only)
    ]  # fmt: skip


def _matches(task: Task, name: str) -> bool:
    """Whether a name or a shell pattern is that of a section, a group or a probe."""
    names = (task.section, task.group, task.id, task.id.partition("/")[2])
    return any(fnmatchcase(x, name) for x in names) or task.group.startswith(name)


def _names_like(name: str, tasks: Sequence[Task]) -> str:
    """Return the sections, and the groups and probes that a wrong name may mean."""
    sections = list(dict.fromkeys(task.section for task in tasks))
    names = {x for task in tasks for x in (task.group, task.id, task.id.partition("/")[2])}
    text = f"a section ({', '.join(sections)}), a group such as an operator, or a probe"
    similar = difflib.get_close_matches(name, sorted(names), cutoff=0.5)
    return f"{text}; similar names: {', '.join(similar)}" if similar else text


def _show_progress(text: str) -> None:
    """On a terminal alone: the line is overwritten by the next."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
