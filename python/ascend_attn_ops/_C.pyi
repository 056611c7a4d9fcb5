from collections.abc import Callable
from typing import Any

# For each operator, a function of the one that calls it otherwise and of a module's name.
direct_calls: dict[str, Callable[[Callable[..., Any], str], Callable[..., Any]]]
# The operators without a gradient.
inference_operators: set[str]
# For each layout, the axes of batch, tokens and heads; -1 for none. BSH and SBH: the axis H.
layout_axes: dict[str, tuple[int, int, int]]
# A compressed mask is square; that of sparse_mode 6 has more rows, for the prefix.
compressed_modes: tuple[int, ...]
compressed_mask_size: int
compressed_mask_prefix_rows: int

# For each product, its name, and how the names of its SoCs begin.
products: tuple[tuple[str, str], ...]
# Releases of CANN, oldest first.
cann_versions: tuple[str, ...]

# The compiler that built this module.
compiler: str

# What the CPU kernels use on this machine.
def cpu_implementations() -> dict[str, str]: ...
def check_cpu_capability() -> None: ...
def limits_table() -> list[dict[str, Any]]: ...
def limits_override() -> int: ...

class ThreadLimits: ...

def begin_limits_scope(override: int) -> ThreadLimits: ...
def end_limits_scope(saved: ThreadLimits) -> None: ...
def limits_override_for(product: str | None, cann: str | None) -> int: ...
def device_named(product: str, cann: str | None) -> tuple[str, str]: ...
def enter_limits(owner: object, override: int) -> None: ...
def leave_limits(owner: object) -> None: ...
def set_default_limits(product: str | None, cann: str | None) -> None: ...
def device_in_force() -> tuple[str, str] | None: ...
def kept_keys(
    sparse_mode: int,
    queries: int,
    keys: int,
    pre_tokens: int,
    next_tokens: int,
    prefix: int,
    is_band: bool,
) -> list[tuple[int, int]]: ...
