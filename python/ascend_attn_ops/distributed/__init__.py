"""The operators on several devices, with torch.distributed.

Context parallelism: each rank holds some tokens of the sequences (:class:`SequenceShards`), and the
functions of this package take and return what their namesakes in `ascend_attn_ops` do, for those
tokens. Tensor and data parallelism: after :func:`enable_dtensor` all operators take DTensors. Not
imported by `import ascend_attn_ops`.
"""

from ascend_attn_ops.distributed.compressed import (
    compress_keys,
    sparse_flash_mla,
    sparse_flash_mla_with_indexer_loss,
)
from ascend_attn_ops.distributed.dense import flash_attention_score
from ascend_attn_ops.distributed.dtensor import enable_dtensor
from ascend_attn_ops.distributed.shards import Part, SequenceShards
from ascend_attn_ops.distributed.sparse import (
    lightning_indexer,
    lightning_indexer_kl_loss,
    prefetch,
    sparse_flash_attention,
)

__all__ = [
    "Part",
    "SequenceShards",
    "compress_keys",
    "enable_dtensor",
    "flash_attention_score",
    "lightning_indexer",
    "lightning_indexer_kl_loss",
    "prefetch",
    "sparse_flash_attention",
    "sparse_flash_mla",
    "sparse_flash_mla_with_indexer_loss",
]
