"""Samples of fused_infer_attention_score."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from ascend_attn_ops.reference.bounds.expected import wide
from ascend_attn_ops.reference.call import Sample
from ascend_attn_ops.reference.call import lengths as as_lengths
from torch import Tensor

from .masks import INT32_MAX, compressed_mask, inference_mask, parts_of_id
from .randomness import Random
from .record import Operator
from .torch_npu_calls import torch_npu


@dataclass(frozen=True)
class InferCase:
    layout: str = "BNSD"
    b: int = 2
    s: tuple[int, int] = (5, 7)  # Sq, Skv; not of packed layouts
    # Counts, in packed layouts those of every sequence.
    lengths: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    heads: tuple[int, int] = (4, 4)  # N, Nk
    d: int = 64
    dv: int = 0  # 0: d
    rope: int = 0
    pages: str = ""  # "rows", "heads" or "fractals"
    block_size: int = 16
    mode: int = 0
    mask: str = ""  # of a full mask, its leading axes: "S", "BS", "1S", "B1S" or "11S"
    larger: tuple[int, int] = (0, 0)  # rows and columns more than there are scores
    mask_dtype: torch.dtype = torch.bool
    pre: int = INT32_MAX
    next: int = INT32_MAX
    sink: str = ""  # "float32", or "query" for its dtype
    lse: bool = False
    quant: str = (
        ""  # the scales of int8 keys, by "channel", "token" or, with query in int8, "query"
    )

    @property
    def id(self) -> str:
        n, nk = self.heads
        parts = [self.layout]
        parts += [] if self.packed else [f"B{self.b}-S{self.s[0]}x{self.s[1]}"]
        parts += [f"H{n}" + (f"x{nk}" if n != nk else ""), f"D{self.d}"]
        parts += [f"Dv{self.dv}"] if self.dv else []
        parts += [f"rope{self.rope}"] if self.rope else []
        for side, lengths in zip("qk", self.lengths, strict=True):
            parts += [f"L{side}{'+'.join(map(str, lengths))}"] if lengths is not None else []
        parts += [f"{self.pages}-of-{self.block_size}"] if self.pages else []
        band = self.pre, self.next
        parts += parts_of_id(self.mode, self.mask, self.larger, self.mask_dtype, band)
        parts += [f"sink-{self.sink}"] if self.sink else []
        parts += ["lse"] if self.lse else []
        parts += [f"int8-by-{self.quant}"] if self.quant else []
        return "-".join(parts)

    @property
    def inputs(self) -> str:
        return self.layout.partition("_")[0]

    @property
    def packed(self) -> bool:
        return "T" in self.inputs

    @property
    def sequences(self) -> int:
        return len(self.lengths[0] or ()) if self.packed else self.b

    def tokens(self, side: int) -> int:
        return sum(self.lengths[side] or ()) if self.packed else self.s[side]

    @property
    def most_keys(self) -> int:
        """The most keys that a sequence has."""
        return max(self.lengths[1] or (self.s[1],), default=0)

    @property
    def blocks(self) -> int:
        """The blocks that a sequence has room for, one more than it needs."""
        return -(-self.most_keys // self.block_size) + 1

    @property
    def room(self) -> int:
        return self.blocks * self.block_size if self.pages else self.s[1]

    def shape(self, side: int, size: int) -> tuple[int, ...]:
        b, s, heads = self.b, self.tokens(side), self.heads[side]
        return {
            "BSH": (b, s, heads * size),
            "BSND": (b, s, heads, size),
            "BNSD": (b, heads, s, size),
            "TND": (s, heads, size),
            "NTD": (heads, s, size),
        }[self.inputs]

    def shape_of_keys(self, size: int, int8: bool = False) -> tuple[int, ...]:
        heads, blocks = self.heads[1], self.sequences * self.blocks + 1
        columns = 32 if int8 else 16
        return {
            "": self.shape(1, size) if not self.pages else (),
            "rows": (blocks, self.block_size, heads * size),
            "heads": (blocks, heads, self.block_size, size),
            "fractals": (blocks, heads, size // columns, self.block_size, columns),
        }[self.pages]

    def shape_of_scale(self, size: int) -> tuple[int, ...]:
        heads = self.heads[1]
        if self.quant != "channel":
            return (1,) if self.quant == "query" else (self.sequences, self.room)
        return {"BSH": (heads * size,), "BNSD": (heads, 1, size)}.get(self.inputs, (heads, size))

    def length_options(self) -> dict[str, Tensor]:
        options = {}
        for side, name in enumerate(("query", "key")):
            lengths = self.lengths[side]
            if lengths is not None:
                cumulative = self.packed and not (self.pages and side == 1)
                given = accumulate(lengths) if cumulative else lengths
                options[f"actual_seq_lengths_{name}"] = as_lengths(given)
        return options


_PACK = InferCase(layout="TND", lengths=((3, 0, 6, 4), (5, 2, 9, 4)))
# A graph that vLLM pads: with queries without keys, and repeated sums.
_PADDED_GRAPH = replace(
    _PACK, lengths=((1, 1, 2, 1, 1, 0, 1, 1), (40, 17, 33, 0, 0, 0, 0, 0)), pages="rows",
    heads=(4, 2), mode=3, lse=True,
)  # fmt: skip
_ABSORBED = InferCase(
    layout="BNSD", s=(1, 0), lengths=(None, (70, 33)), heads=(8, 1), d=512, rope=64, pages="rows"
)
_DECODE = InferCase(layout="BSND", b=3, s=(1, 0), lengths=(None, (40, 1, 33)), heads=(4, 2),
                    pages="rows")  # fmt: skip

# Int8 keys, as vLLM-Ascend decodes with them.
_INT8 = InferCase(layout="BNSD", b=3, s=(1, 0), lengths=(None, (300, 1, 129)), heads=(8, 2), d=128,
                  pages="fractals", block_size=128, quant="channel")  # fmt: skip
_INT8_MLA = replace(_ABSORBED, lengths=(None, (700, 33)), pages="fractals", block_size=128,
                    quant="query")  # fmt: skip
# Within the limits of A2 and A3, in bfloat16.
INT8_CASES = [
    _INT8,
    replace(_INT8, layout="BSH", quant="token"),
    replace(_INT8, layout="BSND", s=(5, 0), lengths=((5, 1, 0), (300, 1, 129)), mode=3),
    replace(_INT8, layout="TND", lengths=((16, 1, 0, 3), (600, 1, 40, 2)), block_size=512, mode=3),
    replace(_INT8, s=(16, 0), heads=(4, 2), mode=3, quant="token"),
    replace(_INT8, layout="BSND", heads=(4, 4), lengths=(None, (128, 0, 513))),
    replace(_INT8_MLA, layout="BSND"),
    replace(_INT8_MLA, layout="BSH", s=(2, 0), mode=3),
    replace(_INT8_MLA, layout="BSND_NBSD"),
    replace(_INT8_MLA, layout="TND_NTD", lengths=((1, 3), (700, 33)), mode=3),
]
# Within the limits of a device.
DEVICE_CASES = [
    InferCase(lse=True),
    InferCase(),
    InferCase(layout="BSH", heads=(4, 2), mask="11S", next=1),
    InferCase(layout="BSND", s=(7, 5), heads=(3, 1), mask="BS", lse=True),
    InferCase(layout="BNSD_BSND", s=(9, 11), heads=(6, 3), mode=3, lse=True),
    InferCase(layout="BSH_BNSD", s=(9, 11), heads=(4, 2), mode=2, lse=True),
    InferCase(layout="BSND_BNSD", b=3, s=(9, 11), heads=(4, 2), d=128, mode=4, pre=4, next=1),
    InferCase(layout="BSH", b=3, s=(9, 12), lengths=((9, 0, 4), (12, 7, 0)), lse=True),
    InferCase(layout="BSND", b=3, s=(9, 12), lengths=(None, (5, 12, 0, 99, -1)), mode=3, lse=True),
    InferCase(b=1, s=(130, 700), heads=(6, 2), mode=3, lse=True),
    InferCase(layout="BSND", b=1, s=(3, 70), heads=(64, 1), mode=4, pre=30, next=9),
    InferCase(s=(9, 12), lengths=((4,), None), mask="S"),
    InferCase(s=(9, 12), mask="1S", mask_dtype=torch.uint8, mode=1, pre=0, next=0, lse=True),
    InferCase(layout="BSND", s=(9, 12), mask="B1S", larger=(3, 20), mode=1),
    InferCase(b=3, s=(1, 33), heads=(4, 2), mask="S", mask_dtype=torch.int8),
    InferCase(layout="BSH", b=1, s=(1, 600), heads=(8, 8), lse=True),
    InferCase(b=3, s=(1, 600), heads=(4, 4), d=128, lengths=(None, (600, 77, 0)), lse=True),
    InferCase(d=192, dv=128, s=(6, 9), mode=3),
    InferCase(d=128, rope=64, s=(6, 9), heads=(4, 4), mode=3, lse=True),
    InferCase(layout="BSH", d=128, rope=64, s=(6, 9), heads=(4, 2), mask="BS"),
    # Packs.
    _PACK,
    replace(_PACK, mode=3, heads=(4, 2), lse=True),
    replace(_PACK, mode=4, pre=2, next=1, d=128, lse=True),
    replace(_PACK, d=192, dv=128, mode=3, lse=True),
    replace(_PACK, d=128, rope=64, heads=(4, 4), mode=3, lse=True),
    replace(_PACK, layout="NTD_TND", mode=3, lse=True),
    _PADDED_GRAPH,
    # Pages.
    _DECODE,
    replace(_DECODE, pages="heads", layout="BNSD", d=128, lse=True),
    replace(_DECODE, pages="fractals", layout="BSH", lse=True),
    replace(_DECODE, s=(8, 0), lengths=((8, 1, 5), (40, 1, 33)), mode=3, lse=True),
    replace(_DECODE, s=(1, 0), lengths=(None, (700, 65, 300)), heads=(2, 2), block_size=128),
    replace(_DECODE, s=(3, 0), mask="B1S", mask_dtype=torch.int8, pages="heads"),
    replace(_PADDED_GRAPH, pages="heads", block_size=32),
    replace(_PACK, pages="fractals", mode=3, heads=(4, 2), lse=True),
    replace(
        _PACK,
        lengths=((30, 1, 80), (300, 600, 80)),
        pages="rows",
        mode=3,
        heads=(4, 1),
        block_size=128,
    ),
    replace(_PACK, lengths=((3, 1, 1), (30, 100, 200)), pages="rows", mode=4, pre=20, next=0),
    # Absorbed latent attention.
    _ABSORBED,
    replace(_ABSORBED, layout="BSND_NBSD", lse=True),
    replace(_ABSORBED, layout="BNSD_NBSD", s=(3, 0), mode=3),
    replace(_ABSORBED, layout="BSND", pages="fractals", lse=True),
    replace(_ABSORBED, layout="TND_NTD", lengths=((1, 2), (70, 33)), mode=3),
    replace(_ABSORBED, layout="TND", lengths=((1, 1), (70, 600)), pages="heads", block_size=128),
    # Sinks.
    InferCase(layout="BSND", s=(6, 9), sink="query", lse=True),
    replace(_DECODE, sink="float32", lse=True),
    replace(_PADDED_GRAPH, sink="query"),
    replace(_PACK, mode=4, pre=2, next=0, sink="float32", heads=(4, 2), lse=True),
]

CASES = [
    *DEVICE_CASES[:1],
    # Sizes that no device takes. torch.compile gets the pairs, with batches of any size.
    InferCase(layout="BSND_NBSD", s=(5, 7), d=12, rope=3, mask="B1S", lse=True),
    InferCase(layout="BSH_NBSD", s=(65, 257), heads=(3, 3), d=33),
    InferCase(layout="BNSD_NBSD", s=(7, 9), heads=(6, 3), d=20, mode=3),
    *DEVICE_CASES[1:],
    InferCase(d=17, dv=5, s=(9, 11), heads=(6, 3), mode=3, lse=True),
    replace(_PACK, layout="TND_NTD", d=12, mode=2, lse=True),
    replace(_PACK, pages="heads", d=16, dv=24, rope=8, heads=(2, 1), mode=2, lse=True),
    replace(_DECODE, s=(1, 0), d=32, rope=16, heads=(2, 2), lse=True),
    replace(_DECODE, pages="heads", d=24, block_size=48, heads=(3, 3), mode=4, pre=20, next=3),
    replace(_DECODE, mask="S", mask_dtype=torch.uint8, next=20, d=8),
    *INT8_CASES,
    replace(_INT8, heads=(6, 3), d=32, dv=64, lse=True, sink="float32", layout="BNSD_BSND"),
    replace(_INT8, s=(6, 0), d=64, mask="B1S", lse=True, block_size=16, quant="token"),
    # Nothing to do.
    InferCase(b=0),
    InferCase(s=(0, 7), mode=3, lse=True),
    InferCase(layout="BSND", s=(5, 0), lse=True),
    InferCase(layout="BSND", s=(5, 0), sink="float32", lse=True),
]  # fmt: skip


def full_mask(case: InferCase, random: Random) -> Tensor:
    # A mask of two axes has one row for each batch where each has a single query.
    rows = case.b if case.mask == "S" and case.s[0] == 1 else case.s[0]
    more_rows, more_keys = case.larger
    mask = inference_mask(case.mask, case.b, (rows, more_rows), (case.room, more_keys), random)
    return mask.to(case.mask_dtype)


def block_table(case: InferCase, random: Random) -> Tensor:
    """Every block once, in another order; the first one is nobody's."""
    numbers = torch.tensor(random.permutation(case.sequences * case.blocks), dtype=torch.int32)
    return (numbers + 1).view(case.sequences, case.blocks)


def build(case: InferCase, dtype: torch.dtype) -> Sample:
    dtype = torch.bfloat16 if case.quant == "query" else dtype
    random = Random(case.id, dtype)
    int8 = bool(case.quant)
    shapes = {
        "key": case.shape_of_keys(case.d, int8),
        "value": case.shape_of_keys(case.dv or case.d, int8),
    }
    query = case.shape(0, case.d)
    inputs = {"query": random.normal(*query)}
    if case.quant == "query":
        inputs["query"] = random.numbers(*query, dtype=torch.int8)
    inputs |= {
        name: random.numbers(*shape, dtype=torch.int8) if case.quant else random.normal(*shape)
        for name, shape in shapes.items()
    }
    options: dict[str, Any] = {
        "num_heads": case.heads[0],
        "num_key_value_heads": case.heads[1] if case.heads[0] != case.heads[1] else 0,
        "layout": case.layout,
        "scale_value": (case.d + case.rope) ** -0.5,
        "pre_tokens": case.pre,
        "next_tokens": case.next,
        "sparse_mode": case.mode,
        "return_softmax_lse": case.lse,
    }
    if case.rope:
        options["query_rope"] = random.normal(*case.shape(0, case.rope))
        options["key_rope"] = random.normal(*case.shape_of_keys(case.rope))
    if case.pages:
        options["block_table"] = block_table(case, random)
        options["block_size"] = case.block_size
    if case.mask:
        options["atten_mask"] = full_mask(case, random)
    elif case.mode >= 2:
        leading = {0: (2048, 2048), 1: (1, 2048, 2048), 2: (1, 1, 2048, 2048)}[case.mode - 2]
        options["atten_mask"] = compressed_mask(case.mode, case.mask_dtype).view(leading)
    options |= case.length_options()
    if case.sink:
        sink = 2 * random.normal(case.heads[0])
        options["sink"] = sink.float() if case.sink == "float32" else sink
    if case.quant:
        mode = int(case.quant == "token")
        options["inner_precise"] = int(case.quant != "query")
        for name, size in (("key", case.d), ("value", case.dv or case.d)):
            scale = random.normal(*case.shape_of_scale(size)).abs() / 64
            of_channels = case.quant == "channel"
            options[f"{name}_antiquant_scale"] = scale if of_channels else scale.to(wide(dtype))
            options[f"{name}_antiquant_mode"] = mode
    if case.quant == "query":
        inputs["value"] = inputs["key"]
        options["query_rope"] *= 2**12  # callers divide it by the scales
        scale = random.normal(*case.shape(0, 1)).abs().float() / 64
        options["dequant_scale_query"] = scale if case.inputs == "BSH" else scale[..., 0]
        options["query_quant_mode"] = 3
    return Sample("fused_infer_attention_score", f"{case.id}-{dtype}", inputs, options)


FUSED_INFER_ATTENTION_SCORE = Operator(
    "fused_infer_attention_score",
    CASES,
    build,
    inference_only=True,
    on_device=DEVICE_CASES.__contains__,
    torch_npu=lambda x: torch_npu(
        "npu_fused_infer_attention_score_v2",
        x,
        key_quant_mode=x.get("key_antiquant_mode", 0),
        value_quant_mode=x.get("value_antiquant_mode", 0),
    ),
)

OPERATORS = [FUSED_INFER_ATTENTION_SCORE]
