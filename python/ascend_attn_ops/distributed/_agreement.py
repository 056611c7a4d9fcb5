"""Errors on all ranks or on none.

A rank that raises before a collective leaves the others in it. So the ranks first tell each other
whether their arguments are right and alike, on the hosts: nothing waits for a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

# How many may be `missing`. All votes have one length: ranks that call different functions still
# hear each other.
_QUESTIONS = 4

# By the name of the group that it accompanies.
_host_groups: dict[str, ProcessGroup] = {}


def host_group(group: ProcessGroup) -> ProcessGroup:
    """A group of the same ranks that communicates between their hosts."""
    if any(device.type == "cpu" for device in group._device_types):
        return group
    name = group.group_name
    if name not in _host_groups:
        ranks = dist.get_process_group_ranks(group)
        _host_groups[name] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _host_groups[name]


def agree(
    hosts: ProcessGroup | None,
    caller: str,
    error: Exception | None,
    facts: Mapping[str, Any],
    missing: Sequence[bool] = (),
) -> list[bool]:
    """Raise on all ranks if any has an error, or if their facts differ.

    Args:
        hosts: the group whose ranks compare; None to trust them.
        caller: begins the message.
        error: what is wrong on this rank.
        facts: what must be equal on all ranks.
        missing: what this rank lacks.

    Returns:
        For each of `missing`, whether any rank lacks it.
    """
    # Errors in compiled code are those of the trace, which is equal if the programs are.
    if is_compiling() or hosts is None or hosts.size() == 1:
        if error is not None:
            raise error
        return list(missing)
    facts = {"function": caller, **facts}
    text = repr(sorted(facts.items()))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    asked = [*missing, *[False] * (_QUESTIONS - len(missing))]
    vote = torch.tensor([error is not None, digest, -digest, *asked], dtype=torch.int64)
    dist.all_reduce(vote, dist.ReduceOp.MAX, group=hosts)
    failed, highest, lowest, *answers = vote.tolist()
    if not failed and highest == -lowest:
        return [bool(answer) for answer in answers[: len(missing)]]
    reports: list[Any] = [None] * hosts.size()
    dist.all_gather_object(reports, (error, facts), group=hosts)
    raise _verdict(caller, reports)


def _verdict(caller: str, reports: list[tuple[Exception | None, dict[str, Any]]]) -> Exception:
    for rank, (error, _) in enumerate(reports):
        if error is not None:
            return type(error)(f"{error} (on rank {rank})")
    first = reports[0][1]
    for rank, (_, facts) in enumerate(reports):
        for name, value in facts.items():
            if value != first.get(name):
                return ValueError(
                    f"{caller}: {name}: expected the same on all ranks, got {first.get(name)} on "
                    f"rank 0 and {value} on rank {rank}"
                )
    raise AssertionError("the ranks' facts differ, and then they do not")
