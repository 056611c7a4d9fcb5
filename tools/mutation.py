"""How many small errors in C++ and Python the CPU tests notice.

    python tools/mutation.py [NUMBER ...]

The errors, mutants, stand in tools/mutants.py; without a number, all of them run. Builds a copy of
the checkout in out/mutation, once, at -O1: each mutant of C++ is a branch there, which an
environment variable takes. A mutant of Python is written into the copy before its run.

A mutant runs the test files that concern it, up to the first failure, and where nothing fails, all
others of the CPU but those that tools/mutation.py names as slow. A failure, a crash and a hang
count as noticed. Exit status 1: the tests fail without a mutant, or notice less than 95 %.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from instrumented import ROOT, build, copied, test_file
from mutants import KERNELS, PACKAGE, RULES

CPU = ROOT / ".venv/bin/python"
FOLDER = ROOT / "out/mutation"
FLAGS = ["-O1", "-include", str(ROOT / "tools/mutant.h")]
LEAST_NOTICED = 0.95
# Seconds; the whole suite takes less.
LONGEST_RUN = 1800
# Test files that concern a mutated file, by a part of its name; what is fast comes first.
FIRST = {
    "csrc/": "attention_update lightning_indexer indexer_loss paged_keys infinities parts_of_keys "
    "numerics errors autograd scatter_pa_kv_cache properties prompt_flash_attention "
    "flash_attention_score sequence_lengths threads autocast limits_of_tasks out_forms "
    "cache_layouts prompt_flash_attention_int8 memory_and_sizes verdicts",
    "/distributed/": "dense_context_parallel agreement sparse_context_parallel communication "
    "dtensor training",
    "/integrations/": "dense_models sparse_models",
    "/npu_operators/": "npu_operators_inference npu_operators_others npu_operators_errors "
    "npu_operators_fusion_attention npu_operators_sparse",
    "_arguments.py": "errors_python memory_and_sizes",
    "_dense_attention.py": "errors_python flash_attention_score",
    "_flash_": "flash_attn flash_attn_errors flash_attn_with_kvcache varlen_attn",
    "_flops.py": "flops",
    "_packing.py": "integrations/sparse_models integrations/dense_models",
    "_pages.py": "paged_keys errors_python flash_attn flash_attn_with_kvcache npu_operators_errors",
    "_statistics.py": "statistics flash_attn distributed/dense_context_parallel varlen_attn",
    "_varlen_attention.py": "varlen_attn",
    "kl_loss.py": "indexer_loss errors_python",
    "masks.py": "errors_python flash_attention_score prompt_flash_attention",
    "modules.py": "modules errors_python",
    "quantization.py": "quantize_attention",
    "training.py": "checkpointing attach_loss errors_python",
}
# They start processes, which run what other files test as well.
SLOW = {
    "test_benchmarks", "test_context_parallel_decode", "test_distributed_example", "test_dtensor",
    "test_example", "test_int8_example", "test_killed_rank", "test_limits", "test_packaging",
    "test_paged_decode", "test_training", "test_transformers_example",
}  # fmt: skip


class Mutant(NamedTuple):
    number: int
    file: str
    text: str
    mutated: str

    def place(self, source: str) -> tuple[int, int]:
        """Where the part to be replaced begins and ends."""
        before, marked, rest = self.text.partition("«")
        part, _, after = rest.partition("»") if marked else (before, "", "")
        before = before if marked else ""
        if source.count(before + part + after) != 1:
            sys.exit(f"mutant {self.number}: expected once in {self.file}: {self.text}")
        begin = source.index(before + part + after) + len(before)
        return begin, begin + len(part)

    def __str__(self) -> str:
        text = re.sub(r"\s+", " ", self.text)
        return f"{self.number:3} {self.file}: {text} -> {self.mutated or 'nothing'}"


def all_mutants() -> list[Mutant]:
    package = {f"python/ascend_attn_ops/{file}": pairs for file, pairs in PACKAGE.items()}
    tables = {**KERNELS, **RULES, **package}
    pairs = [(file, *pair) for file, pairs in tables.items() for pair in pairs]
    return [Mutant(number, *row) for number, row in enumerate(pairs, 1)]


def write_branches(mutants: list[Mutant]) -> None:
    """Put all mutants of C++ into the copy."""
    for file in dict.fromkeys(x.file for x in mutants if x.file.startswith("csrc")):
        source = (ROOT / file).read_text()
        here = [(x.place(source), x) for x in mutants if x.file == file]
        for (begin, end), x in sorted(here, reverse=True):
            branch = f"(mutant({x.number}) ? ({x.mutated}) : ({source[begin:end]}))"
            source = source[:begin] + branch + source[end:]
        (FOLDER / file).write_text(source)


def package_with(mutant: Mutant | None) -> Path:
    """A folder for PYTHONPATH, with the mutated file where it is one of Python."""
    if mutant is None or mutant.file.startswith("csrc"):
        return FOLDER / "python"
    folder = FOLDER / f"mutant-{mutant.number}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(FOLDER / "python", folder, copy_function=os.symlink)
    source = (ROOT / mutant.file).read_text()
    begin, end = mutant.place(source)
    file = folder / Path(mutant.file).relative_to("python")
    file.unlink()
    file.write_text(source[:begin] + mutant.mutated + source[end:])
    return folder


def test_files() -> list[str]:
    files = [str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")]
    return sorted(x for x in files if not x.startswith("tests/npu/"))


def concerned(file: str) -> list[str]:
    """The test files to run first, in this order."""
    names = next(names.split() for part, names in FIRST.items() if part in file)
    return [test_file(name) for name in names]


def failure(tests: list[str], mutant: Mutant | None) -> str | None:
    """Returns the first test that fails; None if all pass."""
    number = mutant.number if mutant else 0
    log = FOLDER / f"mutant-{number}.log"
    environment = {
        **os.environ,
        "MUTANT": str(number),
        "PYTHONPATH": str(package_with(mutant)),
        # A module that was compiled before is taken for the mutant of the same size.
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = ["-x", "-v", "--tb=short", "-p", "no:cacheprovider"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [CPU, "-m", "pytest", *options, *tests], cwd=FOLDER, env=environment,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(LONGEST_RUN)
        except subprocess.TimeoutExpired:
            # With the processes of its tests.
            os.killpg(process.pid, signal.SIGKILL)
            status = -process.wait()
    if status == 0:
        return None
    named = re.findall(r"(?m)^(?:FAILED |ERROR )?(tests/\S+)", log.read_text(errors="replace"))
    return f"{named[-1] if named else 'pytest'}{'' if status == 1 else f' (status {status})'}"


def noticed_by(mutant: Mutant) -> str | None:
    first = concerned(mutant.file)
    rest = [file for file in test_files() if file not in first and Path(file).stem not in SLOW]
    found = failure(first, mutant) or failure(rest, mutant)
    print(f"{mutant}\n    {found or 'SURVIVED'}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run at a time")
    parser.add_argument("number", nargs="*", type=int, help="of a mutant; without, all")
    arguments = parser.parse_args()
    everything = all_mutants()
    mutants = [x for x in everything if not arguments.number or x.number in arguments.number]
    for mutant in everything:
        mutant.place((ROOT / mutant.file).read_text())
    copied(FOLDER)
    write_branches(everything)
    build(FOLDER, FLAGS, CPU)
    if not arguments.number and (wrong := failure(test_files(), None)):
        sys.exit(f"without a mutant there is a failure: {wrong}")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(noticed_by, mutants))
    survivors = [mutant for mutant, by in zip(mutants, found, strict=True) if by is None]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants were noticed")
    print("\n".join(["not noticed:", *map(str, survivors)]) if survivors else "")
    return int(len(survivors) > (1 - LEAST_NOTICED) * len(mutants))


if __name__ == "__main__":
    sys.exit(main())
