"""The products of processors without torch's brgemm, at every vector width of this one.

    python benchmarks/products.py

One thread, float32, for sizes that the operators multiply: our product, three plain loops, the
limit of the vector unit (multiplications and additions in registers alone), and torch.mm, which
uses all that the processor has. Compiles products.cpp with $CXX, or g++.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from harness import recorder
from results import parser
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).parents[1]
SIZES = [(64, 128, 128), (64, 512, 128), (64, 128, 512), (128, 64, 576), (8, 512, 128)]
# Values of ASCEND_ATTN_OPS_CPU_CAPABILITY up to this processor's, which torch names.
CAPABILITIES = {
    "AVX2": ["baseline", "avx2"],
    "AVX512": ["baseline", "avx2", "avx512"],
}.get(torch.backends.cpu.get_cpu_capability(), ["baseline"])


def compile_into(folder: str) -> str:
    program = f"{folder}/products"
    sources = ["benchmarks/products.cpp"]
    sources += [f"csrc/cpu/common/{name}.cpp" for name in ("portable_gemm", "capability")]
    compiler = os.environ.get("CXX", "g++")
    options = ["-std=c++20", "-O3", "-fopenmp-simd", "-Icsrc", "-o", program]
    options += [f"-isystem{path}" for path in include_paths()]
    subprocess.run([compiler, *options, *sources], cwd=ROOT, check=True)
    return program


def gflops_of_torch(m: int, n: int, k: int, rounds: int) -> float:
    """Return what torch.mm reaches at its fastest."""
    a, b, c = torch.ones(m, k), torch.ones(k, n), torch.empty(m, n)
    seconds = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        torch.mm(a, b, out=c)
        seconds = min(seconds, time.perf_counter() - start)
    return 2 * m * n * k / seconds / 1e9


def main() -> None:
    arguments = parser(__doc__, rounds=200).parse_args()
    record = recorder("products", arguments.json)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, float32, GFLOP/s")
    print(f"{'':10} {'m x n x k':>14} {'ours':>7} {'loops':>7} {'limit':>7} {'share':>6} {'mm':>7}")
    with tempfile.TemporaryDirectory() as folder:
        program = compile_into(folder)
        for capability in CAPABILITIES:
            printed = subprocess.run(
                [program, *(str(size) for sizes in SIZES for size in sizes)],
                env={**os.environ, "ASCEND_ATTN_OPS_CPU_CAPABILITY": capability},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for line in printed.splitlines():
                m, n, k, *figures = line.split()
                ours, loops, limit = map(float, figures)
                mm = gflops_of_torch(int(m), int(n), int(k), arguments.rounds)
                print(
                    f"{capability:10} {f'{m} x {n} x {k}':>14} {ours:7.1f} {loops:7.1f} "
                    f"{limit:7.1f} {ours / limit:6.0%} {mm:7.1f}"
                )
                reached = {"ours": ours, "three loops": loops, "limit": limit, "torch.mm": mm}
                for name, gflops in reached.items():
                    seconds = 2e-9 * int(m) * int(n) * int(k) / gflops
                    case = f"{m} x {n} x {k}, {capability}"
                    record.add(case, name, seconds=seconds, gflops=gflops)


if __name__ == "__main__":
    main()
