from collections.abc import Callable
from typing import Any

# The operators without a gradient.
inference_operators: set[str]

def limits_table() -> list[dict[str, Any]]: ...
def limits_override() -> int: ...
def restore_limits(value: int) -> None: ...
def set_limits(product: str | None) -> None: ...
def product_in_force() -> str | None: ...
def __getattr__(operator: str) -> Callable[..., Any]: ...  # the direct calls
def kept_keys(
    sparse_mode: int,
    queries: int,
    keys: int,
    pre_tokens: int,
    next_tokens: int,
    prefix: int,
    is_band: bool,
) -> list[tuple[int, int]]: ...
