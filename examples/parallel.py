"""The ranks of a torchrun: who computes which tokens, and the state that they hold together.

Without torchrun there is one rank, and nothing here communicates.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ascend_attn_ops.distributed import SequenceShards
from sparse_lm import SparseLM
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import checkpoints


class Parallel:
    """`data` groups of `context` ranks. A group shares its sequences, the groups share the batch.

    Args:
        context: ranks that share a sequence.
        data: groups that share the batch; 0 for as many as there are.
        device: "cpu" or "npu".
    """

    def __init__(self, context: int, data: int, device: str) -> None:
        self.distributed = "WORLD_SIZE" in os.environ
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        data = data or ranks // context
        if context * data != ranks:
            raise SystemExit(
                f"--context-parallel {context} and --data-parallel {data} take "
                f"{context * data} ranks: torchrun --nproc-per-node {context * data} ..."
            )
        self.context, self.data = context, data
        self.is_main = int(os.environ.get("RANK", 0)) == 0
        if self.distributed:
            if device == "npu":
                torch.get_device_module(device).set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("cpu:gloo,npu:hccl" if device == "npu" else "gloo")
            self.mesh = init_device_mesh(
                device, (data, context), mesh_dim_names=("data", "context")
            )

    @property
    def gradient_factor(self) -> int:
        """FSDP averages gradients of all ranks, but ranks that share a sequence must add theirs."""
        return self.context

    def shard_parameters(self, model: SparseLM) -> None:
        if self.distributed:
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)

    def my_sequences(self, text: Tensor) -> Tensor:
        """This group's part of a batch."""
        return (
            text.chunk(self.data)[self.mesh["data"].get_local_rank()] if self.distributed else text
        )

    def shards(self, sequences: int, length: int) -> SequenceShards | None:
        """This rank's part of those sequences; None for all of them."""
        if not self.distributed:
            return None
        return SequenceShards([length] * sequences, self.mesh["context"].get_group())

    def mean(self, *losses: Tensor) -> list[float]:
        """Losses that are the same in a group, averaged over the groups."""
        values = torch.stack([loss.detach() for loss in losses])
        if self.distributed:
            dist.all_reduce(values, group=self.mesh["data"].get_group())
        return (values / self.data).tolist()

    def save(
        self, out: Path, step: int, model: SparseLM, optimizer: torch.optim.Optimizer, about: Any
    ) -> None:
        """Write a checkpoint, each rank its part, to a folder that all ranks see."""
        folder = out / f"checkpoint-{step:07}"
        partial = folder.with_suffix(".partial")
        parameters, state = get_state_dict(model, optimizer)
        save({"model": parameters, "optimizer": state}, checkpoint_id=partial)
        if self.is_main:
            (partial / "about.json").write_text(json.dumps(about))
            older = checkpoints(out)
            # Atomic: a run killed at any moment leaves a complete checkpoint.
            os.replace(partial, folder)
            for path in older:
                shutil.rmtree(path)
        dist.barrier()

    def load(self, folder: Path, model: SparseLM, optimizer: torch.optim.Optimizer) -> None:
        """Read a checkpoint, whatever number of ranks has written it."""
        parameters, state = get_state_dict(model, optimizer)
        load({"model": parameters, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=state)

    def whole(self, model: SparseLM) -> dict[str, Any]:
        """All parameters on the first rank; nothing on the others."""
        if not self.distributed:
            return model.state_dict()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(model, options=options)
