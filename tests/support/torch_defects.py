"""Tests that a defect of some versions of torch would fail, whatever operator they call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

# Any torch.library.custom_op shows it as well, with dynamic=False too.
INDUCTOR_LOSES_THE_OFFSET = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason=f"inductor of torch {torch.__version__} loses the offset of a view that is mutated",
)
EXPORT_LOSES_SIZES = pytest.mark.skipif(
    torch.__version__ < (2, 8), reason="torch.export of 2.7 loses a size in any autograd.Function"
)
# Its dynamo has no guards for the ranks' functions, and does not know the layers of transformers'
# cache; its AOTInductor loses lists of numbers.
NOT_WITH_2_7 = pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch 2.7 cannot do it")
# Any module does whose sizes are compared.
EXPORT_LOSES_STAR_ARGUMENTS = pytest.mark.skipif(
    (2, 9) <= torch.__version__ < (2, 10),
    reason=f"what torch {torch.__version__} exports of forward(*tensors) checks unknown names",
)


def skip_unless_dynamo_traces_out(output_names: Sequence[str]) -> None:
    """dynamo takes one of several outputs, if it is called `out`, for the tuple of all."""
    if torch.__version__ < (2, 9) and "out" in output_names and len(output_names) > 1:
        pytest.skip(f"dynamo of torch {torch.__version__} wants a tuple as `out`")
