"""Wrong arguments of the public Python functions, which no operator sees or sees too late."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops._core.arguments import shown
from support.freed import freed
from torch import Tensor

np = pytest.importorskip("numpy", reason="numpy is not installed")

pytestmark = pytest.mark.usefixtures("no_limits")

NOT_IMPLEMENTED, TYPE, VALUE = NotImplementedError, TypeError, ValueError
Case = tuple[dict[str, Any], type[Exception], str]

Q, K = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 6, 8)
PACKED = torch.randn(5, 4, 8)
TABLE = torch.tensor([[7, 2], [1, 3]])
TWO = torch.tensor([1, 2])
HIDDEN = torch.randn(2, 3, 8)


def beyond(x: Tensor) -> Tensor:
    """Behind the end of a storage that would hold as much at its beginning."""
    pair = torch.stack((x, x))
    storage = pair.untyped_storage()
    second = pair[1]
    storage.resize_(storage.nbytes() // 2)
    return second


FREED, FREED_TABLE, FREED_TWO = freed(torch.randn(2, 2, 4, 8)), freed(TABLE), freed(TWO)
NESTED = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
TND = {
    "query": PACKED, "key": PACKED, "value": PACKED, "layout": "TND",
    "actual_seq_lengths_query": [5], "actual_seq_lengths_key": [5], "dropout_p": 0.5,
}  # fmt: skip


DENSE = {"query": Q, "key": K, "value": K, "num_heads": 4, "layout": "BNSD"}
ROWS = torch.randn(1, 6, 1, 8)
SPARSE = {
    "query": torch.randn(1, 5, 4, 8), "key": ROWS, "value": ROWS, "scale_value": 1.0,
    "sparse_indices": torch.zeros(1, 5, 1, 3, dtype=torch.int32),
}  # fmt: skip
PADDED = {"actual_seq_lengths_query": [3], "actual_seq_lengths_key": [6]}
NOTHING = torch.zeros(5, 6, dtype=torch.bool)
LOSS = ("query", "key", "query_index", "key_index", "weights", "sparse_indices", "softmax_max",
        "softmax_sum")  # fmt: skip

flash = partial(ops.flash_attention_score, **DENSE)
prompt = partial(ops.prompt_flash_attention, **DENSE)
sparse = partial(ops.sparse_flash_attention, **SPARSE)
index = partial(
    ops.lightning_indexer, PACKED, PACKED[:, :1], PACKED[..., 0], layout="TND",
    actual_seq_lengths_key=[2, 4],
)  # fmt: skip
update = partial(ops.attention_update, lse=[torch.zeros(2)], local_out=[torch.ones(2, 8)])
ROPE = torch.randn(5, 64).half()
latent = partial(ops.quantize_latent, latent=ROPE.repeat(1, 8), key_rope=ROPE)
quantize = partial(ops.quantize_attention_inputs, query=Q, key=K, value=K)
mask = partial(ops.sparse_mode_mask, sparse_mode=3, sq=3, skv=4)
log_sum_exp = partial(ops.log_sum_exp, softmax_max=Q, softmax_sum=Q)
slots = partial(
    ops.slot_mapping, block_table=TABLE, positions=torch.tensor([[3], [17]]), block_size=16
)
gather = partial(
    ops.gather_paged_kv, cache=torch.zeros(9, 16, 1, 4), block_table=TABLE, lengths=[17, 3]
)
shape = partial(
    ops.nz_cache_shape, num_blocks=2, block_size=4, num_heads=2, head_size=16, dtype=torch.float16
)
to_nz = partial(ops.nd_to_nz, cache=torch.randn(2, 3, 1, 16))
to_nd = partial(ops.nz_to_nd, cache=torch.randn(2, 2, 4, 8), num_heads=2)
loss = partial(ops.lightning_indexer_kl_loss, **dict.fromkeys(LOSS, Q), scale_value=1.0)
with_loss = partial(ops.sparse_flash_mla_with_indexer_loss, *(Q,) * 7, scale_value=1.0)
NO_ATTENTION = dict.fromkeys(("query", "key", "softmax_max", "softmax_sum", "scale_value"))
attach = partial(ops.attach_loss, output=Q, loss=K)
module = partial(ops.LightningIndexer, hidden_size=8, num_heads=2, head_dim=8, rope_dim=4)
forward = partial(module().forward, hidden=HIDDEN)
select = partial(module().select, projections=module()(HIDDEN), sparse_count=2)


def enter(block: Callable[..., Any], **options: Any) -> None:
    with block(**options):
        pass


limits = partial(enter, ops.limits, product="A2")
compare = partial(enter, ops.compare)
record = partial(enter, ops.record, folder="calls")
compress = partial(ops.compress_keys, values=HIDDEN, logits=HIDDEN, position_bias=torch.zeros(4, 8))


WRONG: dict[Callable[..., Any], tuple[str, list[Case]]] = {
    flash: ("flash_attention_score", [
        ({"query": None, "sparse_mode": 3}, VALUE, "query: expected a tensor, got None"),
        ({"query": [1.0], "sparse_mode": 2}, TYPE, r"query: expected a tensor, got \[1.0\]"),
        ({"query": "a\nb"}, TYPE, "query: expected a tensor, got 'a"),
        ({"num_heads": "4"}, TYPE, "num_heads: .* 64 bits or None, got '4'"),
        ({"num_heads": 2**63}, TYPE, "num_heads: .* 64 bits or None, got 9"),
        ({"num_heads": FREED}, VALUE, "num_heads: expected a storage that holds every element"),
        ({"key": [1, [FREED]]}, VALUE, "key: expected a storage that holds every element"),
        ({"query": Q[0], "key": K[0], "value": K[0], "layout": "BSH", "num_heads": "4"}, TYPE,
         "num_heads: expected a whole number"),
        ({"layout": None}, VALUE, "layout: expected one of BSH, SBH, BSND, BNSD, TND, got 'None'"),
        ({"query": torch.tensor(1.0)}, VALUE, "query: expected rank 4"),
        ({"layout": ["BSH\n" * 10_000]}, TYPE, "layout: expected a string, got"),
        ({"scale_value": "a"}, TYPE, "scale_value: expected a number or None, got 'a'"),
        ({"pse_shift": 3}, TYPE, "pse_shift: expected a tensor or None, got 3"),
        ({"attn_mask": 3}, TYPE, "attn_mask: expected a tensor, got int"),
        ({"attn_mask": freed(torch.ones(5, 6, dtype=torch.bool))}, VALUE,
         "attn_mask: expected a storage that holds every element"),
        ({"attn_mask": [[True]]}, TYPE, "attn_mask: expected a tensor, got list"),
        ({"attn_mask": NOTHING.float()}, TYPE, "attn_mask: .* as pse_shift with pse_type=0"),
        ({"attn_mask": NOTHING.byte(), "dropout_p": 0.5}, TYPE, "attn_mask: expected dtype bool"),
        ({"attn_mask": NOTHING, "atten_mask": NOTHING}, VALUE, "attn_mask: .* both"),
        ({"dropout_p": 1.0}, VALUE, r"dropout_p: expected a probability in \[0, 1\)"),
        ({"dropout_p": 0.5, "keep_prob": 0.5}, VALUE, "dropout_p: expected 0 beside"),
        ({"sparse_mode": TWO}, TYPE, r"sparse_mode: expected a whole .* a tensor of int64 \[2\]"),
        ({"sparse_mode": np.arange(2)}, TYPE, "sparse_mode: expected a whole number"),
        ({"dropout_p": "x"}, TYPE, "dropout_p: expected a number, got 'x'"),
        ({"dropout_p": None}, TYPE, "dropout_p: expected a number, got None"),
        ({"dropout_p": torch.ones(2)}, TYPE, "dropout_p: expected a number, got a tensor"),
        ({"dropout_p": np.ones(2)}, TYPE, "dropout_p: expected a number"),
        ({"dropout_p": torch.tensor(1j)}, TYPE, "dropout_p: expected a number, got a tensor of co"),
        ({"dropout_p": torch.ones((), device="meta")}, TYPE, "dropout_p: expected a number, got a"),
        ({"dropout_p": torch.ones(1).to_sparse()}, TYPE, "dropout_p: expected a number, got a te"),
        ({"dropout_p": freed(torch.ones(1))}, VALUE, "dropout_p: expected a storage that holds"),
        ({"dropout_p": float("nan")}, VALUE, "dropout_p: expected a probability"),
        ({"dropout_p": 0.5, "keep_prob": None}, TYPE, "keep_prob: expected a number"),
        ({"dropout_p": 0.5, "generator": 3}, TYPE, "generator: expected a torch.Generator or"),
        ({"dropout_p": 0.5, "query": torch.randn(8)}, VALUE, "query: expected rank 4"),
        ({"dropout_p": 0.5, "key": None}, VALUE, "key: expected a tensor, got None"),
        ({"dropout_p": 0.5, "key": [1]}, TYPE, "key: expected a tensor"),
        ({"dropout_p": 0.5, "num_heads": 2**62}, VALUE, "query: expected num_heads = "),
        ({"dropout_p": 0.5, "layout": "BSD"}, VALUE, "layout: expected one of"),
        (TND | {"actual_seq_lengths_query": ["a"]}, TYPE,
         r"actual_seq_lengths_query: expected whole numbers, .* got \['a'\]"),
        (TND | {"actual_seq_lengths_query": 5}, TYPE, "actual_seq_lengths_query: .* got 5"),
        *(
            (TND | {"actual_seq_lengths_query": x}, TYPE,
             "actual_seq_lengths_query: expected whole numbers")
            for x in ([2.0, 4], TWO.double(), TABLE, torch.tensor(4), np.array([[2, 4]]),
                      torch.quantize_per_tensor(TWO.float(), 1.0, 0, torch.qint8))
        ),
        (TND | {"actual_seq_lengths_key": {5}}, TYPE, r"actual_seq_lengths_key: .* got \{5\}"),
        (TND | {"actual_seq_lengths_key": "5"}, TYPE, "actual_seq_lengths_key: .* got '5'"),
        (TND | {"actual_seq_lengths_key": [2**40]}, VALUE, "actual_seq_lengths_key: .* T = 5"),
        (TND | {"actual_seq_lengths_key": [-4]}, VALUE, "actual_seq_lengths_key: .* got -4"),
        (TND | {"actual_seq_lengths_key": torch.tensor([5]).to("meta")}, VALUE,
         "actual_seq_lengths_key: expected lengths to read, got a tensor on the device meta"),
        # Padded batches.
        ({"actual_seq_lengths_query": [1, 2]}, VALUE, ".*_query: expected one count .*, 1, in"),
        ({"actual_seq_lengths_key": [8]}, VALUE, r"actual_seq_lengths_key: .* 0..S = 6"),
        ({"actual_seq_lengths_key": [-1]}, VALUE, ".* counts in 0..S = 6, got -1 at 0"),
        (PADDED | {"attn_mask": NOTHING[:1]}, VALUE, r"attn_mask: .*mask\[:, None, None\]"),
        (PADDED | {"atten_mask": NOTHING[:2]}, VALUE, r"atten_mask: .* got \[2, 6\] "),
        (PADDED | {"pse_shift": torch.randn(1, 4, 1024, 6)}, VALUE, "pse_shift: .* axes B, N and"),
        (PADDED | {"query_rope": Q[:, :, :1], "key_rope": K}, VALUE, "query_rope: expected query"),
    ]),
    prompt: ("prompt_flash_attention", [
        ({"query": torch.tensor(1.0)}, VALUE, "query: expected rank 4"),
        ({"query": None, "sparse_mode": 3}, VALUE, "query: expected a tensor, got None"),
        ({"query": Q[0], "key": K[0], "value": K[0], "layout": "BSH", "num_heads": "x"}, TYPE,
         "num_heads: expected a whole number"),
    ]),
    sparse: ("sparse_flash_attention", [
        ({"query": None, "actual_seq_lengths_query": [5]}, VALUE, "query: expected a tensor"),
        ({"query": [3], "actual_seq_lengths_query": [5]}, TYPE, "query: expected a tensor"),
        ({"actual_seq_lengths_query": 5}, TYPE, "actual_seq_lengths_query: expected whole"),
        ({"actual_seq_lengths_query": {5}}, TYPE, "actual_seq_lengths_query: expected whole"),
        ({"actual_seq_lengths_query": iter([5])}, TYPE, "actual_seq_lengths_query: expected whole"),
    ]),
    index: ("lightning_indexer", [
        ({"actual_seq_lengths_query": [1.5, 4]}, TYPE, r"actual_seq_.* got \[1.5, 4\]"),
        ({"actual_seq_lengths_query": ["2", "4"]}, TYPE, r"actual_seq_.* got \['2', '4'\]"),
        ({"actual_seq_lengths_query": [2, 2**40]}, VALUE, "actual_seq_lengths_query: .* T = 5"),
    ]),
    update: ("attention_update", [
        ({"local_out": NESTED}, TYPE, "local_out: expected a list of tensors, got a"),
        ({"lse": None}, TYPE, "lse: expected a list of tensors, got None"),
        ({"lse": Q}, TYPE, r"lse: expected a list of tensors, got a tensor of float32 \[1, 4"),
    ]),
    quantize: ("quantize_attention_inputs", [
        ({"query": Q.to("meta"), "key": Q.to("meta"), "value": Q.to("meta")}, NOT_IMPLEMENTED,
         "query: expected elements to read"),
        ({"value": K.to_sparse()}, NOT_IMPLEMENTED, "value: expected a dense tensor"),
        ({"key": beyond(K)}, VALUE, "key: expected a storage that .* got one of 768 bytes .* 192;"),
        ({"value": Q.to("meta")}, VALUE, r"value: expected device cpu \(query's\), got meta"),
        ({"key": K.to(torch.int8)}, TYPE, "key: expected dtype float16, .*, got torch.int8"),
        ({"key": K.double()}, TYPE, "key: expected dtype float16, .*, got torch.float64"),
        ({"scale_dtype": torch.bfloat16}, TYPE, "scale_dtype: .* torch.float32 or torch.uint64"),
        ({"scale_dtype": []}, TYPE, r"scale_dtype: expected .* got \[\]"),
        ({"scale_dtype": "float32"}, TYPE, "scale_dtype: expected .* got 'float32'"),
    ]),
    latent: ("quantize_latent", [
        ({"latent": ROPE[0, 0]}, VALUE, r"latent: expected shape \(..., D\), got \(\)"),
        ({"key_rope": ROPE.int()}, TYPE, "key_rope: expected dtype float16, bfloat16 or float32"),
        ({"key_rope": ROPE[:3]}, VALUE, r"key_rope: expected shape \(5, 64\), got \(3, 64\)"),
        ({"key_rope": ROPE.to("meta")}, VALUE, "key_rope: expected device cpu"),
    ]),
    ops.quantize_index_keys: ("quantize_index_keys", [
        ({"keys": [1.0]}, TYPE, "keys: expected a tensor, got list"),
        ({"keys": torch.ones(3, 0)}, VALUE, r"keys: expected shape \(..., D\), got \(3, 0\)"),
    ]),
    mask: ("sparse_mode_mask", [
        ({"sparse_mode": "3"}, TYPE, "sparse_mode: expected a whole number, got '3'"),
        ({"sparse_mode": 9}, VALUE, "sparse_mode: expected 0 to 8"),
        ({"sq": -1}, VALUE, r"sq: expected 0\.\..* got -1"),
        ({"skv": -1}, VALUE, "skv: expected at least 0, got -1"),
        ({"sq": 1.0}, TYPE, "sq: expected a whole number, got 1.0"),
        ({"sq": 2**40, "skv": 0}, VALUE, "sq: expected"),
        ({"sq": 2**20, "skv": 2**20}, VALUE, r"skv: expected at most 4294967296 elements"),
        ({"skv": 2**63}, VALUE, "skv: expected"),
        ({"pre_tokens": 2**63}, VALUE, "pre_tokens: expected"),
        ({"next_tokens": None}, TYPE, "next_tokens: expected a whole number, got None"),
        ({"sparse_mode": 5, "prefix": -5}, VALUE, r"prefix: expected 0\.\.4, got -5"),
        ({"sparse_mode": 6, "prefix": 2**62}, VALUE, r"prefix: expected 0\.\.4, got"),
        ({"band": "no"}, TYPE, "band: expected a bool, got 'no'"),
    ]),
    log_sum_exp: ("log_sum_exp", [
        ({"softmax_max": Q.int()}, TYPE, "softmax_max: expected a floating point dtype, got int32"),
        ({"softmax_sum": Q.double()}, TYPE, r"softmax_sum: expected dtype float32 \(softmax_max's"),
        ({"softmax_sum": Q[0]}, VALUE, r"softmax_sum: expected shape .* \(softmax_max's\), got"),
        ({"softmax_sum": Q.to("meta")}, VALUE, "softmax_sum: expected device cpu .*, got meta"),
    ]),
    slots: ("slot_mapping", [
        ({"block_table": TABLE.float()}, TYPE, "block_table: expected dtype int32 or int64, got"),
        ({"positions": torch.ones(2, 1)}, TYPE, "positions: expected an integer dtype, got float"),
        ({"block_table": torch.tensor(7), "positions": TWO}, VALUE, "block_table: expected at lea"),
        ({"positions": torch.tensor([[17]])}, VALUE,
         r"positions: expected shape \(2, S\), or \(2,\) for one token .* got \[1, 1\]"),
        ({"positions": torch.ones(2, 1, 1, dtype=torch.int64)}, VALUE, "positions: expected shape"),
        ({"positions": torch.tensor([[3], [32]])}, VALUE, "positions: expected positions below 32"),
        ({"positions": TWO.to("meta")}, VALUE, "positions: expected device cpu"),
        ({"block_size": 0}, VALUE, "block_size: expected at least 1, got 0"),
        ({"block_size": 2.0}, TYPE, "block_size: expected a whole number, got 2.0"),
        ({"block_table": torch.full((2, 2), 2**28, dtype=torch.int32)}, VALUE,
         "block_table: expected blocks below 134217728, whose slots int32 holds, got 268435456"),
        ({"block_table": torch.full((2, 2), 2**60)}, VALUE, "block_table: expected blocks below"),
    ]),
    gather: ("gather_paged_kv", [
        ({"cache": torch.zeros(9)}, VALUE, r"cache: expected shape \(num_blocks, block_size"),
        ({"cache": NESTED}, VALUE, "cache: expected a tensor of one shape, got a nested one"),
        ({"cache": torch.zeros(9, 0, 1, 4)}, VALUE, r"cache: expected .* at least 1, got \[9, 0"),
        ({"block_table": TABLE.float()}, TYPE, "block_table: expected dtype int32 or int64, got"),
        ({"block_table": TABLE[0]}, VALUE, r"block_table: expected shape \(2, M\)"),
        ({"block_table": TABLE.to("meta")}, VALUE, "block_table: expected device cpu"),
        ({"lengths": FREED_TWO}, VALUE, "lengths: expected a storage that holds every element"),
        ({"block_table": TABLE + 9}, VALUE, r"block_table: expected 0\.\.8 where .*, got 1\d"),
        ({"block_table": TABLE - 9}, VALUE, r"block_table: expected 0\.\.8 where .*, got -\d"),
        ({"lengths": None}, TYPE, "lengths: expected whole numbers, as a list or a tensor"),
        ({"lengths": [1.5, 2]}, TYPE, "lengths: expected whole numbers"),
        ({"lengths": np.array(2)}, TYPE, r"lengths: expected whole numbers, .* got array\(2\)"),
        ({"lengths": [17]}, VALUE, r"block_table: expected shape \(1, M\)"),
        ({"lengths": [33, 3]}, VALUE, r"lengths: expected 0\.\.32, got 33"),
        ({"lengths": torch.tensor([3, -1])}, VALUE, r"lengths: expected 0\.\.32, got -1"),
    ]),
    shape: ("nz_cache_shape", [
        ({"num_blocks": -1}, VALUE, "num_blocks: expected at least 0, got -1"),
        ({"num_heads": None}, TYPE, "num_heads: expected a whole number"),
        ({"head_size": 24}, VALUE, "head_size: expected a multiple of 16"),
        ({"dtype": "float16"}, TYPE, "dtype: expected a torch.dtype, got 'float16'"),
    ]),
    to_nz: ("nd_to_nz", [
        ({"cache": torch.randn(2, 3, 16)}, VALUE, r"cache: expected shape .* got \[2, 3, 16\]"),
        ({"cache": torch.randn(2, 3, 1, 12)}, VALUE,
         r"cache: expected D of a multiple of 32 bytes, got \[2, 3, 1, 12\] of float32"),
    ]),
    to_nd: ("nz_to_nd", [
        ({"cache": torch.randn(2, 2, 4)}, VALUE, "cache: expected shape"),
        ({"cache": torch.randn(2, 2, 4, 16)}, VALUE, "cache: expected shape .* L = 32 bytes"),
        ({"num_heads": 0}, VALUE, "num_heads: expected at least 1, got 0"),
        ({"num_heads": 3}, VALUE, "num_heads: expected a divisor of .* 2, got 3"),
        ({"num_heads": 1.0}, TYPE, "num_heads: expected a whole number"),
    ]),
    limits: ("limits", [
        ({"product": 3}, TYPE, "product: expected a string or None, got 3"),
        ({"cann": 9.0}, TYPE, "cann: expected a string or None, got 9.0"),
        ({"product": "A2\n"}, VALUE, r"product: expected None or one of .*, got 'A2\\x0a'"),
        ({"cann": "9.0\ud800"}, VALUE, r"cann: expected a known name, got '9\.0\\ud800'"),
        ({"product": 99 * "a" + "\ud800"}, VALUE, r"product: expected .*, got 'a+\.\.\.$"),
    ]),
    compare: ("compare", [
        ({"every": 0}, VALUE, "every: expected at least 1, got 0"),
        ({"every": None}, TYPE, "every: expected a whole number, got None"),
        ({"rtol": -1}, VALUE, "rtol: expected None or a number of at least 0"),
        ({"rtol": float("nan")}, VALUE, "rtol: expected None or a number"),
        ({"rtol": "1"}, TYPE, "rtol: expected a number, got '1'"),
    ]),
    record: ("record", [
        ({"when": "now"}, VALUE, "when: expected 'differs', 'raises' or 'always', got 'now'"),
        ({"limit": "many"}, VALUE, "limit: expected a size such as '200MB', got 'many'"),
        ({"limit": 5}, VALUE, "limit: expected a size such as '200MB', got 5"),
    ]),
    compress: ("compress_keys", [
        ({"values": HIDDEN[0]}, VALUE, "values: expected 3 axes"),
        ({"values": None}, TYPE, "values: expected a tensor"),
        ({"logits": HIDDEN[..., 1:]}, VALUE, "logits: expected values' shape"),
        ({"position_bias": torch.zeros(4, 5)}, VALUE, "position_bias: expected"),
        ({"position_bias": torch.zeros(8)}, VALUE, "position_bias: expected"),
        ({"actual_seq_lengths": [4, 8]}, VALUE, "values: expected 2 axes"),
        *(
            ({"values": PACKED[0], "logits": PACKED[0], "actual_seq_lengths": x}, VALUE,
             "actual_seq_lengths: expected")
            for x in ([4, 3, 4], [4, 5])
        ),
    ]),
    loss: ("lightning_indexer_kl_loss", [
        ({"reduction": "a\n" * 10_000}, VALUE, "reduction: expected 'sum' or 'mean', got 'a"),
        ({"reduction": "mean", "normalizer": 3.0}, VALUE, "normalizer: expected None beside "),
        ({"target": Q}, VALUE, "query: expected None beside a target"),
        (NO_ATTENTION | {"target": Q, "softmax_sum": Q}, VALUE, "softmax_sum: expected None besid"),
        (NO_ATTENTION | {"target": Q, "scale_value": 1.0}, VALUE, "scale_value: expected None bes"),
        ({"query": None}, VALUE, "query: expected the attention's, or a target in place"),
        ({"normalize_target": np.array([0, 1])}, TYPE, "normalize_target: expected a bool, got ar"),
        (NO_ATTENTION | {"target": Q, "normalize_target": np.array([0, 1])}, TYPE,
         "normalize_target: expected a bool, got array"),
        ({"reduction": TWO}, VALUE, "reduction: expected 'sum' or 'mean', got a tensor"),
        ({"normalizer": "a"}, TYPE, "normalizer: expected a number, got 'a'"),
        ({"normalizer": 10**400}, TYPE, "normalizer: expected a number, got 1000"),
        ({"normalizer": TWO}, VALUE, "normalizer: expected one element"),
        ({"normalizer": freed(torch.ones(()))}, VALUE, "normalizer: expected a storage that holds"),
    ]),
    with_loss: ("sparse_flash_mla_with_indexer_loss", [
        ({"indexer_loss_weight": "1"}, TYPE, "indexer_loss_weight: expected a number, got '1'"),
        ({"indexer_loss_weight": TWO}, VALUE, "indexer_loss_weight: expected one element"),
    ]),
    attach: ("attach_loss", [
        ({"output": TWO}, TYPE, "output: expected a floating point dtype"),
        ({"loss": 1.0}, TYPE, "loss: expected a tensor, got float"),
        ({"output": None}, TYPE, "output: expected a tensor, got NoneType"),
        ({"loss": TWO}, TYPE, "loss: expected a floating point dtype, got int64"),
        ({"scale": "1"}, TYPE, "scale: expected a number, got '1'"),
        ({"scale": TWO}, VALUE, "scale: expected one element"),
        ({"scale": torch.tensor([1j])}, TYPE, "scale: expected a number, got a tensor of complex"),
    ]),
    module: ("LightningIndexer", [
        ({"hidden_size": -1}, VALUE, r"hidden_size: expected 1\.\..* got -1"),
        ({"hidden_size": 8.5}, TYPE, "hidden_size: expected a whole number, got 8.5"),
        ({"num_heads": 0}, VALUE, r"num_heads: expected 1\.\."),
        ({"head_dim": None}, TYPE, "head_dim: expected a whole number, got None"),
        ({"head_dim": 2**70}, VALUE, r"head_dim: expected 1\.\."),
        ({"head_dim": torch.tensor(8, device="meta")}, TYPE, "head_dim: expected a whole number"),
        ({"rope_dim": "a"}, TYPE, "rope_dim: expected a whole number, got 'a'"),
        *(({"rope_dim": n}, VALUE, f"rope_dim: expected .* got {n}") for n in (-2, 3, 10)),
        ({"rope_dim": 999}, VALUE, r"rope_dim: expected an even number in 0\.\.8"),
        ({"rope_theta": "a"}, TYPE, "rope_theta: expected a number"),
        ({"rope_theta": -1}, VALUE, "rope_theta: expected a positive number, got -1"),
        ({"dtype": torch.int32}, TYPE, "dtype: expected a floating point dtype, got torch.int32"),
    ]),
    forward: ("LightningIndexer.forward", [
        ({"hidden": HIDDEN[..., :7]}, VALUE, r"hidden: expected shape \(B, S, 8\) .* \[2, 3, 7\]"),
        ({"hidden": HIDDEN[0, 0]}, VALUE, "hidden: expected shape"),
        ({"hidden": HIDDEN.int()}, TYPE, "hidden: expected a floating point dtype, got int32"),
        ({"positions": [0, 1, 2]}, TYPE, "positions: expected a tensor, got list"),
        ({"positions": torch.tensor(3)}, VALUE, "positions: expected shape"),
        ({"positions": torch.arange(1)}, VALUE, r"positions: expected shape \(3,\) or \(2, 3\)"),
        ({"positions": torch.zeros(3, 3)}, VALUE, r"positions: expected shape .* got \[3, 3\]"),
    ]),
    select: ("LightningIndexer.select", [
        ({"projections": [FREED]}, TYPE, r"projections: .*got \[a tensor of float32 "),
        ({"projections": None}, TYPE, "projections: expected three tensors"),
        ({"projections": (HIDDEN, HIDDEN)}, TYPE, "projections: expected three tensors"),
    ]),
}  # fmt: skip
# Rules of every tensor: what is given, and what the error says.
TENSORS = {
    quantize: ("query", "key", "value"), log_sum_exp: ("softmax_max", "softmax_sum"),
    slots: ("block_table", "positions"), gather: ("cache", "block_table"), to_nz: ("cache",),
    to_nd: ("cache",), forward: ("hidden",),
}  # fmt: skip
for _function, _names in TENSORS.items():
    for _name in _names:
        WRONG[_function][1].extend([
            ({_name: None}, TYPE, f"{_name}: expected a tensor, got NoneType"),
            ({_name: [1.0]}, TYPE, f"{_name}: expected a tensor, got list"),
            ({_name: freed(_function.keywords[_name])}, VALUE,
             f"{_name}: expected a storage that holds every element"),
        ])  # fmt: skip

CASES = [
    pytest.param(function, *case, id=f"{name}-{index}")
    for function, (name, cases) in WRONG.items()
    for index, case in enumerate(cases)
]


@pytest.mark.parametrize(("function", "change", "kind", "message"), CASES)
def test_wrong_arguments(
    function: Callable[..., Any], change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    name, _ = WRONG[function]
    with pytest.raises(kind, match=rf"^ascend(::|_attn_ops\.){name}: {message}") as caught:
        function(**change)
    assert caught.type is kind
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    # CANN has a status for what it sees. C++ gives it to two helpers as well.
    if name not in ("limits", "sparse_mode_mask"):
        assert ("[ACLNN_ERR_PARAM_" in text) == hasattr(torch.ops.ascend, name)


def test_arguments_of_the_operator_that_a_function_calls() -> None:
    operator = "ascend::sparse_lightning_indexer_grad_kl_loss"
    with pytest.raises(TypeError, match=f"^{operator}: actual_seq_lengths_query: .* got 5"):
        loss(reduction="mean", actual_seq_lengths_query=5)
    projections = module()(HIDDEN)
    with pytest.raises(TypeError, match=r"^ascend::lightning_indexer: sparse_count: .* got 'a'"):
        select(sparse_count="a")
    with pytest.raises(TypeError, match=r"^ascend::lightning_indexer: weights: .* got 3"):
        select(projections=(*projections[:2], 3))


def test_refused_arguments_draw_no_random_numbers() -> None:
    state = torch.get_rng_state()
    for change in (TND | {"actual_seq_lengths_key": [2**40]}, {"dropout_p": 0.5, "num_heads": 8}):
        with pytest.raises(ValueError, match=r"^ascend::flash_attention_score: "):
            flash(**change)
    with pytest.raises(TypeError, match="attn_mask: expected dtype bool"):
        flash(attn_mask=NOTHING.float(), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_in_other_types() -> None:
    """The functions accept the numbers that torch.ops accepts."""
    merged = {"query": Q[0], "key": K[0], "value": K[0], "layout": "BSH"}
    expected = flash(**merged)[0]
    for heads in (np.int64(4), torch.tensor(4), torch.tensor([4])):
        assert torch.equal(flash(**merged, num_heads=heads)[0], expected)
    causal = flash(sparse_mode=3)[0]
    for mode in (np.int64(3), torch.tensor(3)):
        assert torch.equal(flash(sparse_mode=mode)[0], causal)
    for zero in (0, np.float32(0), torch.tensor(0.0), torch.tensor(0, dtype=torch.uint64)):
        assert torch.equal(flash(dropout_p=zero)[0], flash()[0])
    assert torch.equal(mask(sq=np.int64(3), band=np.True_), mask())
    assert torch.equal(slots(block_size=np.int64(16)), slots())
    cache = torch.randn(2, 2, 4, 8)
    assert torch.equal(to_nd(cache=cache, num_heads=True), to_nd(cache=cache, num_heads=1))
    lengths = {"actual_seq_lengths_query": range(5, 6), "actual_seq_lengths_key": np.array([6])}
    state = torch.get_rng_state()
    expected = flash(**TND, num_heads=4)[0]
    for length in ([np.int64(5)], np.array([5]), range(5, 6), torch.tensor([5])):
        torch.set_rng_state(state)
        got = flash(**TND | {"actual_seq_lengths_query": length})[0]
        assert torch.equal(got, expected)
    of_lists = {"actual_seq_lengths_query": [5], "actual_seq_lengths_key": [6]}
    torch.manual_seed(0)
    expected = sparse(**of_lists)[0]
    torch.manual_seed(0)
    assert torch.equal(sparse(**lengths)[0], expected)


def test_positions_of_the_indexer_broadcast() -> None:
    indexer = module()
    expected = indexer(HIDDEN)
    for positions in (torch.arange(3), torch.arange(3)[None], torch.arange(3).expand(2, 3)):
        assert all(map(torch.equal, indexer(HIDDEN, positions), expected))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb", r"'a\nb'"), ("a" * 10_000, "'" + "a" * 99 + "..."),
        (np.zeros((2, 2)), "array([[0., 0.], [0., 0.]])"),
        (torch.zeros(2, 3), "a tensor of float32 [2, 3]"), (None, "None"),
    ],
    ids=["lines", "long", "array", "tensor", "none"],
)  # fmt: skip
def test_values_are_shown_on_one_short_line(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    "function",
    [ops.flash_attention_score, ops.prompt_flash_attention, ops.fused_infer_attention_score],
)
def test_keywords_of_other_libraries(function: Callable[..., Any]) -> None:
    for keyword, hint in (
        ("is_causal", "; here it is sparse_mode=3"), ("scale", "; here it is scale_value"),
        ("colour", ""),
    ):  # fmt: skip
        text = rf"^{function.__name__}\(\) got an unexpected keyword argument '{keyword}'{hint}$"
        with pytest.raises(TypeError, match=text):
            function(**DENSE, **{keyword: None})
