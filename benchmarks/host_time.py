"""Host time per call: ours against torch_npu's own operator for the same aclnn function.

    python benchmarks/host_time.py

Runs in the environment of the NPU tests (torch_npu, and the extension built against it): the real
torch_npu on the simulated CANN, whose functions return at once. For each level of
the task queue, batches of calls of the two operators alternate; the table shows medians over them:

    call        microseconds until the call returns
    in all      microseconds until the queue has processed it
    two phases  the bare C calls with their tensors, which no operator can avoid
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("python", "simulation")]

import cann_simulator  # noqa: E402
from results import Recorder, parser  # noqa: E402

SIMULATED_CANN = REPOSITORY / "simulation/cann_simulator/cann/lib64"
LEVELS = (0, 1, 2)
BATCHES = 200
# Fewer calls than the task queue has slots.
CALLS = 200
# Our public function, our operator in torch.ops, and torch_npu's operator.
OURS, OPERATOR, THEIRS = "ascend_attn_ops", "torch.ops.ascend", "torch_npu"
Times = dict[str, tuple[float, float]]


def sparse_flash_attention_grad() -> dict[str, Callable[[], object]]:
    """24 arguments, five of them results."""
    import ascend_attn_ops
    import torch

    heads, tokens = 8, 4
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "npu"}
    query, d_out, out = (torch.empty(1, tokens, heads, 512, **options) for _ in range(3))
    key = torch.empty(1, tokens, 1, 512, **options)
    query_rope = torch.empty(1, tokens, heads, 64, **options)
    key_rope = torch.empty(1, tokens, 1, 64, **options)
    indices = torch.empty(1, tokens, 1, 2048, dtype=torch.int32, device="npu")
    statistic = torch.empty(1, 1, tokens, heads, device="npu")
    tensors = (query, key, key, indices, d_out, out, statistic, statistic)
    keywords: dict[str, Any] = {"scale_value": 0.04, "query_rope": query_rope, "key_rope": key_rope}
    ours = ascend_attn_ops.sparse_flash_attention_grad
    operator = torch.ops.ascend.sparse_flash_attention_grad.default
    theirs = torch.ops.npu.npu_sparse_flash_attention_grad.default
    return {
        OURS: lambda: ours(*tensors, **keywords),
        OPERATOR: lambda: operator(*tensors, **keywords),
        THEIRS: lambda: theirs(
            *tensors, 0.04, 1, query_rope, key_rope, pre_tokens=2147483647, next_tokens=2147483647
        ),
    }


def scatter_pa_kv_cache_() -> dict[str, Callable[[], object]]:
    """12 arguments, in place: one decoded token of four sequences."""
    import ascend_attn_ops
    import torch

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "npu"}
    key, value = (torch.empty(4, 8, 128, **options) for _ in range(2))
    key_cache, value_cache = (torch.empty(16, 128, 8, 128, **options) for _ in range(2))
    slots = torch.empty(4, dtype=torch.int32, device="npu")
    ours = ascend_attn_ops.scatter_pa_kv_cache_
    operator = torch.ops.ascend.scatter_pa_kv_cache_.default
    theirs = torch.ops.npu.npu_scatter_pa_kv_cache.default
    return {
        OURS: lambda: ours(key, key_cache, slots, value, value_cache),
        OPERATOR: lambda: operator(key, key_cache, slots, value, value_cache),
        THEIRS: lambda: theirs(key, value, key_cache, value_cache, slots),
    }


def _decoding() -> dict[str, Any]:
    """One token of each of four sequences over paged keys, as both libraries name the arguments."""
    import torch

    return {
        "actual_seq_lengths_query": torch.ones(4, dtype=torch.int32, device="npu"),
        "block_table": torch.empty(4, 8, dtype=torch.int32, device="npu"),
    }


def lightning_indexer() -> dict[str, Callable[[], object]]:
    """13 arguments, one decoded token of four sequences."""
    import ascend_attn_ops
    import torch

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "npu"}
    query = torch.empty(4, 64, 128, **options)
    key = torch.empty(16, 128, 1, 128, **options)
    weights = torch.empty(4, 64, **options)
    keywords = _decoding()
    lengths = torch.ones(4, dtype=torch.int32, device="npu")
    mine = {"layout": "TND", "layout_key": "PA_BSND", "actual_seq_lengths_key": lengths, **keywords}
    ours = ascend_attn_ops.lightning_indexer
    operator = torch.ops.ascend.lightning_indexer.default
    theirs = torch.ops.npu.npu_lightning_indexer.default
    return {
        OURS: lambda: ours(query, key, weights, **mine),
        OPERATOR: lambda: operator(query, key, weights, **mine),
        THEIRS: lambda: theirs(
            query, key, weights, actual_seq_lengths_key=lengths, layout_query="TND",
            layout_key="PA_BSND", **keywords,
        ),
    }  # fmt: skip


def sparse_flash_attention() -> dict[str, Callable[[], object]]:
    """18 arguments, one decoded token of four sequences."""
    import ascend_attn_ops
    import torch

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "npu"}
    query, query_rope = torch.empty(4, 64, 512, **options), torch.empty(4, 64, 64, **options)
    key, key_rope = (torch.empty(16, 128, 1, size, **options) for size in (512, 64))
    indices = torch.empty(4, 1, 2048, dtype=torch.int32, device="npu")
    keywords = {"query_rope": query_rope, "key_rope": key_rope, **_decoding()}
    lengths = torch.ones(4, dtype=torch.int32, device="npu")
    mine = {
        "scale_value": 0.04, "layout": "TND", "layout_kv": "PA_BSND",
        "actual_seq_lengths_key": lengths, **keywords,
    }  # fmt: skip
    tensors = (query, key, key, indices)
    ours = ascend_attn_ops.sparse_flash_attention
    operator = torch.ops.ascend.sparse_flash_attention.default
    theirs = torch.ops.npu.npu_sparse_flash_attention.default
    return {
        OURS: lambda: ours(*tensors, **mine),
        OPERATOR: lambda: operator(*tensors, return_softmax_lse=False, **mine),
        THEIRS: lambda: theirs(
            *tensors, 0.04, actual_seq_lengths_kv=lengths, layout_query="TND",
            layout_kv="PA_BSND", attention_mode=2, **keywords,
        ),
    }  # fmt: skip


OPERATORS: dict[str, Callable[[], dict[str, Callable[[], object]]]] = {
    operator.__name__: operator
    for operator in (
        sparse_flash_attention_grad,
        scatter_pa_kv_cache_,
        lightning_indexer,
        sparse_flash_attention,
    )
}


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


def bare_call_microseconds(operator: str, calls: int) -> float:
    """Return the time of the two phases with their tensors, without PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        call = getattr(ctypes.CDLL(compiled_bare_calls(folder)), f"bare_{operator}")
    call.restype = ctypes.c_double
    return float(call(calls))


def measure(operator: str, batches: int) -> tuple[Times, float]:
    import torch

    npu = torch.get_device_module("npu")
    samples: dict[str, list[tuple[float, float]]] = {}
    functions = OPERATORS[operator]()
    with cann_simulator.computing(False), torch.no_grad():
        for _ in range(batches):
            for name, function in functions.items():
                npu.synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    function()
                called = time.perf_counter()
                npu.synchronize()
                done = time.perf_counter()
                times = ((called - start) / CALLS * 1e6, (done - start) / CALLS * 1e6)
                samples.setdefault(name, []).append(times)
        bare = bare_call_microseconds(operator, CALLS * batches)
    medians = {
        name: (statistics.median(x for x, _ in rows), statistics.median(x for _, x in rows))
        for name, rows in samples.items()
    }
    return medians, bare


def in_new_process(operator: str, batches: int, level: int) -> tuple[Times, float]:
    """Measure in a new process, because torch_npu reads the level of its queue at startup."""
    result = subprocess.run(
        [sys.executable, __file__, "--only", operator, f"--rounds={batches}"],
        env={**os.environ, **cann_simulator.environment(task_queue=level)},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        sys.exit(result.stderr)
    times, bare = json.loads(result.stdout.splitlines()[-1])
    return times, bare


def main() -> None:
    options = parser(__doc__, rounds=BATCHES)
    options.add_argument("--only", choices=OPERATORS, help="print the times of one as JSON")
    arguments = options.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.rounds)))
        return
    record = Recorder("host_time", arguments.json)
    columns = "".join(f"{name:>18}" for name in (OURS, OPERATOR, THEIRS))
    for operator in OPERATORS:
        print(f"{operator}, microseconds per call; in brackets the ratio to torch_npu's")
        print(f"{'TASK_QUEUE_ENABLE':<18}{'':>8}{columns}{'two phases':>12}")
        for level in LEVELS:
            times, bare = in_new_process(operator, arguments.rounds, level)
            case = f"{operator}, level {level}"
            record.add(case, "two phases", seconds=bare / 1e6)
            for name, shown in ((OURS, "ours"), (OPERATOR, "ours, torch.ops"), (THEIRS, THEIRS)):
                call, in_all = times[name]
                record.add(case, shown, seconds=call / 1e6, seconds_in_all=in_all / 1e6)
            for index, what in enumerate(("call", "in all")):
                theirs = times[THEIRS][index]
                cells = "".join(
                    f"{times[name][index]:>11.1f} ({times[name][index] / theirs:4.2f})"
                    for name in (OURS, OPERATOR)
                )
                floor = f"{bare:12.1f}" if index == 0 else ""
                label = str(level) if index == 0 else ""
                print(f"{label:<18}{what:>8}{cells}{theirs:>18.1f}{floor}", flush=True)


if __name__ == "__main__":
    main()
