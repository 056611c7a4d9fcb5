"""Results of a check: verdicts, files, the table, and the comparison of two files."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import ascend_attn_ops
from ascend_attn_ops.debug.report import Words

FORMAT = 1

# In English, and what `--lang zh` prints beside it.
CHINESE = {
    "pass": "通过", "differs": "不一致", "refused": "被拒绝", "skipped": "跳过", "note": "说明",
    "environment": "环境", "numbers": "数值", "limits": "限制", "known facts": "已知行为",
    "host code": "主机代码", "recorded kernels": "录制的 kernel 调用",
    "behaviour": "行为", "communication": "通信", "speed": "速度",
    "largest error": "最大误差", "of the allowed one": "(与允许误差之比)",
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    section: str
    group: str
    id: str
    verdict: str
    text: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@cache
def _roots() -> list[tuple[str, str]]:
    """Folders that a report may name, by the word that stands for each; the longest first."""
    program = str(Path(ascend_attn_ops.__file__).parents[1])
    named = {program: "<program>", sys.base_prefix: "<base python>", sys.prefix: "<python>"}
    for name in ("ASCEND_OPP_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        if path := os.environ.get(name):
            named[path] = "<CANN>" if name == "ASCEND_HOME_PATH" else f"<{name}>"
    return sorted(named.items(), key=lambda x: -len(x[0]))


@cache
def _private_names() -> re.Pattern[str] | None:
    names = {socket.gethostname()}
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        names.add(getpass.getuser())
    names -= {"", "root", "localhost"}
    return re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names)) if names else None


def scrub(text: str) -> str:
    """Remove what a report must not tell: names of the host and the user, and their folders."""
    for path, word in _roots():
        text = text.replace(path, word)
    text = re.sub(r"(?<![\w>.])/(?:[\w.+@-]+/)+(?=[\w.+@-])", "<elsewhere>/", text)
    names = _private_names()
    return names.sub("<name>", text) if names else text


class Deviation(NamedTuple):
    """A probe that is known to differ, and why that does no harm: but for `why`, patterns."""

    id: str
    product: str
    cann: str
    why: str


def known_deviations(path: Path | None = None) -> list[Deviation]:
    """Read a file of known deviations: those of the package, or of another path."""
    path = path or Path(__file__).with_name("known_deviations.json")
    return [Deviation(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def explained(result: Result, device: str, deviations: Iterable[Deviation]) -> Result:
    """Turn a known difference into a note; say so of one that differs no more."""
    for known in deviations:
        names = f"{device}/{result.id}"
        if not fnmatchcase(names, f"{known.product}:{known.cann}/{known.id}"):
            continue
        if result.verdict == "differs":
            return replace(result, verdict="note", text=f"known: {known.why}: {result.text}")
        if result.verdict == "pass":
            text = f"no longer differs: remove it from the known deviations ({known.why})"
            return replace(result, verdict="differs", text=text)
    return result


class Report:
    """The results of a run; a file has them at most a second later, as a whole or not at all."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self.results: list[Result] = []
        self._path, self._header, self._written = path, header, 0.0

    def add(self, result: Result) -> None:
        self.results.append(result)
        if time.monotonic() - self._written > 1:
            self.write(finished=False)

    def write(self, finished: bool) -> None:
        if self._path is None:
            return
        results = [asdict(result) for result in self.results]
        content = {"format": FORMAT, **self._header, "finished": finished, "results": results}
        unfinished = self._path.with_name(self._path.name + ".part")
        text = json.dumps(content, indent=1, ensure_ascii=False)
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(self._path)
        self._written = time.monotonic()


def read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """Read a report.

    Raises:
        ValueError: The file is none.
    """
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        entries = header.pop("results")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{path}: expected a report of ascend_attn_check") from None
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {header.get('format')}")
    return header, [Result(**entry) for entry in entries]


ERROR = "error"  # the figure of the largest error, as a share of the allowed one


class Table:
    """Prints a line for each group of results, and for each one that needs to be read."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._section = ""
        self._group: list[Result] = []

    def add(self, result: Result) -> None:
        if self._group and (self._group[0].section, self._group[0].group) != (
            result.section, result.group
        ):  # fmt: skip
            self.flush()
        self._group.append(result)

    def flush(self) -> None:
        if not self._group:
            return
        group, self._group = self._group, []
        if group[0].section != self._section:
            self._section = group[0].section
            print(f"\n{self._words(self._section)}")
        verdicts = self._counts(group)
        if len(group) == 1:
            verdicts = _told(group[0], self._words)
        line = f"  {group[0].group:<44} {verdicts}"
        errors = [result.figures[ERROR] for result in group if ERROR in result.figures]
        if errors:
            line += f"; {self._words('largest error')} {max(errors):.2f}"
            line += f" {self._words('of the allowed one')}"
        print(line)
        for result in group:
            if result.verdict == "differs" or (result.verdict == "note" and len(group) > 1):
                text = result.text.replace("\n", "\n      ")
                print(f"    {self._words(result.verdict)}  {result.id}\n      {text}")

    def total(self, results: Iterable[Result]) -> None:
        self.flush()
        print(f"\n{self._counts(results)}")

    def _counts(self, results: Iterable[Result]) -> str:
        counts = Counter(result.verdict for result in results)
        return ", ".join(f"{self._words(x)} {n}" for x, n in counts.most_common())


def compare(first: Path, second: Path) -> int:
    """Print what two reports say differently of the same probes; return 1 if anything."""
    (header, results), (other_header, other_results) = read(first), read(second)
    for name in sorted({*header, *other_header}):
        if header.get(name) != other_header.get(name):
            print(f"{name}: {header.get(name)} -> {other_header.get(name)}")
    found, others = ({x.id: x for x in of_one} for of_one in (results, other_results))
    differences = 0
    for id in {**found, **others}:
        one, other = found.get(id), others.get(id)
        if one and other:
            same_text = one.section != "environment" or one.text == other.text
            if one.verdict == other.verdict and same_text:
                continue
            differences += 1
        print(f"{id}: {_told(one)} -> {_told(other)}")
    print(f"{differences} of {len(results)} differ")
    return 1 if differences else 0


def _told(result: Result | None, words: Callable[[str], str] = str) -> str:
    """Returns the verdict, and the first line of the reason."""
    if result is None:
        return "not probed"
    return ": ".join([words(result.verdict), *result.text.splitlines()[:1]])
