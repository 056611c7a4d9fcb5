"""The host time of a call with DTensors: sparse_flash_attention on tensors of a few elements.

    python benchmarks/dtensor_call.py

One process, so that no time is communication. Calls are timed in batches short enough to run
undisturbed, and the fastest batch counts.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import Any

import ascend_attn_ops
import torch
import torch.distributed as dist
from ascend_attn_ops.distributed import enable_dtensor
from call_overhead import BATCHES, fastest
from harness import Benchmark, Call
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

_ATTENTION = partial(ascend_attn_ops.sparse_flash_attention, scale_value=1.0)


def forward_and_backward(*tensors: Tensor) -> None:
    out, *_ = _ATTENTION(*tensors)
    out.backward(tensors[0])


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=BATCHES)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
    enable_dtensor()
    mesh = init_device_mesh("cpu", (1,))
    x = torch.randn(1, 1, 1, 4)
    index = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    plain = (x, x, x, index)
    # By heads: query and out have them, key, value and the indices do not.
    heads, replicated = [Shard(2)], [Replicate()]
    query, key, sparse_indices = (
        distribute_tensor(tensor, mesh, placements)
        for tensor, placements in ((x, heads), (x, replicated), (index, replicated))
    )
    dtensors: tuple[Any, ...] = (query, key, key, sparse_indices)
    mapped = local_map(
        _ATTENTION,
        out_placements=(heads, [Shard(3)], [Shard(3)]),
        in_placements=(heads, replicated, replicated, replicated),
        device_mesh=mesh,
    )
    calls: dict[str, Call] = {
        "plain tensors": partial(_ATTENTION, *plain),
        "DTensors, later calls": partial(_ATTENTION, *dtensors),
        "the plain call in local_map": partial(mapped, *dtensors),
    }
    for name, tensors in {"plain tensors": plain, "DTensors": dtensors}.items():
        leaf = tensors[0].detach().requires_grad_()
        calls[f"{name}, forward and backward"] = partial(forward_and_backward, leaf, *tensors[1:])
    start = time.perf_counter()
    _ATTENTION(*dtensors)
    run.show("DTensors, the first call", {"ours": time.perf_counter() - start})
    for name, seconds in fastest(calls, run.rounds).items():
        run.show(name, {"ours": seconds})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
