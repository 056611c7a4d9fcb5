"""AttentionUpdate: docs/operators/attention_update.md."""

from __future__ import annotations

import torch
from torch import Tensor

from ..declaration import Arguments, reference


@reference
def attention_update(a: Arguments) -> tuple[Tensor, Tensor]:
    """With m = max_i lse[i]:

        lse_out = m + log(sum_i exp(lse[i] - m))
        out     = sum_i local_out[i] * exp(lse[i] - lse_out)

    A row that is infinite everywhere has out 0 and lse_out -inf. Differentiable by plain autograd.

    Returns out (..., D) in the dtype of local_out and lse_out (...) in that of lse.
    """
    lse = torch.stack(list(a.lse))
    # As on the device: plus infinity marks a part without keys as well.
    lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    local_out = torch.stack([x.to(lse.dtype) for x in a.local_out])
    # Masked before the arithmetic: the gradient of what is not used would be NaN.
    empty = (lse == -torch.inf).all(0)
    lse = lse.masked_fill(empty, 0)
    local_out = local_out.masked_fill(empty[..., None], 0)

    m = lse.amax(0).detach()
    lse_out = m + (lse - m).exp().sum(0).log()
    out = (local_out * (lse - lse_out).exp()[..., None]).sum(0)
    return out.to(a.local_out[0].dtype), lse_out.masked_fill(empty, -torch.inf)
