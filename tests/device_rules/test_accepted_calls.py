"""Calls that devices take, beside those on both sides of a rule in test_boundaries.py."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.boundaries import dense, prompt, scatter, sparse
from ascend_attn_check.boundaries.infer import (
    ABSORBED,
    ABSORBED_PACK,
    PACK,
    PAGED,
    PAGED_PACK,
    PLAIN,
    call,
)
from torch import Tensor

# flash_attention_score: calls that some devices refuse, and others take.


def call_dense(operator: str, case: dense.FlashCase, change: dict[str, Any]) -> None:
    getattr(torch.ops.ascend, operator)(**dense.arguments(operator, case, change))


@pytest.mark.parametrize("row", [x for x in dense.BOUNDARIES if x.others], ids=lambda row: row.name)
def test_other_devices_take_the_call(row: dense.Boundary) -> None:
    for operator in row.operators:
        for product, cann in row.others:
            with ops.limits(product, cann):  # type: ignore[arg-type]
                call_dense(operator, row.case, row.refused)


@pytest.mark.parametrize("mode", [None, 3])
def test_the_launch_closes_padded_packs(mode: int | None) -> None:
    """So that no device refuses one."""
    case = dense.FlashCase(layout="TND", lengths=((3, 4), (5, 6)), tail=(1, 2), mode=mode)
    for product, cann in (("A2", "9.1"), ("A3", "9.0"), ("A2", "8.5"), ("950", "9.1")):
        with ops.limits(product, cann):  # type: ignore[arg-type]
            call_dense("flash_attention_score", case, {})


# prompt_flash_attention: products that have it, and calls that none of them limits.

PROMPT = torch.ops.ascend.prompt_flash_attention


def test_950_has_a_function_from_cann_9_0_on() -> None:
    error = "got Ascend 950 with CANN 8.5; ascend_attn_ops.limits"
    with ops.limits("950", cann="8.5"), pytest.raises(NotImplementedError, match=error):
        PROMPT(**prompt.inputs())
    with ops.limits("950", cann="9.0"):
        PROMPT(**prompt.inputs())


@pytest.mark.parametrize("cann", ["8.5", "9.0"])
def test_a3_has_the_function_from_cann_9_1_on(cann: Any) -> None:
    error = f"got Ascend A3 with CANN {cann}; ascend_attn_ops.limits"
    with ops.limits("A3", cann=cann), pytest.raises(NotImplementedError, match=error):
        PROMPT(**prompt.inputs())
    with ops.limits("A3"):
        PROMPT(**prompt.inputs())


@pytest.mark.parametrize("device", [prompt.A2, ("A2", "8.5"), prompt.A3, prompt.P950])
def test_what_no_product_limits(device: tuple[Any, Any]) -> None:
    with ops.limits(*device):
        PROMPT(**prompt.inputs(sq=2**26, skv=2**26))
        PROMPT(**prompt.merged(n=256, d=512))
        scale = {"quant_scale2": prompt.meta(1), "quant_offset2": prompt.meta(1)}
        assert PROMPT(**prompt.inputs() | scale).dtype == torch.int8


# fused_infer_attention_score: calls that Ascend 950 accepts and A2 refuses, by CANN's checks.

UNPAGED = replace(ABSORBED, pages="", s=(2, 20), lengths=(None, None))
# Accepted since CANN 9.0, each with the beginning of A2's error.
ACCEPTED = {
    "many heads": (call(PLAIN, heads=(257, 1)), "query: expected N "),
    "D of 127": (call(PLAIN, d=127), "query: expected D "),
    "D of 272 in a pack": (call(PACK, d=272), "query: expected D of at most 256"),
    "smaller values": (call(PLAIN, d=128, dv=64, mode=2), "value: expected query's D "),
    "larger values in a pack": (call(PACK, d=80, dv=96), "value: expected query's D "),
    "left-up causal packs": (call(PACK, mode=2), "sparse_mode: expected 0, 3 or 4 in packed"),
    "bands of packs": (call(PACK, mode=4, pre=-4, next=9), "pre_tokens, next_tokens: "),
    "fast packs": (call(PACK, heads=(4, 2), inner_precise=1), "inner_precise: expected 0 in "),
    "fractals": (call(PAGED, pages="fractals", d=96, block_size=128), "key: expected D of 64 or"),
    "absorbed without pages": (call(UNPAGED), "block_table: expected a tensor"),
    "absorbed packs with statistics": (call(ABSORBED_PACK, lse=True), "return_softmax_lse: "),
}
# The same since CANN 9.1.
ACCEPTED_BY_9_1 = {
    "192 and 128 in pages": (call(PAGED, d=192, dv=128, block_size=16), "value: expected key's"),
    "192 and 128 in pages of a pack": (call(PAGED_PACK, d=192, dv=128), "value: expected key's"),
    "many absorbed queries": (call(ABSORBED, s=(17, 0)), ""),
    "counts of absorbed queries": (call(ABSORBED, lengths=((1, 2), (20, 7))), ""),
}


@pytest.mark.parametrize("name", [*ACCEPTED, *ACCEPTED_BY_9_1])
def test_950_accepts(name: str) -> None:
    arguments, error_of_a2 = (ACCEPTED | ACCEPTED_BY_9_1)[name]
    for product, cann, error in (
        ("950", "9.0", "on Ascend 950 with CANN 9" if name in ACCEPTED_BY_9_1 else ""),
        ("950", "9.1", ""),
        ("A2", "9.1", error_of_a2 and f"fused_infer_attention_score: {error_of_a2}"),
    ):
        raising = pytest.raises(ValueError, match=error) if error else nullcontext()
        with ops.limits(product, cann), raising:  # type: ignore[arg-type]
            torch.ops.ascend.fused_infer_attention_score(**arguments())


# scatter_pa_kv_cache_: calls that devices take, and modes that Ascend 950 ignores.

SCATTER = torch.ops.ascend.scatter_pa_kv_cache_
SCATTERS: list[tuple[list[scatter.Device], scatter.Arguments]] = [
    (scatter.OLD, scatter.runs("Rope", dtype=torch.int8, d=32)),
    (scatter.OLD, scatter.nz(65536)),
    (scatter.NEW, scatter.rows(t=0)),
    (scatter.NEW, scatter.FIVE_AXES),
    *(
        ([("A2", "9.1"), ("A3", "9.1"), ("950", "9.1")], x)
        for x in (scatter.GAPS, scatter.BY_HEADS, scatter.NZ_GAPS)
    ),
    ([("950", "9.0"), ("950", "9.1")], scatter.rows(t=33)),
    ([("950", "9.1")], scatter.FIVE_AXES),
    ([("950", "9.1")], scatter.nz(65536)),
]


@pytest.mark.parametrize(("devices", "arguments"), SCATTERS, ids=str)
def test_scatters(devices: list[scatter.Device], arguments: scatter.Arguments) -> None:
    for product, cann in devices:
        with ops.limits(product, cann=cann):
            SCATTER(**arguments)


@pytest.mark.parametrize("cann", ["8.5", "9.0"])
def test_950_ignores_the_modes(cann: Any) -> None:
    """So a cache in fractal layout has a wrong shape, and strides would be ignored."""
    with ops.limits("950", cann=cann):
        SCATTER(**scatter.rows(cache_mode="PA_NZ", scatter_mode="Omni"))
        with pytest.raises(ValueError, match=re.escape("(num_blocks, block_size, N, D)")):
            SCATTER(**scatter.nz())
        with pytest.raises(ValueError, match=r"strides: expected \[1, 1\]"):
            SCATTER(**scatter.rows(scatter_mode="Nct", strides=[7, 7]))


def test_950_obeys_the_modes_from_cann_9_1_on() -> None:
    with ops.limits("950", cann="9.1"):
        SCATTER(**scatter.nz())
        with pytest.raises(ValueError, match=re.escape("(num_blocks, N * D / L, block_size, L)")):
            SCATTER(**scatter.rows(d=32, cache_mode="PA_NZ"))


# Sparse operators: calls that the limits take, and whole products that they exclude.


def call_sparse(operator: str, device: str, sizes: sparse.Sizes) -> None:
    product, cann = device.split(":")
    with ops.limits(product, cann):  # type: ignore[arg-type]
        getattr(torch.ops.ascend, operator)(**sparse.arguments(operator, sizes))


@pytest.mark.parametrize("operator", sparse.MAKERS)
def test_ascend_950_has_the_operators_from_cann_9_1(operator: str) -> None:
    if operator in (sparse.LIG, sparse.QLI):  # which no CANN has there, or not of int8
        with pytest.raises(NotImplementedError, match="got Ascend 950;"):
            call_sparse(operator, "950:9.1", sparse.Sizes())
    else:
        call_sparse(operator, "950:9.1", sparse.Sizes())
        for cann in ("8.5", "9.0"):
            with pytest.raises(NotImplementedError, match=f"got Ascend 950 with CANN {cann}"):
                call_sparse(operator, f"950:{cann}", sparse.Sizes())
    with pytest.raises(NotImplementedError, match="got Ascend 310P;"):
        call_sparse(operator, "310P:9.1", sparse.Sizes())


@pytest.mark.parametrize(
    "sizes", [sparse.Sizes(), sparse.tnd([4, 4], [4096, 8192])], ids=["BSND", "TND"]
)
def test_the_gradient_takes_indices_without_an_axis_of_heads(sizes: sparse.Sizes) -> None:
    for index_heads in (True, False):
        call_sparse(
            sparse.LIG, "A2:9.1", sparse.Sizes(lengths=sizes.lengths, index_heads=index_heads)
        )
    given = sparse.lightning_indexer_grad(sparse.Sizes(lengths=sizes.lengths, index_heads=False))
    given["d_values"] = given["d_values"].unsqueeze(-2)
    torch.ops.ascend.lightning_indexer_grad(**given)
    given["d_values"] = given["d_values"][..., 1:]
    with pytest.raises(ValueError, match=r"d_values: expected shape .* K"):
        torch.ops.ascend.lightning_indexer_grad(**given)


def test_the_lengths_of_keys_are_checked_where_they_can_be_read() -> None:
    """In sparse_mode 0 the device reads K keys of every sequence."""
    given = sparse.lightning_indexer_grad(sparse.tnd([4, 4], [4096, 8192], options={}))
    given |= {"sparse_mode": 0}
    torch.ops.ascend.lightning_indexer_grad(**given)
    on_cpu = {
        name: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x
        for name, x in sparse.lightning_indexer_grad(sparse.tnd([2, 4], [2048, 4095])).items()
    }
    on_cpu["actual_seq_lengths_query"] = torch.tensor([2, 4], dtype=torch.int32)
    on_cpu["actual_seq_lengths_key"] = torch.tensor([2048, 4095], dtype=torch.int32)
    torch.ops.ascend.lightning_indexer_grad(**on_cpu)
    with pytest.raises(ValueError, match="in sparse_mode 0 on Ascend A2, got 2047 keys for K = "):
        torch.ops.ascend.lightning_indexer_grad(**on_cpu, sparse_mode=0)


def test_determinism_of_the_process(set_determinism: Any) -> None:
    set_determinism(True)
    with pytest.raises(ValueError, match="warn_only=True"):
        call_sparse(sparse.SFAG, "A2:8.5", sparse.Sizes())
    set_determinism(True, warn_only=True)
    call_sparse(sparse.SFAG, "A2:8.5", sparse.Sizes())
