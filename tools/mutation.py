"""How many small errors in C++ and Python the tests notice.

    python tools/mutation.py [NUMBER ...]

The errors, mutants, stand in tools/mutants.txt; without a number, all of them run. Builds a copy of
the checkout in out/mutation, once, at -O1: each mutant is a branch there, which an environment
variable takes. Mutants of csrc/npu run the NPU tests, at one level of the task queue, those of
simulation/ the tests of the simulated CANN, and all others the CPU tests.

A mutant runs the commit tier up to the first failure, beginning with the test that noticed it the
last time and the test files that concern it, and all tests if nothing fails; examples and tests of
the checkout are left out. A failure, a crash and a hang count as noticed. Exit status 1: the tests
fail without a mutant, the commit tier notices less than 95 %, or all tests notice less than 100 %.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import instrumented
from instrumented import CPU, NPU, ROOT, built, test_file

FOLDER = ROOT / "out/mutation"
LEAST_NOTICED = 0.95
# Test files that concern a mutated file, by a part of its name; what is fast comes first.
FIRST = {
    "csrc/npu/aclnn/": "npu_launch_order npu_graph_updates npu_graphs npu_launcher npu_faults",
    "csrc/npu/": "npu_equals_cpu npu_devices npu_arrivals npu_sparse_statistics "
    "npu_unwritten_rows npu_value_checks npu_errors",
    "simulation/": "",
    "csrc/": "attention_update lightning_indexer indexer_loss paged_keys infinities "
    "numerics errors autograd scatter_pa_kv_cache properties prompt_flash_attention "
    "flash_attention_score forms_of_arguments threads autocast limits out_forms "
    "cache_layouts memory_and_sizes verdicts",
    "/distributed/": "dense_context_parallel agreement sparse_context_parallel communication "
    "dtensor training",
    "/torch_npu/": "npu_operators_inference npu_operators_others npu_operators_errors "
    "npu_operators_fusion_attention npu_operators_sparse npu_operators_v4",
    "/flash_attn/": "flash_attn flash_attn_errors flash_attn_with_kvcache varlen_attn",
    "/_core/": "errors_python flops paged_keys scatter_pa_kv_cache statistics sparse_models "
    "dense_models flash_attn",
    "/ops/": "errors_python flash_attention_score indexer_loss",
    "/nn/": "modules quantize_attention training_helpers errors_python",
}
# These run parts of the checkout alone, without the module that says which mutant is active.
WITHOUT_NPU = ["--ignore=tests/npu/test_npu_packaging.py"]
# pytest and its tests, by what the path of a mutated file begins with. The tests that are left out
# test the checkout itself, or run programs whose parts other tests run.
TESTS: dict[str, list[str | Path]] = {
    "csrc/npu/": [NPU, "tests/npu/run.py", "tests/npu", *WITHOUT_NPU],
    "simulation/": [NPU, "tests/npu/run.py", "simulation/tests", "tests/npu", *WITHOUT_NPU],
    "": [CPU, "-m", "pytest", *(f"--ignore=tests/{x}" for x in ("npu", "repository", "examples"))],
}


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

    def branch(self, original: str) -> str:
        if self.file.endswith(".py"):
            return f"(({self.mutated}) if mutant({self.number}) else ({original}))"
        return f"(mutant({self.number}) ? ({self.mutated}) : ({original}))"

    @property
    def tests(self) -> str:
        return next(folder for folder in TESTS if self.file.startswith(folder))

    @property
    def noticed_by(self) -> Path:
        return FOLDER / f"mutant-{self.number}.noticed"

    @property
    def noticed_before(self) -> Path:
        return self.noticed_by.with_suffix(".before")

    @property
    def first(self) -> list[str]:
        """The test that noticed it before, and the files that concern it, in this order."""
        known = [self.noticed_before.read_text()] if self.noticed_before.exists() else []
        return known + concerned(self.file)

    def __str__(self) -> str:
        return f"{self.number:3} {self.file}: {self.text} -> {self.mutated}"


def all_mutants() -> list[Mutant]:
    mutants: list[Mutant] = []
    file = ""
    for line in (ROOT / "tools/mutants.txt").read_text().splitlines():
        if line.startswith(" "):
            text, mutated = line.strip().split(" -> ")
            mutants.append(Mutant(len(mutants) + 1, file, text, mutated))
        elif not line.startswith("#"):
            file = line
    return mutants


def with_branches(mutants: list[Mutant]) -> dict[str, str]:
    """Returns the mutated files, each with all its mutants."""
    sources = {}
    for file in dict.fromkeys(x.file for x in mutants):
        source = (ROOT / file).read_text()
        here = [(x.place(source), x) for x in mutants if x.file == file]
        for (begin, end), x in sorted(here, reverse=True):
            source = source[:begin] + x.branch(source[begin:end]) + source[end:]
        if file.endswith(".py"):
            future = "from __future__ import annotations\n"
            sources[file] = source.replace(future, future + "from mutant import mutant\n", 1)
        else:
            sources[file] = f'#include "{FOLDER}/tools/mutant.h"\n{source}'
    return sources


def concerned(file: str) -> list[str]:
    """The test files to run first, in this order. Files of its own operator come before others."""
    names = next(names.split() for part, names in FIRST.items() if part in file)
    return [test_file(name) for name in sorted(names, key=lambda x: x not in file)]


def run(numbers: dict[int, list[str]], tests: str, jobs: int, options: list[str]) -> None:
    """Runs tests of the copy for each number of a mutant, beginning with its test files."""
    listed = FOLDER / "mutants.json"
    listed.write_text(json.dumps(numbers))
    environment = {
        "MUTANTS": str(listed), "MUTANT_JOBS": str(jobs), "NPU_LEVELS": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    options = ["-x", "-q", "--tb=short", "--disable-warnings", "--capture=sys", *options]
    command = [*TESTS[tests], *options, "-p", "mutant", "-p", "no:cacheprovider"]
    if not instrumented.run(FOLDER, command, environment):
        sys.exit("pytest did not run the mutants")


def main() -> int:
    parser = instrumented.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run at a time")
    parser.add_argument("number", nargs="*", type=int, help="of a mutant; without, all")
    arguments = parser.parse_args()
    everything = all_mutants()
    mutants = [x for x in everything if not arguments.number or x.number in arguments.number]
    built(FOLDER, ["-O1"], changed=with_branches(everything))
    shutil.copyfile(ROOT / "tools/mutant.py", FOLDER / "python/mutant.py")
    (FOLDER / "mutant-0.noticed").unlink(missing_ok=True)
    for x in mutants:
        if x.noticed_by.exists():
            x.noticed_by.replace(x.noticed_before)
    left, most_left = mutants, (1 - LEAST_NOTICED) * len(mutants)
    for tier, options in (("the commit tier", []), ("all tests", ["--all"])):
        for tests in TESTS:
            numbers = {x.number: x.first for x in left if x.tests == tests}
            if not options and not arguments.number:
                numbers = {0: [], **numbers}  # without a mutant
            if numbers:
                run(numbers, tests, arguments.jobs, options)
            if (failed := FOLDER / "mutant-0.noticed").exists():
                sys.exit(f"without a mutant there is a failure: {failed.read_text()}")
        left = [x for x in left if not x.noticed_by.exists()]
        noticed = (
            f"{len(mutants) - len(left)} of {len(mutants)} mutants were noticed by {tier}; not"
        )
        print(noticed, *left, sep="\n", flush=True)
        if len(left) > most_left:
            return 1
        most_left = 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
