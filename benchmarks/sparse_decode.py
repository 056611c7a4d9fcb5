"""One step of decoding with DeepSeek Sparse Attention over a paged cache, at growing context.

    python benchmarks/sparse_decode.py

Sparse: the indexer scores all keys, and the attention reads the K best. Dense: the attention reads
all keys. torch: scaled_dot_product_attention over contiguous keys. The limits are one
reading of the keys, at the speed of a sum over a large tensor, and the products, at the speed of a
large bf16 matmul; both are timed in turn with the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import ascend_attn_ops as ops
import torch
from harness import (
    PEAK_SIZE,
    Call,
    extra_memory,
    interleaved_medians,
    peak_product,
    recorder,
)
from results import Recorder, parser
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS, D, ROPE = 64, 512, 64
INDEX_HEADS, INDEX_D = 64, 128
K, BLOCK = 2048, 128
SCALE = 192**-0.5  # DeepSeek-V3.2, with heads of 128 + 64 before absorption
COLUMNS = ("ours, indexer", "ours, attention", "ours, sparse", "ours, dense", "torch", "limit")
CONTEXTS = (1024, 4096, 16384, 65536)
READ_ELEMENTS = 1 << 25  # of 2 bytes: more than a cache holds


class Step(NamedTuple):
    """One new token of each of B sequences, and caches with blocks in random order."""

    query: Tensor
    query_rope: Tensor
    query_index: Tensor
    weights: Tensor
    latent: Tensor
    rope: Tensor
    key_index: Tensor
    block_table: Tensor
    lengths: Tensor

    def pages(self) -> dict[str, Any]:
        return {
            "actual_seq_lengths_key": self.lengths,
            "block_table": self.block_table,
        }

    def select(self) -> Tensor:
        indices, _ = ops.lightning_indexer(
            self.query_index, self.key_index, self.weights, sparse_count=K,
            layout_key="PA_BSND", **self.pages(),
        )  # fmt: skip
        return indices

    def attend(self, indices: Tensor) -> Tensor:
        out, *_ = ops.sparse_flash_attention(
            self.query, self.latent, self.latent, indices, scale_value=SCALE,
            query_rope=self.query_rope, key_rope=self.rope, layout_kv="PA_BSND", **self.pages(),
        )  # fmt: skip
        return out

    def sparse(self) -> Tensor:
        return self.attend(self.select())

    def all_keys(self) -> Tensor:
        count = int(self.lengths[0])
        keys = torch.arange(count, dtype=torch.int32)
        return keys.expand(len(self.lengths), 1, 1, count).contiguous()

    def side_by_side(self) -> Step:
        """The same keys without a cache."""

        def dense(cache: Tensor) -> Tensor:
            rows = ops.gather_paged_kv(cache, self.block_table, self.lengths)
            return rows.unflatten(0, (len(self.lengths), -1))

        return self._replace(
            latent=dense(self.latent), rope=dense(self.rope), key_index=dense(self.key_index)
        )


def case_of(batch: int, keys: int) -> str:
    return f"B={batch} keys={keys}"


def make_step(batch: int, keys: int) -> Step:
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).bfloat16()

    blocks = batch * keys // BLOCK
    return Step(
        query=normal(batch, 1, HEADS, D),
        query_rope=normal(batch, 1, HEADS, ROPE),
        query_index=normal(batch, 1, INDEX_HEADS, INDEX_D),
        weights=normal(batch, 1, INDEX_HEADS),
        latent=normal(blocks, BLOCK, 1, D),
        rope=normal(blocks, BLOCK, 1, ROPE),
        key_index=normal(blocks, BLOCK, 1, INDEX_D),
        block_table=torch.randperm(blocks, dtype=torch.int32).view(batch, -1),
        lengths=torch.full((batch,), keys, dtype=torch.int32),
    )


def torch_attention(step: Step) -> Call:
    """Attends to contiguous keys, which are made before the clock starts. The heads share their
    keys, so they are passed as tokens of one head: anything else takes it much longer."""
    dense = step.side_by_side()
    query = torch.cat((dense.query, dense.query_rope), -1)
    key = torch.cat((dense.latent, dense.rope), -1).transpose(1, 2)
    value = dense.latent.transpose(1, 2)
    return partial(scaled_dot_product_attention, query, key, value, scale=SCALE)


def report_step(record: Recorder, keys: int, batch: int, rounds: int) -> None:
    step = make_step(batch, keys)
    indices, everything = step.select(), step.all_keys()
    read = torch.ones(READ_ELEMENTS, dtype=torch.int16)
    seconds = interleaved_medians(
        {
            "ours, indexer": step.select,
            "ours, attention": partial(step.attend, indices),
            "ours, dense": partial(step.attend, everything),
            "torch": torch_attention(step),
            "peak": peak_product(),
            "read": lambda: read.view(torch.int64).sum(),
        },
        rounds,
    )
    peak = 2 * PEAK_SIZE**3 / seconds.pop("peak")
    bandwidth = READ_ELEMENTS * 2 / seconds.pop("read")
    selected = min(K, keys)
    products = 2 * batch * (INDEX_HEADS * INDEX_D * keys + HEADS * (2 * D + ROPE) * selected)
    bytes_read = 2 * batch * (INDEX_D * keys + (D + ROPE) * selected)
    seconds["ours, sparse"] = seconds["ours, indexer"] + seconds["ours, attention"]
    seconds["limit"] = max(products / peak, bytes_read / bandwidth)
    for name, time in seconds.items():
        record.add(case_of(batch, keys), name, seconds=time, batch=batch, keys=keys)
    print(
        f"{batch:3} {keys:7}"
        + "".join(f"{seconds[name] * 1e3:11.2f}" for name in COLUMNS)
        + "".join(
            f"{seconds[name] / seconds['ours, sparse']:8.1f}" for name in ("ours, dense", "torch")
        ),
        flush=True,
    )


def report_paging(record: Recorder, batch: int, keys: int, rounds: int) -> None:
    """Measures the cost of reading through the block table."""
    paged = make_step(batch, keys)
    dense = paged.side_by_side()
    nothing: dict[str, Any] = {"actual_seq_lengths_key": dense.lengths}
    indices = paged.select()
    seconds = interleaved_medians(
        {
            "indexer, paged": paged.select,
            "indexer": lambda: ops.lightning_indexer(
                dense.query_index, dense.key_index, dense.weights, sparse_count=K, **nothing
            ),
            "attention, paged": partial(paged.attend, indices),
            "attention": lambda: ops.sparse_flash_attention(
                dense.query, dense.latent, dense.latent, indices, scale_value=SCALE,
                query_rope=dense.query_rope, key_rope=dense.rope, return_softmax_lse=False,
                **nothing,
            ),
        },
        rounds,
    )  # fmt: skip
    ratios = {x: seconds[f"{x}, paged"] / seconds[x] for x in ("indexer", "attention")}
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"paged keys against keys side by side, {case_of(batch, keys)}: {shown}")
    record.add(case_of(batch, keys), "paged against side by side", **ratios)


def first_step(keys: int, threads: int) -> Call:
    """Prepare the inputs in a fresh process, and return the call to measure."""
    torch.set_num_threads(threads)

    def call(step: Step) -> Tensor:
        with ops.limits(None):
            return step.sparse()

    call(make_step(1, BLOCK))  # loads libraries and generates code
    return partial(call, make_step(1, keys))


def main() -> None:
    arguments = parser(__doc__, rounds=15).parse_args()
    rounds = arguments.rounds
    record = recorder("sparse_decode", arguments.json)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, bfloat16; milliseconds\n"
        f"attention: {HEADS} heads, D {D} + {ROPE}, K {K}; "
        f"indexer: {INDEX_HEADS} heads of {INDEX_D}; blocks of {BLOCK}\n"
        f"{'B':>3} {'keys':>7}"
        + "".join(f"{name.removeprefix('ours, '):>11}" for name in COLUMNS)
        + f"{'dense/':>8}{'torch/':>8}"
    )
    for batch in (1, 8):
        for keys in CONTEXTS[: None if batch == 1 else 3]:
            report_step(record, keys, batch, rounds)
    for batch in (1, 8):
        report_paging(record, batch, 8192, rounds)
    for keys in CONTEXTS:
        extra = extra_memory(partial(first_step, keys, torch.get_num_threads()))
        print(f"memory that a step over {keys} keys adds: {extra / 2**20:.1f} MB")
        record.add(case_of(1, keys), "ours, sparse", bytes=extra)


if __name__ == "__main__":
    with ops.limits(None):
        main()
