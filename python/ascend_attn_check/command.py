"""The command `check`: which probes run, what is printed and what is written."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import ascend_attn_ops
from ascend_attn_ops._core import library
from ascend_attn_ops._core.device_limits import device_in_force
from ascend_attn_ops.debug.recording import replay
from ascend_attn_ops.debug.report import Words

from ascend_attn_check import results as files
from ascend_attn_check.child import serve
from ascend_attn_check.kernel_calls import PATTERNS, files_in
from ascend_attn_check.probe import Context, Probe
from ascend_attn_check.results import CHINESE, Report, Result, Table
from ascend_attn_check.runner import Runner, Stopped


def run(options: argparse.Namespace) -> int:
    """Run the check; return 0 if it has come to its end and nothing differs."""
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
        "ascend_attn_ops": ascend_attn_ops.__version__,
        "device": device,
        "quick": options.quick,
    }
    done = _resumed(options.resume, header) if options.resume else []
    target = options.json or options.resume
    report, table = Report(target, header), Table(Words(options.lang, CHINESE))
    deviations = files.known_deviations()
    if options.deviations:
        deviations += files.known_deviations(options.deviations)
    in_use = "{}:{}".format(*(device_in_force() or ("none", "")))

    def add(result: Result) -> None:
        report.add(result)
        table.add(result)

    finished = False
    context = Context(device, options.quick, options.memory, options.recorded)
    try:
        with Runner(partial(serve, context), options.hang) as runner:
            probes = _chosen(runner.probes(), options)
            for result in done:
                add(result)
            ids = {result.id for result in done}
            left = [probe for probe in probes if probe.id not in ids]
            started = time.monotonic()
            for number, probe in enumerate(left, 1):
                _show_progress(f"{number} of {len(left)}, {time.monotonic() - started:.0f} s")
                if probe.danger and not options.dangerous:
                    text = f"not probed: {probe.danger}; --dangerous runs it"
                    add(Result(probe.section, probe.group, probe.id, "skipped", text))
                else:
                    add(files.explained(runner.run(probe), in_use, deviations))
        finished = True
    except Stopped as how:
        print(f"the check cannot start: {how}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    _show_progress("")
    table.total(report.results)
    report.write(finished)
    if target:
        print(f"written: {target}")
    return 0 if finished and all(x.verdict != "differs" for x in report.results) else 1


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


def _chosen(probes: Sequence[Probe], options: argparse.Namespace) -> list[Probe]:
    """Probes of --only, which names sections, groups such as an operator, or probes."""
    if options.quick:
        probes = [probe for probe in probes if probe.quick]
    for name in options.only:
        if not any(_matches(probe, name) for probe in probes):
            raise SystemExit(f"--only: expected {_names_like(name, probes)}, got {name!r}")
    return [
        probe for probe in probes
        if not options.only or any(_matches(probe, name) for name in options.only)
    ]  # fmt: skip


def _matches(probe: Probe, name: str) -> bool:
    """Whether a name or a shell pattern is that of a section, a group or a probe."""
    names = (probe.section, probe.group, probe.id, probe.id.partition("/")[2])
    return any(fnmatchcase(x, name) for x in names) or probe.group.startswith(name)


def _names_like(name: str, probes: Sequence[Probe]) -> str:
    """Return the sections, and the groups and probes that a wrong name may mean."""
    sections = list(dict.fromkeys(probe.section for probe in probes))
    names = {x for probe in probes for x in (probe.group, probe.id, probe.id.partition("/")[2])}
    text = f"a section ({', '.join(sections)}), a group such as an operator, or a probe"
    similar = difflib.get_close_matches(name, sorted(names), cutoff=0.5)
    return f"{text}; similar names: {', '.join(similar)}" if similar else text


def _show_progress(text: str) -> None:
    """On a terminal alone: the line is overwritten by the next."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
