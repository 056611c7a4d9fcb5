"""Results of a check: verdicts, files, the table, and the comparison of two files."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, TextIO

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
    named = {
        "<program>": str(Path(ascend_attn_ops.__file__).parents[1]),
        "<python>": sys.prefix,
        "<base python>": sys.base_prefix,
        **{
            "<CANN>" if name == "ASCEND_HOME_PATH" else f"<{name}>": os.environ[name]
            for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH")
            if os.environ.get(name)
        },
    }
    return sorted(((path, word) for word, path in named.items()), key=lambda x: -len(x[0]))


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


@dataclass(frozen=True)
class Deviation:
    """A probe that is known to differ, and why that does no harm."""

    id: str  # a pattern of probes
    product: str  # or *
    cann: str  # or *
    why: str

    def applies_to(self, id: str, device: str) -> bool:
        product, _, cann = device.partition(":")
        return all(
            fnmatchcase(x, pattern)
            for x, pattern in ((id, self.id), (product, self.product), (cann, self.cann))
        )


def known_deviations(path: Path | None = None) -> list[Deviation]:
    """Read a file of known deviations: those of the package, or of another path."""
    path = path or Path(__file__).with_name("known_deviations.json")
    return [Deviation(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def explained(result: Result, device: str, deviations: Iterable[Deviation]) -> Result:
    """Turn a known difference into a note; say so of one that differs no more."""
    for deviation in deviations:
        if deviation.applies_to(result.id, device):
            if result.verdict == "differs":
                return replace(
                    result, verdict="note", text=f"known: {deviation.why}: {result.text}"
                )
            if result.verdict == "pass":
                text = f"no longer differs: remove it from the known deviations ({deviation.why})"
                return replace(result, verdict="differs", text=text)
    return result


class Lines:
    """The results of a run, on disk as soon as they are there: a line of JSON for each."""

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self._file: TextIO | None = None
        self.path = path
        if path is not None:
            self._file = path.open("w", encoding="utf-8")
            self._write(header)

    def add(self, result: Result) -> None:
        self._write(asdict(result))

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self, remove: bool) -> None:
        if self._file and self.path:
            self._file.close()
            if remove:
                self.path.unlink()


def write(path: Path, header: dict[str, Any], results: Iterable[Result]) -> None:
    """Write the whole report; the file is there as a whole or not at all."""
    content = {**header, "results": [asdict(result) for result in results]}
    unfinished = path.with_name(path.name + ".part")
    text = json.dumps(content, indent=1, ensure_ascii=False)
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


def read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """Read a report, or the lines of a run that was cut off.

    Raises:
        ValueError: The file is neither.
    """
    text = path.read_text(encoding="utf-8")
    try:
        header = json.loads(text)
        entries = header.pop("results")
    except (ValueError, KeyError, AttributeError, TypeError):
        # The last line of a killed process may be cut.
        lines = list(_whole_lines(text))
        if not lines or "format" not in lines[0]:
            raise ValueError(f"{path}: expected a report of `check`") from None
        header, *entries = lines
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {header.get('format')}")
    return header, [Result(**entry) for entry in entries]


def _whole_lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            return
        if isinstance(entry, dict):
            yield entry


ERROR = "error"  # the figure of the largest error, as a share of the allowed one


class Table:
    """Prints a line for each group of results, and for each one that needs to be read."""

    def __init__(self, words: Words, write: Callable[[str], object] = print) -> None:
        self._words, self._write = words, write
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
            self._write(f"\n{self._words(self._section)}")
        counts = Counter(result.verdict for result in group)
        verdicts = ", ".join(f"{self._words(x)} {n}" for x, n in counts.most_common())
        line = f"  {group[0].group:<44} {verdicts}"
        if len(group) == 1:
            line = f"  {group[0].group:<44} {self._words(group[0].verdict)}"
            line += f": {_first_line(group[0].text)}" if group[0].text else ""
        errors = [result.figures[ERROR] for result in group if ERROR in result.figures]
        if errors:
            line += f"; {self._words('largest error')} {max(errors):.2f}"
            line += f" {self._words('of the allowed one')}"
        self._write(line)
        for result in group:
            if result.verdict == "differs" or (result.verdict == "note" and len(group) > 1):
                text = result.text.replace("\n", "\n      ")
                self._write(f"    {self._words(result.verdict)}  {result.id}\n      {text}")

    def total(self, results: Iterable[Result]) -> None:
        self.flush()
        counts = Counter(result.verdict for result in results)
        summary = ", ".join(f"{self._words(x)} {n}" for x, n in counts.most_common())
        self._write(f"\n{summary}")


def _first_line(text: str) -> str:
    return text.splitlines()[0]


def compare(first: Path, second: Path, write: Callable[[str], object] = print) -> int:
    """Print what two reports say differently of the same probes; return 1 if anything."""
    (header, results), (other_header, other_results) = read(first), read(second)
    by_id = {result.id: result for result in other_results}
    for name in sorted({*header, *other_header}):
        if header.get(name) != other_header.get(name):
            write(f"{name}: {header.get(name)} -> {other_header.get(name)}")
    differences = 0
    for result in results:
        other = by_id.pop(result.id, None)
        if other is None:
            write(f"{result.id}: {result.verdict} -> not probed")
        elif result.verdict != other.verdict or (
            result.section == "environment" and result.text != other.text
        ):
            differences += 1
            write(f"{result.id}: {_told(result)} -> {_told(other)}")
    for result in by_id.values():
        write(f"{result.id}: not probed -> {result.verdict}")
    write(f"{differences} of {len(results)} differ")
    return 1 if differences else 0


def _told(result: Result) -> str:
    return f"{result.verdict} ({_first_line(result.text)})" if result.text else result.verdict
