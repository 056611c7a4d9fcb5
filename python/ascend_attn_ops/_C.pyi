from collections.abc import Callable
from typing import Any

from torch import Tensor

# For each operator, makes its direct call from the function to fall back to and a module's name.
operators_with_lengths: tuple[str, ...]
direct_calls: dict[str, Callable[[Callable[..., Any], str], Callable[..., Any]]]
# The operators without a gradient.
inference_operators: set[str]
# For each layout, the axes of batch, tokens and heads; -1 for none. BSH and SBH: the axis H.
layout_axes: dict[str, tuple[int, int, int]]
# A compressed mask is square; that of sparse_mode 6 has more rows, for the prefix.
compressed_modes: tuple[int, ...]
most_sequences: int
compressed_mask_size: int
compressed_mask_prefix_rows: int

# For each product, its name, and how the names of its SoCs begin.
products: tuple[tuple[str, str], ...]
# Releases of CANN, oldest first.
cann_versions: tuple[str, ...]

# The compiler that built this module.
compiler: str

# The instructions that the CPU kernels use on this machine.
def cpu_implementations() -> dict[str, str]: ...
def check_cpu_capability() -> None: ...

# The vector units for which loops are compiled, as ASCEND_ATTN_OPS_CPU_CAPABILITY names them.
vector_units: tuple[str, ...]

# The chosen matrix products, and the file and name under which a measured choice is kept.
def matrix_products() -> str: ...

# Whether the storage of a tensor holds all elements.
def has_memory(tensor: Tensor) -> bool: ...

# The first, the smallest and the largest of integers of one axis on the host; None for others.
def bounds_of(integers: Tensor) -> list[int] | None: ...
def limits_table() -> list[dict[str, Any]]: ...
def limits_override() -> int: ...

class LimitsBlock:
    def is_of_this_thread(self) -> bool: ...
    def end(self) -> None: ...

def begin_limits_block(override: int) -> LimitsBlock: ...
def limits_override_for(product: str | None, cann: str | None) -> int: ...
def device_named(product: str, cann: str | None) -> tuple[str, str]: ...
def set_default_limits(product: str | None, cann: str | None) -> None: ...
def request_value_checks(change: int) -> None: ...
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

# Raises for softmax statistics on the CPU that no row has, as the kernels do.
def check_statistics(operator: str, softmax_max: Tensor, softmax_sum: Tensor) -> None: ...
