"""Errors on all ranks or on none.

A rank that raises before a collective leaves the others in it. So the ranks first tell each other
whether their arguments are right and alike, on the hosts: nothing waits for a device.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from ascend_attn_ops._core.arguments import shown, wrong

# By the group that it accompanies: another one may get its name.
_host_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
# The type of an exception, by name, and its message: not every exception can be pickled.
Report = tuple[str, str]


def host_group(group: ProcessGroup) -> ProcessGroup:
    """A group of the same ranks that communicates between their hosts."""
    if any(device.type == "cpu" for device in group._device_types):
        return group
    if group not in _host_groups:
        ranks = dist.get_process_group_ranks(group)
        _host_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _host_groups[group]


class Agreement:
    """Votes of the ranks of a group, whose hosts compare; None to trust them."""

    def __init__(self, hosts: ProcessGroup | None) -> None:
        self.hosts = hosts
        self.votes = 0

    def vote(
        self,
        caller: str,
        facts: Mapping[str, Any],
        *,
        error: Exception | None = None,
        wish: object = None,
    ) -> bool:
        """Raise on all ranks if any has an error, or if their facts differ.

        Returns whether all ranks have one wish, which may differ.
        """
        # Errors in compiled code are those of the trace, which is equal if the programs are.
        if is_compiling() or self.hosts is None or self.hosts.size() == 1:
            if error is not None:
                raise error
            return True
        facts = {"function": caller, **facts}
        own = _digest(sorted(facts.items())), _digest(wish)
        ballot = torch.tensor([error is not None, *own, *(-x for x in own)], device="cpu")
        self.votes += 1
        dist.all_reduce(ballot, dist.ReduceOp.MAX, group=self.hosts)
        failed, most, most_wish, least, least_wish = ballot.tolist()
        if not failed and most == -least:
            return bool(most_wish == -least_wish)
        reports: list[Any] = [None] * self.hosts.size()
        # Not every argument can be pickled.
        texts = {name: repr(value) for name, value in facts.items()}
        report = None if error is None else (type(error).__name__, str(error))
        dist.all_gather_object(reports, (report, texts), group=self.hosts)
        raise _verdict(caller, reports) from error


def collective(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes an error that a function raises before its first vote an error on all ranks.

    Ranks vote in the group of the argument `shards`, or of the method's own object.
    """

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if is_compiling():
            return function(*args, **kwargs)
        shards = kwargs.get("shards", args[0] if args else None)
        agreement = getattr(shards, "agreement", None)
        if not isinstance(agreement, Agreement):
            if "shards" in kwargs:
                name = f"ascend::{function.__name__}"
                raise wrong(TypeError, name, "shards", "SequenceShards", shown(shards))
            return function(*args, **kwargs)
        votes = agreement.votes
        # Where torch.compile broke the graph, it would compile what this calls: a part of a vote.
        eager = function if "torch._dynamo" not in sys.modules else _eager(function)
        try:
            return eager(*args, **kwargs)
        except Exception as error:
            if agreement.votes == votes:
                agreement.vote(function.__qualname__, {}, error=error)
            raise

    return call


@functools.cache
def _eager(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    return torch.compiler.disable(function)


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def raised(kind: str, message: str) -> Exception:
    """The exception of another rank, as a RuntimeError where its type is no plain one."""
    try:
        error = getattr(builtins, kind)(message)
    except (AttributeError, TypeError):
        error = None
    return error if isinstance(error, Exception) else RuntimeError(f"{kind}: {message}")


def _verdict(caller: str, reports: list[tuple[Report | None, dict[str, str]]]) -> Exception:
    for rank, (error, _) in enumerate(reports):
        if error is not None:
            kind, message = error
            return raised(kind, f"{message} (on rank {rank})")
    first = reports[0][1]
    for rank, (_, facts) in enumerate(reports):
        for name, value in facts.items():
            if value != first.get(name):
                got = f"{first.get(name)} on rank 0 and {value} on rank {rank}"
                return wrong(ValueError, caller, name, "the same on all ranks", got)
    raise AssertionError("internal error: the ranks' facts differed, then matched")
