"""Changed calls of the public functions that are no operators."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import torch
from ascend_attn_ops._core.device_limits import limits
from ascend_attn_ops.flash_attn import flash_attn_func, flash_attn_varlen_func
from support.samples import OPERATORS
from torch import Tensor

from .case import Case, Finding
from .comparison import has_nan
from .copies import Before, Once, as_lists, can_be_read, has_memory, tensors_in, twin
from .outcome import (
    Outcome,
    cannot_be_shown,
    check_dispatcher,
    check_error,
    is_out_of_memory,
    run,
    same_bits,
)
from .wrong_calls import change, draw, positional, shown

Random = random.Random
Arguments = dict[str, Any]
_PERMITTED = 300_000  # elements of what a changed call is worth computing


def _normal(r: Random, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(r.getrandbits(32))
    return torch.randn(shape, generator=generator).to(dtype)


def _loss(r: Random) -> Arguments:
    sample = draw(r, OPERATORS["sparse_lightning_indexer_grad_kl_loss"])
    dropped = ("pre_tokens", "next_tokens")
    given = {name: x for name, x in sample.arguments.items() if name not in dropped}
    return {**given, **r.choice(({"reduction": "mean"}, {"normalizer": 3.0}, {"reduction": "sum"}))}


def _gather(r: Random) -> Arguments:
    dtype = r.choice((torch.int32, torch.int64))
    return {
        "cache": _normal(r, 4, 16, 2, 8),
        "block_table": torch.tensor([[3, 0], [1, -1]], dtype=dtype),
        "lengths": r.choice(([17, 3], torch.tensor([32, 0]), (1, 16))),
    }


def _shape(r: Random) -> Arguments:
    dtype = r.choice((torch.float16, torch.int8, torch.float32))
    numbers = {"num_blocks": r.randint(0, 3), "block_size": 4, "num_heads": 2, "head_size": 32}
    return {**numbers, "dtype": dtype}


def _attach(r: Random) -> Arguments:
    loss = _normal(r).requires_grad_()
    return {"output": _normal(r, 3), "loss": loss, "scale": r.choice((0.5, torch.tensor(2.0)))}


def _quantize(r: Random) -> Arguments:
    dtype = r.choice((torch.float16, torch.bfloat16, torch.float32))
    tensors = {name: _normal(r, 2, 3, 4, dtype=dtype) for name in ("query", "key", "value")}
    return {**tensors, "scale_dtype": r.choice((torch.float32, torch.uint64))}


def _flash_attn(r: Random) -> Arguments:
    q, kv = r.randint(1, 5), r.randint(1, 5)
    return {
        "q": _normal(r, 2, q, 4, 8), "k": _normal(r, 2, kv, 2, 8), "v": _normal(r, 2, kv, 2, 8),
        "dropout_p": 0.0, "softmax_scale": 0.3, "causal": r.random() < 0.5,
        "window_size": (-1, -1),
    }  # fmt: skip


_INDEXER = ops.LightningIndexer(8, num_heads=2, head_dim=8, rope_dim=4)
with torch.no_grad():
    for _parameter in _INDEXER.parameters():
        _parameter.copy_(torch.linspace(-1, 1, _parameter.numel()).view(_parameter.shape))


def _limits(*args: Any, **options: Any) -> None:
    with limits(*args, **options):
        pass


# The functions give no NaN: a helper's input is finite where all of its tensors are.
HELPERS: dict[str, tuple[Callable[..., Any], Callable[[Random], Arguments]]] = {
    "sparse_mode_mask": (ops.sparse_mode_mask, lambda r: {
        "sparse_mode": r.randrange(9), "sq": r.randint(0, 9), "skv": r.randint(3, 9),
        "pre_tokens": r.randint(-3, 9), "next_tokens": r.randint(-3, 9), "prefix": r.randint(0, 3),
        "band": r.random() < 0.5,
    }),
    "slot_mapping": (ops.slot_mapping, lambda r: {
        "block_table": torch.tensor([[7, 2], [1, -1]], dtype=r.choice((torch.int32, torch.int64))),
        "positions": torch.tensor(r.choice(([[3], [17]], [[0, 31], [5, -1]], [1, 2]))),
        "block_size": 16,
    }),
    "gather_paged_kv": (ops.gather_paged_kv, _gather),
    "nz_cache_shape": (ops.nz_cache_shape, _shape),
    "nd_to_nz": (ops.nd_to_nz, lambda r: {"cache": _normal(r, 2, 3, 2, 16)}),
    "nz_to_nd": (ops.nz_to_nd, lambda r: {"cache": _normal(r, 2, 4, 3, 8), "num_heads": 2}),
    "quantize_attention_inputs": (ops.quantize_attention_inputs, _quantize),
    "attach_loss": (ops.attach_loss, _attach),
    "LightningIndexer": (ops.LightningIndexer, lambda r: {
        "hidden_size": 8, "num_heads": 2, "head_dim": 8, "rope_dim": 4, "rope_theta": 1e4,
        "dtype": r.choice((None, torch.bfloat16)),
    }),
    "LightningIndexer.forward": (_INDEXER.forward, lambda r: {
        "hidden": _normal(r, 2, 3, 8), "positions": r.choice((None, torch.arange(3))),
    }),
    "LightningIndexer.select": (_INDEXER.select, lambda r: {
        "projections": [x.detach() for x in _INDEXER(_normal(r, 2, 3, 8))], "sparse_count": 2,
    }),
    "lightning_indexer_kl_loss": (ops.lightning_indexer_kl_loss, _loss),
    "flash_attention_score with dropout": (ops.flash_attention_score, lambda r: {
        "query": _normal(r, 1, 4, 5, 8), "key": _normal(r, 1, 4, 6, 8),
        "value": _normal(r, 1, 4, 6, 8), "num_heads": 4, "layout": "BNSD", "dropout_p": 0.5,
        "generator": torch.Generator().manual_seed(0),
        "attn_mask": torch.ones(5, 6, dtype=torch.bool),
    }),
    "flash_attn_func": (flash_attn_func, _flash_attn),
    "flash_attn_varlen_func": (flash_attn_varlen_func, lambda r: {
        "q": _normal(r, 5, 4, 8), "k": _normal(r, 5, 2, 8), "v": _normal(r, 5, 2, 8),
        "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 2, 5], dtype=torch.int32), "max_seqlen_q": 3,
        "max_seqlen_k": 3, "softmax_scale": 0.3, "causal": r.random() < 0.5,
        "learnable_sink": _normal(r, 4),
    }),
    "limits": (_limits, lambda r: {
        "product": r.choice(("A2", "A3", "950", "310P", None)), "cann": r.choice((None, "9.0")),
    }),
}  # fmt: skip
# The errors of torch's own functions, which helpers are made of.
_TORCHS = (RuntimeError, NotImplementedError)
_LINEAR = re.compile(r"expected m1 and m2 to have the same dtype")
# The operators that a function calls may refuse its arguments, by their own names for them.
_NAMES = {name for operator in OPERATORS.values() for name in operator.output_names} | {
    x.name for operator in OPERATORS.values() for x in operator.overload._schema.arguments
}


def _is_foreign(x: Tensor) -> bool:
    """Whether torch's own functions support little of it."""
    small = x.is_floating_point() and x.itemsize == 1
    return not has_memory(x) or x.is_complex() or x.is_inference() or small


class WrongHelper:
    """A class of cases: of one function."""

    def __init__(
        self, name: str, function: Callable[..., Any], valid: Callable[[Random], Arguments]
    ) -> None:
        self.name, self.function, self.valid = name, function, valid
        parameters = inspect.signature(limits if name == "limits" else function).parameters
        # torch checks devices.
        self.parameters = {name: x for name, x in parameters.items() if name != "device"}

    def __call__(self, r: Random) -> str:
        arguments = self.valid(r)
        good = twin(arguments)
        for name, x in arguments.items():
            if isinstance(x, (list, tuple)) and not r.randrange(8):
                arguments[name] = Once(x)
        kinds = change(r, arguments, self.parameters)
        if cannot_be_shown(arguments) or self._is_large(arguments):
            return "left out"
        try:
            with limits(None):
                label = self._check(r, arguments)
                check_dispatcher()
                later = run(self._outputs, (), good)
                if later.error is not None:
                    raise Finding(f"a later valid call raises {later.text}")
        except Finding as finding:
            call = ", ".join(f"{n}={shown(x)}" for n, x in arguments.items())
            raise Finding(f"{finding} -- {' + '.join(kinds)}, {self.name}({call})") from None
        return f"{kinds[0]}: {label}"

    def _is_large(self, arguments: Arguments) -> bool:
        """Returns whether a mask or a module would be too large to compute."""
        if self.name not in ("sparse_mode_mask", "LightningIndexer"):
            return False
        numbers = [abs(x) for x in arguments.values() if isinstance(x, (int, float))]
        return any(_PERMITTED < x < 2**40 for x in numbers)

    def _check(self, r: Random, arguments: Arguments) -> str:
        lists = as_lists(twin(arguments))
        args, options = positional(r, arguments, self.parameters)
        before = Before(arguments)
        outcome = run(self._outputs, args, options)
        written = before.changed()
        if written is not None:
            raise Finding(f"{shown(written)} changed")
        if is_out_of_memory(outcome):
            return "no memory"
        if outcome.error is not None:
            names = {*self.parameters, *_NAMES}
            if _LINEAR.match(outcome.text):
                return "refused by torch"
            of_torch = isinstance(outcome.error, _TORCHS) and not outcome.of_library
            if of_torch and any(map(_is_foreign, tensors_in(arguments))):
                return "refused by torch"
            return check_error(outcome, arguments, names, through_torch=False)
        self._check_outputs(lists, outcome)
        if any(isinstance(x, Once) for x in arguments.values()):
            same = run(self._outputs, (), lists)
            if same.error or not all(map(same_bits, outcome.outputs, same.outputs)):
                raise Finding(f"an iterator gives another result than its list: {same.text}")
        return "worked"

    def _outputs(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(tensors_in(self.function(*args, **options)))

    def _check_outputs(self, arguments: Arguments, outcome: Outcome) -> None:
        given = list(tensors_in(arguments))
        if any(map(_is_foreign, given)):
            return
        # Larger numbers overflow.
        numbers = [abs(x) for x in arguments.values() if isinstance(x, (int, float))]
        readable = [x.detach() for x in given if can_be_read(x)]
        numbers += [float(x.float().abs().max()) for x in readable if x.numel()]
        finite = len(readable) == len(given) and all(bool(x.isfinite().all()) for x in readable)
        if finite and all(x < 1e3 for x in numbers) and any(map(has_nan, outcome.outputs)):
            raise Finding("a result has NaN where all arguments are finite")


CASES: dict[str, Case] = {
    f"wrong/public/{name}": WrongHelper(name, function, valid)
    for name, (function, valid) in HELPERS.items()
}
