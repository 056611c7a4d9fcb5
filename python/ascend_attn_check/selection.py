"""The selected blocks of sparse attention, by the rows of the reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from ascend_attn_ops.reference.declaration import Arguments
from ascend_attn_ops.reference.sequences import Row, rows, with_dense_keys
from torch import Tensor

from ascend_attn_check.samples import Sample


def rows_of(sample: Sample) -> Iterator[Row]:
    arguments = Arguments(**{"block_table": None, **sample.arguments})
    return rows(with_dense_keys(arguments, "key"))


def cut_blocks_last(sample: Sample) -> Tensor:
    """The indices with the block in which the keys of a row end behind the others that it reads.

    The order within a row is that of the sums: where this one is launched, the bits are those of a
    CPU that is given it.
    """
    given, block = sample.arguments["sparse_indices"], sample.arguments["sparse_block_size"]
    indices = given.flatten(0, -2).clone()
    for row in rows_of(sample):
        read = indices[row.token, : -(-row.limit // block)].tolist()
        read = read[: read.index(-1)] if -1 in read else read
        cut = row.limit // block if row.limit % block else None
        read.sort(key=lambda index, cut=cut: index == cut)
        indices[row.token, : len(read)] = torch.tensor(read, dtype=torch.int32)
    return indices.view(given.shape)


def with_cut_blocks_last(sample: Sample) -> Sample:
    """The sample itself where no block can be cut."""
    if sample.arguments.get("sparse_block_size", 1) == 1:
        return sample
    return sample.replace(sparse_indices=cut_blocks_last(sample))
