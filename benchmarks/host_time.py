"""Host time per call: ours against torch_npu's own operator for the same aclnn function.

    python benchmarks/host_time.py

Runs in the environment of the NPU tests (torch_npu, and the extension built against it): the real
torch_npu on the simulated CANN, whose functions return at once. For each level of
the task queue, batches of calls alternate, and the median of each counts: our public function, our
operator in torch.ops, torch_npu's operator, and the two phases, the bare C calls with their
tensors, which no operator can avoid.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("python", "simulation")]

import cann_simulator  # noqa: E402

# Before torch. A process that measures one level has it in its environment.
cann_simulator.start(task_queue=int(os.environ.get("TASK_QUEUE_ENABLE", "1")))

import ascend_attn_ops  # noqa: E402
import torch  # noqa: E402
from harness import Benchmark, Call, interleaved  # noqa: E402
from torch import Tensor  # noqa: E402

SIMULATED_CANN = REPOSITORY / "simulation/cann_simulator/cann/lib64"
LEVELS = (0, 1, 2)
BATCHES = 200
# Fewer calls than the task queue has slots.
CALLS = 200


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="npu")


def all_ways(name: str, theirs: Call, *tensors: Tensor, **keywords: Any) -> dict[str, Call]:
    """Our function and our operator with these arguments, and torch_npu's call."""
    operator = getattr(torch.ops.ascend, name).default
    return {
        "ours": partial(getattr(ascend_attn_ops, name), *tensors, **keywords),
        "ours, torch.ops": partial(operator, *tensors, **keywords),
        "torch_npu": theirs,
    }


def sparse_flash_attention_grad() -> dict[str, Call]:
    """24 arguments, five of them results."""
    heads, tokens = 8, 4
    query, d_out, out = (empty(1, tokens, heads, 512) for _ in range(3))
    key = empty(1, tokens, 1, 512)
    ropes = {"query_rope": empty(1, tokens, heads, 64), "key_rope": empty(1, tokens, 1, 64)}
    indices = empty(1, tokens, 1, 2048, dtype=torch.int32)
    statistic = empty(1, 1, tokens, heads, dtype=torch.float32)
    tensors = (query, key, key, indices, d_out, out, statistic, statistic)
    theirs = partial(
        torch.ops.npu.npu_sparse_flash_attention_grad.default, *tensors, 0.04, 1, *ropes.values(),
        pre_tokens=2147483647, next_tokens=2147483647,
    )  # fmt: skip
    return all_ways("sparse_flash_attention_grad", theirs, *tensors, scale_value=0.04, **ropes)


def scatter_pa_kv_cache_() -> dict[str, Call]:
    """12 arguments, in place: one decoded token of four sequences."""
    key, value = (empty(4, 8, 128) for _ in range(2))
    key_cache, value_cache = (empty(16, 128, 8, 128) for _ in range(2))
    slots = empty(4, dtype=torch.int32)
    scatter = torch.ops.npu.npu_scatter_pa_kv_cache.default
    theirs = partial(scatter, key, value, key_cache, value_cache, slots)
    return all_ways("scatter_pa_kv_cache_", theirs, key, key_cache, slots, value, value_cache)


def decoding() -> tuple[dict[str, Any], Tensor]:
    """One token of each of four sequences over paged keys, as both libraries name the arguments;
    and the lengths of the keys, which they name differently."""
    ones = torch.ones(4, dtype=torch.int32, device="npu")
    pages = {"actual_seq_lengths_query": ones, "block_table": empty(4, 8, dtype=torch.int32)}
    return pages, ones.clone()


def lightning_indexer() -> dict[str, Call]:
    """13 arguments, one decoded token of four sequences."""
    tensors = empty(4, 64, 128), empty(16, 128, 1, 128), empty(4, 64)
    pages, lengths = decoding()
    both = {"actual_seq_lengths_key": lengths, "layout_key": "PA_BSND", **pages}
    theirs = partial(
        torch.ops.npu.npu_lightning_indexer.default, *tensors, layout_query="TND", **both
    )
    return all_ways("lightning_indexer", theirs, *tensors, layout="TND", **both)


def sparse_flash_attention() -> dict[str, Call]:
    """18 arguments, one decoded token of four sequences."""
    key = empty(16, 128, 1, 512)
    tensors = empty(4, 64, 512), key, key, empty(4, 1, 2048, dtype=torch.int32)
    pages, lengths = decoding()
    both = {
        "query_rope": empty(4, 64, 64), "key_rope": empty(16, 128, 1, 64), "layout_kv": "PA_BSND",
        **pages,
    }  # fmt: skip
    theirs = partial(
        torch.ops.npu.npu_sparse_flash_attention.default, *tensors, 0.04,
        actual_seq_lengths_kv=lengths, layout_query="TND", attention_mode=2, **both,
    )  # fmt: skip
    options = {"scale_value": 0.04, "layout": "TND", "actual_seq_lengths_key": lengths, **both}
    operator = partial(
        torch.ops.ascend.sparse_flash_attention.default, *tensors, return_softmax_lse=False,
        **options,
    )  # fmt: skip
    ways = all_ways("sparse_flash_attention", theirs, *tensors, **options)
    return {**ways, "ours, torch.ops": operator}


OPERATORS = {
    operator.__name__: operator
    for operator in (
        sparse_flash_attention_grad, scatter_pa_kv_cache_, lightning_indexer,
        sparse_flash_attention,
    )
}  # fmt: skip


def compiled_bare_calls(folder: str) -> str:
    """Return the library of bare_calls.cpp, for a process on the simulated CANN."""
    torch_npu = importlib.util.find_spec("torch_npu")
    assert torch_npu is not None
    assert torch_npu.origin is not None
    headers = Path(torch_npu.origin).parent / "include/third_party/acl/inc"
    library = f"{folder}/bare_calls.so"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O2", "-shared", "-fPIC"]
    command += [f"-isystem{headers}", "benchmarks/bare_calls.cpp", "-o", library]
    command += [f"-L{SIMULATED_CANN}", "-lopapi", f"-Wl,-rpath-link,{SIMULATED_CANN}"]
    # libopapi.so needs libraries of torch, which the process has loaded.
    command += ["-Wl,--unresolved-symbols=ignore-in-shared-libs"]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return library


def bare_call_seconds(operator: str, calls: int) -> float:
    """Return the time of the two phases with their tensors, without PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        call = getattr(ctypes.CDLL(compiled_bare_calls(folder)), f"bare_{operator}")
    call.restype = ctypes.c_double
    return float(call(calls)) / 1e6


def print_seconds(operator: str, batches: int) -> None:
    """Print what a new process measures, as JSON."""
    npu = torch.get_device_module("npu")
    with cann_simulator.computing(False), torch.no_grad():
        seconds = interleaved(OPERATORS[operator](), batches, count=CALLS, between=npu.synchronize)
        seconds["two phases"] = bare_call_seconds(operator, CALLS * batches)
    print(json.dumps(seconds))


def in_new_process(operator: str, batches: int, level: int) -> dict[str, float]:
    """Measure in a new process, because torch_npu reads the level of its queue at startup."""
    code = f"import host_time; host_time.print_seconds({operator!r}, {batches})"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY / "benchmarks",
        env={**os.environ, **cann_simulator.environment(task_queue=level)},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        sys.exit(result.stderr)
    seconds: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=BATCHES)
    for operator in OPERATORS:
        for level in LEVELS:
            seconds = in_new_process(operator, run.rounds, level)
            run.show(f"{operator}, level {level}", seconds)


if __name__ == "__main__":
    main()
