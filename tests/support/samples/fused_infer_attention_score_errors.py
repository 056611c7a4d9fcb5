"""Calls that fused_infer_attention_score must refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ascend_attn_check.samples.fused_infer_attention_score import (
    FUSED_INFER_ATTENTION_SCORE,
    InferCase,
)

from .wrong_call import (
    LENGTHS,
    WrongCall,
    bools,
    device_rules,
    gradient_rules,
    inference_rules,
    normal,
    wrong_call,
)

PLAIN = InferCase(s=(6, 9), heads=(4, 2), d=8)
BSH = replace(PLAIN, layout="BSH")
BSND = replace(PLAIN, layout="BSND")
THREE = replace(PLAIN, b=3, lengths=((6, 2, 0), (9, 4, 9)))
MASKED = replace(PLAIN, mask="BS")
BAND = replace(PLAIN, mode=4, pre=3, next=2)
PACK = InferCase(layout="TND", lengths=((3, 0, 6), (5, 2, 9)), heads=(4, 2), d=8)
PAGED = InferCase(layout="BSND", s=(2, 0), lengths=(None, (20, 7)), heads=(4, 2), d=16,
                  pages="rows")  # fmt: skip
BY_HEAD = replace(PAGED, pages="heads")
FRACTALS = replace(PAGED, pages="fractals")
PAGED_PACK = replace(PACK, d=16, pages="rows")
INT8 = replace(FRACTALS, d=32, quant="channel")
TOKENS = replace(INT8, quant="token")
INT8_QUERY = replace(INT8, layout="BSND", heads=(4, 1), rope=16, quant="query")
ROPES = replace(PLAIN, rope=4)
SINK = replace(PLAIN, sink="float32")

TABLE = torch.tensor([[1, 2, 0], [3, 0, 0]], dtype=torch.int32)


wrong = partial(wrong_call, FUSED_INFER_ATTENTION_SCORE)
wrong_type = partial(wrong, exception=TypeError)
wrong_value = partial(wrong, on_meta=False)

RULES = [
    *inference_rules(wrong, PLAIN, THREE, MASKED, BAND),
    # Layouts, dtypes, heads, sizes.
    *(
        wrong(PLAIN, f"one of BSH, .*, TND_NTD, got '{x}'", layout=x)
        for x in ("SBH", "NTD", "TND_NBSD", "")
    ),
    wrong(BSH, "rank 3", value=normal(2, 9, 2, 8)),
    *(
        wrong_type(PLAIN, f"got {str(dtype)[6:]}; torch_npu.npu_fused_infer_attention_score_v2",
                   **{name: torch.ones(2, 2, 9, 8).to(dtype)}, id=f"{name}-{dtype}")
        for name in ("key", "value")
        for dtype in (torch.int8, torch.float8_e4m3fn)
    ),
    wrong_type(PLAIN, "bfloat16", value=torch.ones(2, 2, 9, 8)),
    wrong(BSH, "key: query's D = 8, got 16", key=normal(2, 9, 32)),
    wrong(BSH, "multiple of num_key_value_heads = 2", value=normal(2, 9, 33)),
    wrong(PLAIN, "head size of at least 1", value=normal(2, 2, 9, 0)),
    wrong(PLAIN, "query's D = 8, got 4", key=normal(2, 2, 9, 4)),
    wrong(PLAIN, "batch size 2", key=normal(3, 2, 9, 8)),
    wrong(PLAIN, "tokens as key, 9", value=normal(2, 2, 8, 8)),
    wrong(PLAIN, "0 to 3, got 4", inner_precise=4),
    wrong(PLAIN, "0 to 3, got -1", inner_precise=-1),
    # Lengths.
    wrong(PACK, "cumulative .* TND requires, got none.*161001", **{LENGTHS[0]: None}),
    wrong(PACK, "cumulative .* TND requires, got none.*161001", **{LENGTHS[1]: None}),
    wrong_value(PACK, "end with all T = 9 tokens, got 8", **{LENGTHS[0]: [3, 3, 8]}),
    wrong_value(PACK, "end with all T = 16 tokens, got 15", **{LENGTHS[1]: [5, 7, 15]}),
    wrong_value(PACK, "never decrease", **{LENGTHS[0]: [3, 2, 9]}),
    wrong(PACK, "as many lengths as .*, 3, got 2", **{LENGTHS[1]: [5, 16]}),
    wrong(PAGED, "number of keys .* block_table, got None.*161001", **{LENGTHS[1]: None}),
    wrong_value(PAGED, r"0\.\.S = 48, got 49", **{LENGTHS[1]: [49, 7]}),
    wrong(PAGED_PACK, "as many lengths as .*, 3, got 2", **{LENGTHS[1]: [5, 2]}),
    wrong_value(PAGED_PACK, r"0\.\.S = 32, got 33", **{LENGTHS[1]: [5, 33, 9]}),
    # Pages.
    wrong_type(PAGED, "int32 or int64", block_table=TABLE.short()),
    wrong(PAGED, "blocks of a sequence", block_table=TABLE[0]),
    wrong(PAGED, "blocks of a sequence", block_table=TABLE[:1]),
    wrong(PAGED, "key's block_size, 16, or 0, got 32", block_size=32),
    wrong(PAGED, "pages of shape", key=normal(7, 32)),
    wrong(PAGED, "positive multiple of 16", key=normal(7, 24, 32)),
    wrong(PAGED, "positive multiple of 16", key=normal(7, 0, 32)),
    wrong(PAGED, r"\(num_blocks, block_size, Nk \* D\)", key=normal(7, 16, 33)),
    wrong(PAGED, "rank 3 as key has", value=normal(7, 2, 16, 16)),
    wrong(PAGED, r"\(num_blocks, block_size, Nk \* D\)", value=normal(6, 16, 32)),
    wrong(BY_HEAD, r"\(num_blocks, Nk, block_size, D\)", key=normal(7, 16, 16, 2)),
    wrong(FRACTALS, r"D / 16, block_size, 16\)", key=normal(7, 2, 1, 16, 32)),
    wrong(BY_HEAD, r"in the order .num_blocks, block_size, Nk, D", key=normal(7, 16, 2, 16)),
    wrong(FRACTALS, "multiple of 16 for keys in fractals, got 24", query=normal(2, 2, 4, 24),
          key=normal(7, 2, 1, 16, 24)),
    # Int8 keys.
    *(wrong(case, f"{names[0]}: because another scale is given.*161001", **dict.fromkeys(names))
      for case, names in ((INT8, ["key_antiquant_scale"]), (INT8, ["value_antiquant_scale"]),
                          (INT8_QUERY, ["key_antiquant_scale", "value_antiquant_scale"]))),
    wrong(INT8, "per token, got 2", key_antiquant_mode=2, value_antiquant_mode=2),
    wrong(INT8, "key_antiquant_mode, 0, got 1", value_antiquant_mode=1),
    wrong(INT8, "beside key_antiquant_scale, got None.*161001", block_table=None),
    wrong(INT8, "pages of shape .* D / 32, block_size, 32", key=torch.ones(7, 16, 64).char()),
    wrong(INT8, r"= \[7, 2, 1, 16, 32\]", key=torch.ones(7, 2, 2, 16, 16).char()),
    wrong(INT8, "query: multiple of 32", query=normal(2, 2, 4, 16)),
    wrong(INT8, "query_rope, key_rope: None beside", query_rope=normal(2, 2, 4, 16)),
    wrong_type(INT8, "int8, got bfloat16", key=normal(7, 2, 1, 16, 32)),
    wrong_type(INT8, "int8, got uint8", value=torch.ones(7, 2, 1, 16, 32).byte()),
    *(wrong_type(case, "bfloat16 .query's" if case is INT8 else "float32", **{
        f"{name}_antiquant_scale": lambda x: x.half()})
      for case in (INT8, TOKENS) for name in ("key", "value")),
    *(wrong(replace(INT8, layout=layout), rf"in this layout = \[{shape}\]",
            value_antiquant_scale=normal(3, 32))
      for layout, shape in (("BSH", "64"), ("BNSD", "2, 1, 32"), ("BSND", "2, 32"))),
    *(wrong(TOKENS, r"\(2, S\) with S of at least 48", key_antiquant_scale=torch.ones(*sizes))
      for sizes in ((2, 47), (1, 48), (96,))),
    wrong(INT8_QUERY, "expected 3, .*, got 0", query_quant_mode=0),
    wrong(INT8_QUERY, "key_antiquant_mode: 0 beside", key_antiquant_mode=1, value_antiquant_mode=1),
    wrong(INT8_QUERY, "query_rope, key_rope: beside dequant_scale_query, got None.*161001",
          query_rope=None, key_rope=None),
    wrong(INT8_QUERY, r"of query without D = \[2, 2, 4\]",
          dequant_scale_query=torch.ones(2, 4, 2)),
    wrong(INT8_QUERY, "of one scale beside", value_antiquant_scale=torch.ones(2)),
    wrong_type(INT8_QUERY, "int8, got bfloat16", query=normal(2, 2, 4, 32)),
    wrong_type(INT8_QUERY, "query: beside dequant_scale_query, got int8", dequant_scale_query=None),
    *(wrong_type(INT8_QUERY, "float32", **{name: lambda x: x.half()})
      for name in ("dequant_scale_query", "key_antiquant_scale")),
    wrong_type(INT8_QUERY, "bfloat16", query_rope=lambda x: x.half()),
    # Ropes and sinks.
    wrong(ROPES, "because key_rope is given.*161001", query_rope=None),
    wrong(ROPES, "because query_rope is given.*161001", key_rope=None),
    wrong(ROPES, "key_rope: key's shape with Dr = 5", query_rope=normal(2, 4, 6, 5)),
    wrong(ROPES, r"\[2, 2, 9, 4\]", key_rope=normal(2, 2, 8, 4)),
    wrong_type(ROPES, "bfloat16", key_rope=torch.ones(2, 2, 9, 4)),
    wrong(SINK, "one score per query head", sink=torch.ones(3)),
    wrong(SINK, "one score per query head", sink=torch.ones(4, 1)),
    wrong_type(SINK, "floating-point dtype, got int32", sink=torch.ones(4).int()),
    wrong(replace(MASKED, s=(1, 9), mask="S"), r"\(B, Skv\) where Sq = 1", atten_mask=bools(3, 9)),
    wrong(PAGED, "block_table has room for", atten_mask=bools(2, 2, 47)),
    wrong(PACK, "None in sparse_mode 0 .* TND", atten_mask=bools(1, 6, 9)),
]  # fmt: skip


def block_rules() -> Iterator[WrongCall]:
    # Block 1 of the first sequence is read, its third one is not.
    for block in (-1, 7, 2**31 - 1, -(2**31)):
        table = torch.tensor([[1, block, block], [2, block, block]], dtype=torch.int32)
        expected = rf"block numbers in 0..6, got {block} at \[0, 1\], for the 20 keys"
        for case in (PAGED, BY_HEAD, FRACTALS):
            yield wrong(case, expected, block_table=table, on_meta=False)


def limits() -> Iterator[WrongCall]:
    def wrong(product: str, case: InferCase, expected: str, *args: Any, **change: Any) -> WrongCall:
        given = {"dtype": torch.float16, "limits": product, **change}
        return wrong_call(FUSED_INFER_ATTENTION_SCORE, case, expected, *args, **given)

    plain = InferCase(s=(6, 9))
    pack = replace(PACK, d=64)
    paged = replace(PAGED, d=64)
    absorbed = replace(PAGED, layout="BNSD", heads=(8, 1), d=512, rope=64)
    yield from (
        wrong("310P", plain, "product: a product that has aclnnFusedInfer", NotImplementedError),
        wrong("A2", plain, "query: float16 or bfloat16", TypeError, dtype=torch.float32),
        wrong("A2", replace(plain, heads=(257, 1)), r"query: expected N .* 1\.\.256"),
        wrong("A2", replace(plain, d=20), "query: expected D .* multiple of 16"),
        wrong("950", replace(plain, d=528), "query: expected D "),
        wrong("A2", replace(plain, dv=128), "value: or 128 beside 192"),
        wrong("A2", replace(pack, d=272), "query: D of at most 256, or absorbed MLA, in"),
        wrong("A2", replace(plain, layout="BSH_BNSD", d=80), "query: in NTD_TND, BSH_BNSD and"),
        wrong("A2", replace(plain, layout="BSH_NBSD"), "layout: for absorbed MLA alone"),
        wrong("A2", replace(plain, rope=64), "query_rope: Dr of 64, beside D of 128 or 512"),
        wrong("A2", replace(plain, d=128, rope=32), "query_rope: Dr of 64, beside"),
        wrong("A2", replace(absorbed, dv=128, pages="heads"), "value: 128 beside 192"),
        wrong("A2", replace(absorbed, heads=(8, 2)), "num_key_value_heads: 1 for absorbed MLA"),
        wrong("A2", replace(absorbed, heads=(12, 1)), "num_heads: a power of two up to 128"),
        wrong("A2", replace(absorbed, pages="", lengths=(None, None), s=(2, 9)),
              "block_table: a tensor for absorbed MLA"),
        wrong("A2", replace(absorbed, layout="BNSD_BSND"), "layout: NBSD or NTD for absorbed"),
        wrong("A2", replace(absorbed, mode=2), "sparse_mode: 0, 3 or 4 for absorbed MLA"),
        wrong("A2", replace(absorbed, layout="TND", lengths=((1, 2), (20, 7)), lse=True),
              "return_softmax_lse: False for absorbed MLA in packed layouts"),
        wrong("A2", replace(pack, mode=2), "sparse_mode: 0, 3 or 4 in packed layouts"),
        wrong("A2", pack, "inner_precise: 0 in packed layouts", inner_precise=1),
        wrong("A2", replace(pack, mode=4), "pre_tokens, next_tokens: at least -Lq and -Lk",
              pre_tokens=-4, on_meta=False),
        wrong("A2", replace(paged, block_size=1040), "key: block_size of at most 1024"),
        wrong("A2", replace(paged, d=80), "key: block_size of 128, or a multiple"),
        wrong("A2", replace(paged, d=80, s=(1, 0), block_size=528), "key: at most 512"),
        wrong("A2", replace(paged, heads=(256, 256), d=256, block_size=128),
              "key: H of at most 65535"),
        wrong("A2", replace(paged, pages="fractals", d=80, block_size=128),
              "key: D of 64 or 128 in fractal pages"),
        wrong("A2", replace(paged, d=192, dv=128, block_size=128), "value: shape in pages"),
        wrong("A2", replace(plain, d=80, sink="query"), "sink: head size is 64 or 128"),
        wrong("A2", replace(plain, sink="query"), "inner_precise: 0 beside a sink",
              inner_precise=2),
    )  # fmt: skip


DIFFERENTIABLE = (
    (PLAIN, "query"), (PLAIN, "key"), (PLAIN, "value"), (SINK, "sink"), (ROPES, "key_rope"),
    (INT8, "key_antiquant_scale"),
)  # fmt: skip
SCALES = ("key_antiquant_scale", "value_antiquant_scale", "dequant_scale_query")
TENSORS = ("key", "value", "atten_mask", "query_rope", "key_rope", "sink", "block_table")
WRONG_CALLS = [
    *RULES, *device_rules(wrong, replace(PAGED, mask="BS", rope=16, sink="float32"), TENSORS),
    *device_rules(wrong, INT8_QUERY, SCALES), *gradient_rules(wrong, DIFFERENTIABLE),
    *block_rules(), *limits(),
]  # fmt: skip
