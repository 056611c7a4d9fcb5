"""Every block of Python on a page runs as it is printed, and writes what the page says.

The blocks of a page (support/pages.py) run in their order, in one new process, and share their
names. In what they write, `...` stands for any text.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch
from support import fresh
from support.checkout import ROOT
from support.pages import FENCE, blocks_of
from support.turns import nightly, seed

LANGUAGES = {"python", "bash", "text", "cpp", "yaml"}
# Writes a mark before what each block writes, and the last line of an error that the page shows.
PROGRAM = """
import os, traceback, ascend_attn_ops
os.chdir({folder!r})
if {device!r}:
    ascend_attn_ops.set_limits(*{device!r})
names = {{"__name__": "__main__"}}
for at, (code, raises) in enumerate({blocks!r}):
    print("{mark}", flush=True)
    try:
        exec(compile(code, f"block {{at + 1}}", "exec"), names)
    except Exception as error:
        if {device!r} and any(x in str(error) for x in {lacks!r}):
            break
        if not raises:
            raise
        print(traceback.format_exception_only(error)[-1].strip())
"""
MARK = "--- a block ---"
DEVICES = [("A2", "8.5"), ("A3", "9.1")]
LACKS = ("expected a product that has", "cmp_ratio: expected")
MISSING = re.compile(
    "No module named 'transformers'|enable_dtensor.* expected 2.10 or later"
    + "|_PerLayerConfigView" * (torch.__version__ < (2, 8))  # as NOT_WITH_2_7
)
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# tools/lint.py compares the blocks of Chinese pages with those of the English ones.
PAGES = [
    *(ROOT / x for x in ("README.md", "CONTRIBUTING.md", "simulation/README.md")),
    *(x for x in sorted((ROOT / "docs").rglob("*.md")) if x.parent.name != "zh"),
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda x: str(x.relative_to(ROOT)))
RUNS = [
    pytest.param(page, x, marks=() if (i + seed()) % 3 == turn else nightly)
    for i, page in enumerate(PAGES) for turn, x in enumerate(DEVICES) if blocks_of(page)
]  # fmt: skip


def run(page: Path, folder: Path, device: tuple[str, str] | None = None) -> fresh.Ended:
    fields = {"blocks": [(x.code, x.raises) for x in blocks_of(page)], "device": device}
    program = PROGRAM.format(folder=str(folder), mark=MARK, lacks=LACKS, **fields)
    ended = fresh.run(program, seconds=200)
    if ended.status != 0 and (missing := MISSING.search(ended.err)):
        pytest.skip(missing[0])
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.parametrize(("page", "device"), RUNS)
def test_a_page_on_another_device(page: Path, device: tuple[str, str], tmp_path: Path) -> None:
    run(page, tmp_path, device)


@each_page
def test_the_blocks_of_a_page(page: Path, tmp_path: Path) -> None:
    written = run(page, tmp_path).out.split(MARK + "\n")[1:]
    for block, out in zip(blocks_of(page), written, strict=True):
        if block.output is not None:
            same = doctest.OutputChecker().check_output(block.output, out, SAME)
            assert same, f"{block.code}\nwrites\n{out}\nand the page says\n{block.output}"


@each_page
def test_a_page_shows_code_in_fences(page: Path) -> None:
    """A fence has a language, and an error of ours stands behind the call that raises it."""
    text = page.read_text(encoding="utf-8")
    for block in FENCE.finditer(text):
        assert block["language"] in LANGUAGES, block[0]
        assert block["language"] != "text" or "ascend::" not in block["code"], block[0]
    # Behind an empty line, four spaces make code, unless an item of a list goes on.
    assert not re.search(r"^(?![-*\d ]).*\n\n {4}\S", FENCE.sub("", text), re.M)
