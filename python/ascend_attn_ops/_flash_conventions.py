"""flash-attn's conventions on flash_attention_score: windows, slopes, log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_attn_ops._arguments import (
    INT64_MAX,
    check_flag,
    check_memory,
    check_number,
    check_tensor,
    readable,
    shown,
    tensors_in,
    whole,
    wrong,
)
from ascend_attn_ops._operators import ALL_TOKENS
from ascend_attn_ops._packing import (
    closed,
    equal_ends,
    lengths_between,
    one_key_each,
    with_gaps,
)
from ascend_attn_ops._pages import gather_keys_and_values
from ascend_attn_ops._statistics import by_head, log_sum_exp_or
from ascend_attn_ops.operators.flash_attention_score import flash_attention_score

WITHOUT_KEYS = torch.inf  # flash-attn's log-sum-exp of a row that sees no key
_SHAPES = {3: "(total, nheads, headdim)", 4: "(batch_size, seqlen, nheads, headdim)"}


class Mask(NamedTuple):
    """Which keys are kept, in the operator's terms: the corner is always the bottom right one."""

    sparse_mode: int
    pre_tokens: int = ALL_TOKENS
    next_tokens: int = ALL_TOKENS

    @property
    def looks_back(self) -> bool:
        """Whether no key comes after the diagonal."""
        return self.sparse_mode == 3 or self.next_tokens == 0


_EVERYTHING, _CAUSAL, _OWN_KEY = Mask(0), Mask(3), Mask(4, 0, 0)


def mask_of(function: str, causal: bool, window_size: Sequence[int]) -> Mask:
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


def options_of(
    function: str,
    causal: bool,
    window_size: Sequence[int],
    softmax_scale: float | None,
    softcap: float,
    slopes: Tensor | None,
    dropout_p: float,
    return_lse: bool,
    sink: Tensor | None = None,
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
    if slopes is not None and not isinstance(slopes, Tensor):
        expected = "a tensor or None"
        raise wrong(TypeError, function, "alibi_slopes", expected, type(slopes).__name__)
    mask = mask_of(function, causal, window_size)
    return Options(function, mask, slopes, softmax_scale, dropout_p, return_lse, sink)


def sink_of(function: str, s_aux: Tensor | None, learnable_sink: Tensor | None) -> Tensor | None:
    """The sink by either of its names: vLLM's FlashAttention-3 has the first, 4 has the second."""
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
    if not torch.is_autocast_enabled(device):
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
    on_device = q.device.type not in ("cpu", "meta")
    if deterministic and on_device and not torch.are_deterministic_algorithms_enabled():
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
    raise NotImplementedError(f"{function}: {argument}: expected {expected}, got {got}")


def attend(options: Options, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """out (batch_size, seqlen_q, nheads, headdim) and lse (batch_size, nheads, seqlen_q)."""
    if options.slopes is not None and q.shape[0] and q.shape[1] != k.shape[1]:
        # Outside of TND, the operator wants as many queries as keys.
        return attend_in_rows(options, q, k, v)
    out, maximum, total = flash_attention_score(
        q, k, v, num_heads=q.shape[2], layout="BSND", pse_shift=options.slopes,
        pse_type=1 if options.slopes is None else 2, scale_value=options.scale,
        dropout_p=options.dropout_p, sink=options.sink, **options.mask._asdict(),
    )  # fmt: skip
    if not options.return_lse:
        return out, None
    return out, dense_log_sum_exp(maximum, total, options.sink)


def dense_log_sum_exp(maximum: Tensor, total: Tensor, sink: Tensor | None) -> Tensor:
    """(..., nheads, tokens), of statistics in this order."""
    lse = log_sum_exp_or(WITHOUT_KEYS, maximum[..., 0], total[..., 0])
    if sink is None:
        return lse
    # The operator's statistics of sequences without any key leave the sink out.
    own = sink.detach().to(lse.dtype)[:, None]
    return lse.where((lse != WITHOUT_KEYS) | (own == -torch.inf), own)


def attend_in_rows(
    options: Options, q: Tensor, k: Tensor, v: Tensor, used: Sequence[int] | None = None
) -> tuple[Tensor, Tensor | None]:
    """As `attend`, by a pack. `used`: how many of its keys each sequence uses; None for all."""
    batch, queries = q.shape[:2]
    out, lse = attend_packed(
        options, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), equal_ends(queries, batch),
        equal_ends(k.shape[1], batch), used,
    )  # fmt: skip
    if lse is not None:
        lse = lse.unflatten(1, (batch, queries)).transpose(0, 1).contiguous()
    return out.unflatten(0, (batch, queries)), lse


def attend_paged(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: list[int],
    table: Tensor,
    lengths: list[int],
) -> tuple[Tensor, Tensor | None]:
    """As `attend_packed`, for keys and values in blocks."""
    k, v = gather_keys_and_values(options.function, k, v, table, lengths)
    k_ends = equal_ends(k.shape[1], len(lengths))
    return attend_packed(options, q, k.flatten(0, 1), v.flatten(0, 1), q_ends, k_ends, lengths)


def attend_packed(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ends: list[int],
    k_ends: list[int],
    used: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """out (total_q, nheads, headdim) and lse (nheads, total_q). `used`: how many of its keys each
    sequence uses; None for all."""
    call = packed_call(options, q, k, q_ends, k_ends, used)
    out, maximum, total = flash_attention_score(
        q, k, v, dropout_p=options.dropout_p, sink=options.sink, **call.keywords
    )
    if not options.return_lse:
        return out, None
    lse = packed_log_sum_exp(maximum, total, call.q_ends, options.sink)
    return out, call.shifted(lse, 1)


class PackedCall(NamedTuple):
    """The operator's keywords for a pack, forward and backward; and the ends of its sequences of
    queries, where some were split."""

    keywords: dict[str, Any]
    q_ends: list[int]
    # Times its slopes, by how much the documented scores of a sequence exceed the operator's.
    excess: list[int] = []  # noqa: RUF012 - never changed
    slopes: Tensor | None = None

    def shifted(self, lse: Tensor, sign: int) -> Tensor:
        """The log-sum-exp (nheads, total_q) of the documented scores from that of the operator's,
        for sign 1; for -1 the reverse."""
        if self.slopes is None or not any(self.excess) or self.slopes.shape[-1] != lse.shape[0]:
            return lse
        lse = lse.clone()
        rows = self.slopes.to(lse.dtype).expand(len(self.q_ends), -1)
        begins = [0, *self.q_ends[:-1]]
        for begin, end, more, row in zip(begins, self.q_ends, self.excess, rows, strict=True):
            lse[:, begin:end] += sign * more * row[:, None]
        return lse


def packed_call(
    options: Options,
    q: Tensor,
    k: Tensor,
    q_ends: list[int],
    k_ends: list[int],
    used: Sequence[int] | None = None,
) -> PackedCall:
    slopes = options.slopes
    if used is not None:
        lengths = lengths_between(q_ends)
        queries = list(zip(lengths, lengths, strict=True))
        # The operator compares their numbers.
        keys = list(zip(used, lengths_between(k_ends), strict=False))
        q_ends, k_ends = with_gaps(queries, keys)
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes.repeat_interleave(len(q_ends) // len(queries), 0)
    mask, q_ends, k_ends, slopes = _in_device_terms(options.mask, q_ends, k_ends, slopes)
    q_list, k_list = closed(q, k, q_ends, k_ends)
    keywords: dict[str, Any] = {
        "num_heads": q.shape[1], "layout": "TND", "actual_seq_lengths_query": q_list,
        "actual_seq_lengths_key": k_list, "scale_value": options.scale, **mask._asdict(),
    }  # fmt: skip
    if slopes is None:
        return PackedCall(keywords, q_ends)
    lead, excess = _leads(options, q_ends, k_ends)
    pse = slopes
    if slopes.dim() == 2 and len(q_list) > len(q_ends):
        # The 0 that closes the lists counts as a sequence.
        pse = torch.cat((slopes, slopes[-1:]))
    keywords.update(
        pse_shift=pse, pse_type=2, q_start_idx=[max(lead, 0)], kv_start_idx=[max(-lead, 0)]
    )
    return PackedCall(keywords, q_ends, excess, slopes)


def _in_device_terms(
    mask: Mask, q_ends: list[int], k_ends: list[int], slopes: Tensor | None
) -> tuple[Mask, list[int], list[int], Tensor | None]:
    """The same attention as a call of which the device has the gradient: in a pack it has none for
    a window of a single key."""
    if mask != _OWN_KEY or len(q_ends) != len(k_ends):
        return mask, q_ends, k_ends, slopes
    q_ends, k_ends, parts = one_key_each(q_ends, k_ends)
    if slopes is not None and slopes.dim() == 2 and len(slopes) == len(parts):
        slopes = slopes.repeat_interleave(torch.tensor(parts, device=slopes.device), 0)
    return _EVERYTHING, q_ends, k_ends, slopes


def _leads(options: Options, q_ends: list[int], k_ends: list[int]) -> tuple[int, list[int]]:
    """How many keys come before the first query, seqlen_k - seqlen_q. The operator takes one number
    for all sequences: the largest, and by how much it exceeds that of each sequence.

    Where no key comes after its query, a larger number adds the same to all scores of a row, but
    nothing to a sink.
    """
    lengths = list(zip(lengths_between(q_ends), lengths_between(k_ends), strict=False))
    leads = [keys - queries for queries, keys in lengths if queries and keys]
    lead = max(leads, default=0)
    moved = options.mask.looks_back and options.sink is None
    if min(leads, default=0) != lead and not moved:
        otherwise = "causal attention, or one" if options.sink is None else "beside a sink one"
        refuse(
            options.function, "alibi_slopes",
            f"{otherwise} seqlen_k - seqlen_q for all sequences", shown(sorted(set(leads))),
        )  # fmt: skip
    return lead, [lead - (keys - queries) for queries, keys in lengths]


def packed_log_sum_exp(
    maximum: Tensor, total: Tensor, ends: list[int], sink: Tensor | None = None
) -> Tensor:
    """(nheads, total_q), where tokens after the last sequence see no key."""
    lse = dense_log_sum_exp(by_head(maximum[..., :1], ends), by_head(total[..., :1], ends), sink)
    lse[:, ends[-1] :] = WITHOUT_KEYS
    return lse
