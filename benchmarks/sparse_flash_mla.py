"""sparse_flash_mla and its gradient, in the three kinds of layers of DeepSeek-V4.

    python benchmarks/sparse_flash_mla.py

Windows of 128 keys; all compressed keys of 128 tokens each (HCA), or 512 of the compressed keys of
4 tokens each (CSA). FLOPs are counted for the pairs that are read. The alternative in torch masks
the scores of all pairs.

The last cases are for one decoded token of each of several sequences, over paged caches. Their
limit is one reading of the rows that the token selects, by sums over as many adjacent rows, or the
products at the speed of torch's matrix products, whichever takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import PEAK_SIZE, Benchmark, Call, interleaved, kept, name_of, peak_product, read
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
        return f"{self.kind} S={self.tokens} N1={self.heads} {name_of(self.dtype)}"

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
    mask = (j <= i) & (j > i - WINDOW)
    keys = ori_kv[0, :, 0]
    if cmp_kv is not None:
        keys = torch.cat((keys, cmp_kv[0, :, 0]))
        count = cmp_kv.shape[1]
        seen = torch.arange(count) < (i + 1) // ratio
        if indices is not None:
            seen = kept(indices[0, :, 0], count)
        mask = torch.cat((mask, seen), -1)
    scores = torch.einsum("snd,kd->nsk", query[0], keys).float() * SCALE
    scores.masked_fill_(~mask, -torch.inf)
    logits = torch.cat((scores, sink[:, None, None].expand(-1, tokens, 1)), -1)
    return torch.einsum("nsk,kd->snd", logits.softmax(-1)[..., :-1].to(keys.dtype), keys)


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


def measure(run: Benchmark, shape: Shape, with_torch: bool) -> None:
    given, options = inputs(shape)
    forward = partial(OURS.sparse_flash_mla, *given, **options)
    out, softmax_lse = forward()
    rest = torch.randn_like(out), out, softmax_lse
    backward = partial(OURS.sparse_flash_mla_grad, *given, *rest, **options)
    in_plain_torch = partial(in_torch, given, options["sink"], options["cmp_ratio"])
    peers: dict[str, Call] = {"torch, masking": in_plain_torch} if with_torch else {}
    run.measure(f"sparse_flash_mla {shape}", forward, peers, shape.flops(2))
    run.measure(f"sparse_flash_mla_grad {shape}", backward, {}, shape.flops(5))


def measure_decode(run: Benchmark, kind: str, batch: int, tokens: int) -> None:
    heads = 64
    call, keys = decode(kind, batch, tokens, heads)
    rows = torch.ones(keys, D).bfloat16()
    calls: dict[str, Call] = {
        "ours": call,
        "reading": partial(read, rows),
        "products": peak_product(),
    }
    seconds = interleaved(calls, 4 * run.rounds)
    seconds["products"] *= 2 * heads * keys * D / PEAK_SIZE**3
    run.show(f"decode {kind} B={batch} S={tokens} N1={heads}", seconds)


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=5)
    for kind in RATIOS:
        for tokens in (1024, 4096):
            measure(run, Shape(kind, tokens), with_torch=tokens == 1024)
    for kind in RATIOS:
        for batch in (1, 8):
            measure_decode(run, kind, batch, 16384)


if __name__ == "__main__":
    main()
