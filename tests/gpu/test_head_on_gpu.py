"""Compare the Triton kernel of the LM head, as a GPU runs it, with plain torch in fp64."""

import pytest
import torch
from support.head_kernels import (
    DTYPES,
    ON_GPU,
    SIZES,
    TOLERANCE,
    check,
    head_errors,
    kernel_errors,
    needs_triton,
)


@pytest.mark.gpu
@needs_triton
@DTYPES
def test_the_kernel_as_a_gpu_runs_it(dtype: torch.dtype) -> None:
    """Repeat the tests above, which a GPU that can runs, too; skip if it cannot."""
    if not ON_GPU:
        pytest.skip("the kernel needs compute capability 8.0")
    for vocabulary in SIZES:
        found = kernel_errors(dtype, vocabulary, True, True, True)
        check(found, dtype, {"kl", "cross-entropy", "gradient"})
    assert max(head_errors("tokens", dtype, 6, 4)) <= TOLERANCE[dtype]
