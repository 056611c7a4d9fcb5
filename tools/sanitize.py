"""Runs tests and random calls with C++ that checks itself.

    python tools/sanitize.py [--threads] [--fuzz SECONDS] [--no-npu] [-- ARGUMENTS OF PYTEST]

Builds a copy of the checkout in out/sanitize-address, at -O1, with GCC's AddressSanitizer and
UndefinedBehaviorSanitizer, and with the environments .venv and .venv-npu of `make test`. Runs tests
on the CPU and on the simulated NPU, and the fuzzer. Prints what the sanitizers report, once for
each place in csrc. Exit status 1: they reported something, or a test failed.

--threads: ThreadSanitizer, a copy in out/sanitize-threads, and tests of several threads on the CPU.
Python, torch and OpenMP are not built with it: where they alone order two threads, it sees a race.
It is told of OpenMP's parallel regions (openmp_for_tsan.cpp), and of its reports those count of
which both sides are in csrc. The task queue of torch_npu is not built with it either.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from instrumented import CPU, NPU, ROOT, built, run, test_file, tests_parser

# GCC, which has its sanitizers in libraries that can be loaded early.
COMPILER = os.environ.get("CXX", "c++")
# With lines, for reports. At -O3 some kernels take minutes to compile.
FLAGS = ["-O1", "-g1"]


@dataclass(frozen=True)
class Plan:
    folder: Path
    flags: list[str]
    # Python, which is not built with them, loads them before all others, and what throws.
    libraries: list[str]
    options: dict[str, str]
    cpu_tests: list[str]
    npu_tests: list[str]


# Not "vptr": it needs the types that torch hides. A test that asks for more memory than there is
# gets none, as without a sanitizer.
ADDRESSES = Plan(
    ROOT / "out/sanitize-address",
    ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize=vptr",
     "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS"],
    ["libasan.so", "ubsan_reports.cpp", "libubsan.so", "libstdc++.so"],
    {
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=8192:"
                        "max_malloc_fill_size=1048576:handle_segv=2:handle_abort=2:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
    ["errors", "errors_python", "direct_call", "numerics", "infinities", "operators", "limits",
     "cache_layouts", "memory_and_sizes", "forms_of_arguments", "scatter_pa_kv_cache", "threads"],
    ["errors", "faults", "equals_cpu", "scatter_pa_kv_cache", "concurrency"],
)  # fmt: skip
THREADS = Plan(
    ROOT / "out/sanitize-threads",
    ["-fsanitize=thread", "-fno-omit-frame-pointer"],
    ["libtsan.so", "openmp_for_tsan.cpp", "libstdc++.so"],
    {"TSAN_OPTIONS": "exitcode=0:history_size=4"},
    ["threads", "limits"],
    [],
)
BEGIN = re.compile(
    r"(?m)^(?=={18}\nWARNING: ThreadSanitizer|==\d+==ERROR|\S+:\d+:\d+: runtime error: )"
)
TITLE = re.compile(r"(?m)(\w+Sanitizer: [\w -]+?(?= on | \(|$)|runtime error: .*)")
PLACE = re.compile(r"\S*?/((?:simulation/)?csrc/[\w/.]+:\d+)")


def file_of(library: str) -> str:
    """The compiler's, which is not where the dynamic linker looks."""
    found = subprocess.run(
        [COMPILER, f"-print-file-name={library}"], check=True, capture_output=True, text=True
    )
    return str(Path(found.stdout.strip()).resolve())


def compiled(source: str, folder: Path) -> str:
    """The library of a file beside this one."""
    library = folder / f"{source}.so"
    subprocess.run(
        [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", Path(__file__).with_name(source),
         "-o", library, "-ldl"],
        check=True,
    )  # fmt: skip
    return str(library)


def environment(plan: Plan) -> dict[str, str]:
    """Every process writes its reports to a file of its own."""
    preloaded = [
        compiled(library, plan.folder) if library.endswith(".cpp") else file_of(library)
        for library in plan.libraries
    ]
    log = plan.folder / "reports/sanitizer"
    options = {name: f"{options}:log_path={log}" for name, options in plan.options.items()}
    return {
        **options,
        "UBSAN_REPORTS": f"{log}-ubsan",
        "LD_PRELOAD": ":".join(preloaded),
        # Levels change torch_npu's code and the thread that runs ours. At level 2 the thread of the
        # task queue runs most of it.
        "NPU_LEVELS": "2",
    }


def reports(folder: Path) -> Iterator[str]:
    for file in sorted(folder.iterdir()):
        for part in BEGIN.split(file.read_text(errors="replace")):
            if BEGIN.match(part) and ("ThreadSanitizer: data race" not in part or is_ours(part)):
                yield part


def is_ours(race: str) -> bool:
    """Both sides, which come first."""
    return all(PLACE.search(side) for side in race.split("\n\n")[:2])


def summary(part: str) -> str:
    title, place = TITLE.search(part), PLACE.search(part)
    assert title
    return f"{place[1] if place else 'not in csrc'}: {title[1]}"


def main() -> int:
    parser = tests_parser(__doc__)
    parser.add_argument("--threads", action="store_true", help="ThreadSanitizer")
    parser.add_argument("--fuzz", type=float, default=300, metavar="SECONDS")
    parser.add_argument("--seed", default="0", help="of the fuzzer")
    arguments = parser.parse_args()
    plan = THREADS if arguments.threads else ADDRESSES
    npu = bool(plan.npu_tests) and not arguments.no_npu
    built(plan.folder, [*FLAGS, *plan.flags], npu=npu)
    shutil.rmtree(plan.folder / "reports", ignore_errors=True)
    (plan.folder / "reports").mkdir()
    files = [test_file(name) for name in plan.cpu_tests]
    commands = [[CPU, "-m", "pytest", *files, *arguments.pytest]]
    if npu:
        modules = " or ".join(f"test_npu_{name}" for name in plan.npu_tests)
        commands.append([NPU, "tests/npu/run.py", "-k", modules, *arguments.pytest])
    if plan is ADDRESSES:
        fuzz = ["--seconds", str(arguments.fuzz), "--seed", arguments.seed]
        commands.append([CPU, "tests/fuzz/run.py", *fuzz])
    succeeded = []
    for command in commands:
        print(*command, flush=True)
        succeeded.append(run(plan.folder, command, environment(plan)))
    found = list(reports(plan.folder / "reports"))
    for place, count in Counter(map(summary, found)).most_common():
        print(f"{count} x {place}")
        print(next(part for part in found if summary(part) == place))
    print(f"{len(found)} reports of the sanitizers")
    return int(bool(found) or not all(succeeded))


if __name__ == "__main__":
    sys.exit(main())
