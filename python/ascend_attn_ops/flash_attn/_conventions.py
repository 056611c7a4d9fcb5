"""flash-attn's conventions on flash_attention_score: windows, slopes, log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ascend_attn_ops._core.arguments import (
    INT64_MAX,
    check_flag,
    check_memory,
    check_number,
    check_tensor,
    readable,
    renamed,
    shown,
    tensors_in,
    whole,
    wrong,
)
from ascend_attn_ops._core.operators import ALL_TOKENS

Results = TypeVar("Results")
# The sink by either of its names: vLLM's FlashAttention-3 has s_aux, 4 has learnable_sink.
Sinks = tuple[Tensor | None, Tensor | None]

WITHOUT_KEYS = torch.inf  # flash-attn's log-sum-exp of a row that sees no key
_SHAPES = {3: "(total, nheads, headdim)", 4: "(batch_size, seqlen, nheads, headdim)"}


class Mask(NamedTuple):
    """Which keys are kept, in the operator's terms: the corner is always the bottom right one."""

    sparse_mode: int
    pre_tokens: int = ALL_TOKENS
    next_tokens: int = ALL_TOKENS

    def arguments(self) -> dict[str, int]:
        """_asdict(), which dynamo of torch 2.7 does not trace."""
        tokens = {"pre_tokens": self.pre_tokens, "next_tokens": self.next_tokens}
        return {"sparse_mode": self.sparse_mode, **tokens}

    @property
    def looks_back(self) -> bool:
        """Whether no key comes after the diagonal."""
        return self.sparse_mode == 3 or self.next_tokens == 0


_EVERYTHING, _CAUSAL = Mask(0), Mask(3)


def mask_of(function: str, causal: bool, window_size: Sequence[int]) -> Mask:
    # Tensors among the numbers are compared below, after their memory has been checked.
    numbers = type(window_size) is tuple and [*map(type, window_size)] == [int, int]
    if type(causal) is bool and numbers and window_size == (-1, -1):
        return _CAUSAL if causal else _EVERYTHING
    for tensor in tensors_in(window_size):
        check_memory(function, "window_size", tensor)
    try:
        # A tensor may have more rows than memory has room for.
        left, right = window_size if len(window_size) == 2 else ()
    except (TypeError, ValueError, RuntimeError):
        raise wrong(
            ValueError, function, "window_size", "(left, right)", shown(window_size)
        ) from None
    if whole(left) is None or whole(right) is None:
        expected = "(left, right), two whole numbers"
        raise wrong(TypeError, function, "window_size", expected, shown(window_size))
    left, right = whole(left), whole(right)
    if not (-1 <= left <= INT64_MAX and -1 <= right <= INT64_MAX):
        expected = "-1, which bounds nothing, or more"
        raise wrong(ValueError, function, "window_size", expected, f"({left}, {right})")
    check_flag(function, "causal", causal)
    if causal:
        right = 0
    if left == -1 and right <= 0:
        return _EVERYTHING if right else _CAUSAL
    return Mask(4, ALL_TOKENS if left == -1 else left, ALL_TOKENS if right == -1 else right)


def check_tensors(function: str, rank: int, names: str, *tensors: object) -> None:
    """Checks the tensors that are read here before the operator checks its arguments."""
    for x in tensors:
        if not isinstance(x, Tensor) or x.dim() != rank:
            name = names.split()[[y is x for y in tensors].index(True)]
            check_tensor(function, name, x, rank, _SHAPES[rank])


class Options(NamedTuple):
    """The options of a call: all arguments but tensors and lengths."""

    function: str  # that errors name
    mask: Mask
    slopes: Tensor | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    return_lse: bool = False
    sink: Tensor | None = None
    # The caller's names of the lengths of queries and keys.
    lengths: tuple[str, str] = ("cu_seqlens_q", "cu_seqlens_k")


def options_of(
    function: str,
    causal: bool,
    window_size: Sequence[int],
    softmax_scale: float | None,
    softcap: float,
    slopes: Tensor | None,
    dropout_p: float,
    return_lse: bool,
    sinks: Sinks = (None, None),
    lengths: tuple[str, str] = ("cu_seqlens_q", "cu_seqlens_k"),
) -> Options:
    """Check what the operator knows by other names; the rest is the operator's to refuse."""
    if softmax_scale is not None and not isinstance(softmax_scale, float):
        check_number(function, "softmax_scale", softmax_scale)
    if not isinstance(softcap, float):
        check_number(function, "softcap", softcap)
    if softcap > 0:
        refuse(function, "softcap", "0, as no operator caps its scores", shown(softcap))
    if not isinstance(dropout_p, float):
        check_number(function, "dropout_p", dropout_p)
    check_flag(function, "return_attn_probs", return_lse)
    if return_lse and float(dropout_p) > 0:
        expected = "False beside dropout_p, as no operator keeps its probabilities"
        refuse(function, "return_attn_probs", expected, str(return_lse))
    if slopes is not None and not isinstance(slopes, Tensor):
        expected = "a tensor or None"
        raise wrong(TypeError, function, "alibi_slopes", expected, type(slopes).__name__)
    mask = mask_of(function, causal, window_size)
    sink = _sink_of(function, *sinks)
    return Options(function, mask, slopes, softmax_scale, dropout_p, return_lse, sink, lengths)


def _sink_of(function: str, s_aux: Tensor | None, learnable_sink: Tensor | None) -> Tensor | None:
    for name, x in (("s_aux", s_aux), ("learnable_sink", learnable_sink)):
        if x is not None and not isinstance(x, Tensor):
            raise wrong(TypeError, function, name, "a tensor or None", type(x).__name__)
    if s_aux is None:
        return learnable_sink
    if learnable_sink is not None:
        expected = "None beside s_aux, another name of the same"
        raise wrong(ValueError, function, "learnable_sink", expected, "a tensor")
    return s_aux


def under_autocast(q: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """In autocast's dtype where they are float32, as what is written to a cache has to be."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x
        for x in (q, *others)
    )


def check_values_of_slopes(function: str, slopes: Tensor | None) -> None:
    """Where the operator is asked without values first."""
    if slopes is None or slopes.dtype != torch.float32:
        return
    if readable(slopes) and not bool((slopes > 0).all()):
        raise wrong(ValueError, function, "alibi_slopes", "positive slopes", "others")


def on_meta(function: str, argument: str, x: Tensor | None, q: Tensor) -> Tensor | None:
    """A tensor without values, for a check that does not see on which device it is."""
    if x is None:
        return None
    if x.device != q.device:
        raise wrong(ValueError, function, argument, f"device {q.device} (q's)", str(x.device))
    return x.to("meta")


def check_deterministic(function: str, q: Tensor, deterministic: bool) -> None:
    check_flag(function, "deterministic", deterministic)
    if not deterministic or q.device.type in ("cpu", "meta"):
        return
    if not torch.are_deterministic_algorithms_enabled():
        refuse(
            function, "deterministic",
            f"torch.use_deterministic_algorithms(True), to which alone {q.device} listens",
            str(deterministic),
        )  # fmt: skip


def refuse_given(function: str, **arguments: object) -> None:
    """Refuses what flash-attn knows and no operator does, unless it is None or 0."""
    for argument, value in arguments.items():
        if value is not None and (isinstance(value, Tensor) or value):
            got = shown(value)
            refuse(function, argument, "the default, as no operator has it", got)


def refuse(function: str, argument: str, expected: str, got: str) -> None:
    raise wrong(NotImplementedError, function, argument, expected, got)


_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")


def call(
    options: Options, operator: Callable[..., Results], *args: Any, parts: int = 1, **kwargs: Any
) -> Results:
    """Calls an operator, whose errors about lengths name the caller's argument. `parts`: of a
    pack."""
    if torch.compiler.is_compiling():
        return operator(*args, **kwargs)
    try:
        return operator(*args, **kwargs)
    except (TypeError, ValueError) as error:
        _, argument, text = (*str(error).split(": ", 2), "", "")[:3]
        if argument not in _LENGTHS:
            raise
        names = dict(zip(_LENGTHS, options.lengths, strict=True))
        text = renamed(f"{options.function}: {argument}: {text}", names, parts)
        raise type(error)(text) from None


def written(function: str, result: Tensor, out: Tensor | None) -> Tensor:
    """The result, in the caller's tensor if there is one."""
    if out is None:
        return result
    check_tensor(function, "out", out)
    if out.shape != result.shape or out.dtype != result.dtype:
        raise wrong(ValueError, function, "out", shown(result), shown(out))
    return out.copy_(result)
