"""sparse_flash_mla and its gradient, in the three kinds of layers of DeepSeek-V4.

    python benchmarks/sparse_flash_mla.py

Windows of 128 keys; all compressed keys of 128 tokens each (HCA), or 512 of the compressed keys of
4 tokens each (CSA). FLOPs are counted for the pairs that are read. The alternative in torch masks
the scores of all pairs.

Memory is what a first call adds to a process, beside its outputs and, in a gradient, one float32
accumulator of all keys for each thread.

The last table is for one decoded token of each of several sequences, over paged caches. Its limit
is one reading of the rows that the token selects, by sums over as many adjacent rows, or the
products at the speed of torch's matrix products, whichever takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import ascend_attn_ops
import torch
from harness import (
    PEAK_SIZE,
    Call,
    Row,
    extra_memory,
    interleaved_medians,
    measure,
    peak_product,
    read,
    recorder,
    report,
)
from results import Recorder, parser
from torch import Tensor

OURS = torch.ops.ascend
D, WINDOW, SELECTED = 512, 128, 512
SCALE = D**-0.5
RATIOS = {"SWA": 1, "HCA": 128, "CSA": 4}
BLOCK = 128  # keys of a page


@dataclass(frozen=True)
class Shape:
    kind: str
    tokens: int
    heads: int = 64
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind} S={self.tokens} N1={self.heads} {dtype}"

    def compressed(self, token: int) -> int:
        """The number of compressed keys that a token reads."""
        if self.kind == "SWA":
            return 0
        complete = (token + 1) // RATIOS[self.kind]
        return min(complete, SELECTED) if self.kind == "CSA" else complete

    def flops(self, products: int) -> int:
        pairs = sum(min(WINDOW, i + 1) + self.compressed(i) for i in range(self.tokens))
        return 2 * products * self.heads * pairs * D


def inputs(shape: Shape) -> tuple[list[Any], dict[str, Any]]:
    """The positional arguments of the forward, and its options."""
    torch.manual_seed(0)
    ratio = RATIOS[shape.kind]

    def normal(*sizes: int) -> Tensor:
        return torch.randn(1, *sizes).to(shape.dtype)

    query, ori_kv = normal(shape.tokens, shape.heads, D), normal(shape.tokens, 1, D)
    cmp_kv = None if shape.kind == "SWA" else normal(shape.tokens // ratio, 1, D)
    indices = None
    if shape.kind == "CSA":
        indices = torch.full((1, shape.tokens, 1, SELECTED), -1, dtype=torch.int32)
        for token in range(shape.tokens):
            read = shape.compressed(token)
            chosen = torch.randperm((token + 1) // ratio)[:read]
            indices[0, token, 0, :read] = chosen.int()
    options = {"scale_value": SCALE, "sink": torch.randn(shape.heads), "cmp_ratio": ratio}
    return [query, ori_kv, cmp_kv, indices], options


def in_torch(given: list[Any], sink: Tensor, ratio: int) -> Tensor:
    query, ori_kv, cmp_kv, indices = given
    tokens = query.shape[1]
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    kept = (j <= i) & (j > i - WINDOW)
    keys = ori_kv[0, :, 0]
    if cmp_kv is not None:
        keys = torch.cat((keys, cmp_kv[0, :, 0]))
        count = cmp_kv.shape[1]
        seen = torch.arange(count) < (i + 1) // ratio
        if indices is not None:
            columns = indices[0, :, 0].long()
            columns = torch.where(columns < 0, count, columns)
            chosen = torch.zeros(tokens, count + 1, dtype=torch.bool)
            seen = chosen.scatter_(1, columns, True)[:, :count]
        kept = torch.cat((kept, seen), -1)
    scores = torch.einsum("snd,kd->nsk", query[0], keys).float() * SCALE
    scores.masked_fill_(~kept, -torch.inf)
    logits = torch.cat((scores, sink[:, None, None].expand(-1, tokens, 1)), -1)
    return torch.einsum("nsk,kd->snd", logits.softmax(-1)[..., :-1].to(keys.dtype), keys)


def rows_of(shape: Shape, with_torch: bool, rounds: int) -> list[Row]:
    given, options = inputs(shape)
    out, softmax_lse = OURS.sparse_flash_mla(*given, **options)
    backward = partial(
        OURS.sparse_flash_mla_grad, *given, torch.randn_like(out), out, softmax_lse, **options
    )
    alternatives: dict[str, Call] = {}
    if with_torch:
        alternatives["torch, masking"] = partial(
            in_torch, given, options["sink"], options["cmp_ratio"]
        )
    return measure(
        f"sparse_flash_mla {shape}", partial(OURS.sparse_flash_mla, *given, **options),
        alternatives, products=shape.flops(2), rounds=rounds,
    ) + measure(
        f"sparse_flash_mla_grad {shape}", backward, {}, products=shape.flops(5), rounds=rounds,
    )  # fmt: skip


def pages(batch: int, keys: int) -> tuple[Tensor, Tensor]:
    """A cache whose blocks are in random order, and its block table."""
    blocks = -(-keys // BLOCK)
    table = torch.randperm(batch * blocks, dtype=torch.int32).view(batch, blocks)
    return torch.randn(batch * blocks, BLOCK, 1, D).bfloat16(), table


def decode(kind: str, batch: int, tokens: int, heads: int = 64) -> tuple[Call, int]:
    """The call for the last of `tokens` tokens of each sequence, and how many keys it selects."""
    torch.manual_seed(0)
    ratio, shape = RATIOS[kind], Shape(kind, tokens, heads)
    selected = shape.compressed(tokens - 1)
    ori_kv, ori_table = pages(batch, tokens)
    given: list[Any] = [torch.randn(batch, 1, heads, D).bfloat16(), ori_kv]
    options: dict[str, Any] = {
        "actual_seq_lengths_ori_kv": torch.full((batch,), tokens, dtype=torch.int32),
        "layout_kv": "PA_BSND",
        "ori_block_table": ori_table,
    }
    if kind != "SWA":
        count = tokens // ratio
        cmp_kv, options["cmp_block_table"] = pages(batch, count)
        given.append(cmp_kv)
        options["actual_seq_lengths_cmp_kv"] = torch.full((batch,), count, dtype=torch.int32)
    if kind == "CSA":
        chosen = torch.stack([torch.randperm(count)[:selected] for _ in range(batch)])
        given.append(chosen.int().view(batch, 1, 1, selected))
    options |= {"scale_value": SCALE, "sink": torch.randn(heads), "cmp_ratio": ratio}
    keys = batch * (min(WINDOW, tokens) + selected)
    return partial(OURS.sparse_flash_mla, *given, **options, return_softmax_lse=False), keys


def report_decode(record: Recorder, kind: str, batch: int, tokens: int, rounds: int) -> None:
    heads = 64
    call, keys = decode(kind, batch, tokens, heads)
    seconds = interleaved_medians(
        {"ours": call, "reading": partial(read, torch.ones(keys, D).bfloat16()),
         "products": peak_product()},
        rounds,
    )  # fmt: skip
    seconds["products"] *= 2 * heads * keys * D / PEAK_SIZE**3
    case = f"decode {kind} B={batch} S={tokens} N1={heads}"
    for name, time in seconds.items():
        record.add(case, name, seconds=time)
    limit = max(seconds["reading"], seconds["products"])
    print(
        f"{case:40}"
        + "".join(f"{time * 1e3:10.3f}" for time in seconds.values())
        + f"{seconds['ours'] / limit:7.2f}"
    )


def first_call(shape: Shape, gradient: bool, threads: int) -> Call:
    """Load libraries and code with a small call, and return the one to measure."""
    torch.set_num_threads(threads)
    ascend_attn_ops.set_limits(None)

    def call_of(shape: Shape) -> Call:
        given, options = inputs(shape)
        forward = partial(OURS.sparse_flash_mla, *given, **options)
        if not gradient:
            return forward
        out, softmax_lse = forward()
        rest = torch.randn_like(out), out, softmax_lse
        return partial(OURS.sparse_flash_mla_grad, *given, *rest, **options)

    call_of(Shape(shape.kind, 256))()
    return call_of(shape)


def report_memory(record: Recorder, shape: Shape) -> None:
    threads = torch.get_num_threads()
    given, _ = inputs(shape)
    query, *keys = (x for x in given if x is not None and x.is_floating_point())
    of_keys = sum(x.numel() for x in keys)
    selected = 0 if given[3] is None else given[3].numel()
    rows = shape.tokens * shape.heads
    outputs = query.nbytes + 4 * rows
    of_gradient = query.nbytes + (2 + 4 * threads) * of_keys + 4 * (shape.heads + selected)
    for name, needed in (("", outputs), ("_grad", of_gradient)):
        case = f"sparse_flash_mla{name} {shape}"
        extra = extra_memory(partial(first_call, shape, bool(name), threads))
        print(f"{case}: {extra / 2**20:.1f} MiB more, {needed / 2**20:.1f} MiB needed", flush=True)
        record.add(case, "ours", bytes=extra, bytes_needed=needed)


def report_passes(record: Recorder, rounds: int) -> None:
    rows: list[Row] = []
    with ascend_attn_ops.limits(None):
        for kind in RATIOS:
            rows += rows_of(Shape(kind, 1024), True, rounds)
            rows += rows_of(Shape(kind, 4096), False, rounds)
    report(record, rows)


def main() -> None:
    options = parser(__doc__, rounds=5)
    options.add_argument("--decode", action="store_true", help="the last table alone")
    arguments = options.parse_args()
    record = recorder("sparse_flash_mla", arguments.json)
    if not arguments.decode:
        report_passes(record, arguments.rounds)
        for kind in RATIOS:
            report_memory(record, Shape(kind, 4096))
    print(f"{'milliseconds':40}{'ours':>10}{'reading':>10}{'products':>10}{'ratio':>7}")
    with ascend_attn_ops.limits(None):
        for kind in RATIOS:
            for batch in (1, 8):
                report_decode(record, kind, batch, 16384, 4 * arguments.rounds)


if __name__ == "__main__":
    main()
