"""A matrix product whose rows do not depend on the other rows of the batch.

A plain ``x @ w`` may round a row differently for other row counts, because BLAS picks other
kernels and other tail code. Then a request's greedy output could change with what it is batched
with. Here the weight is cut into column tiles and the rows into blocks of one fixed height, so
that every GEMM has the same shape whatever the batch is. Such small GEMMs are also faster than
one large one for a few rows, because OpenBLAS does not repack the weight for them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TILE = 64
ROWS = 8
# A batch of up to this many rows is computed as one short block.
FEW_ROWS = 4


def padded_rows(count: int) -> int:
    """The row count that a batch of ``count`` rows must be padded to."""
    return FEW_ROWS if count <= FEW_ROWS else -(-count // ROWS) * ROWS


class Linear:
    """``y = x @ weight.T + bias`` for float32; weight ``[out, in]`` as in a checkpoint."""

    def __init__(
        self, weight: NDArray[np.float32], bias: NDArray[np.float32] | None = None
    ) -> None:
        out_size, in_size = weight.shape
        tiles = -(-out_size // TILE)
        padded = np.zeros((tiles * TILE, in_size), dtype=np.float32)
        padded[:out_size] = weight
        # [tiles, in, TILE]
        self._weight = np.ascontiguousarray(padded.reshape(tiles, TILE, in_size).swapaxes(1, 2))
        self._bias = bias
        self._tiles = tiles
        self.in_size = in_size
        self.out_size = out_size

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """``x`` is ``[padded_rows(n), in]`` and contiguous; returns ``[same, out]``."""
        rows = x.shape[0]
        out: NDArray[np.float32] = np.empty((rows, self._tiles * TILE), dtype=np.float32)
        height = FEW_ROWS if rows == FEW_ROWS else ROWS
        blocks = out.reshape(rows // height, height, self._tiles, TILE).transpose(2, 0, 1, 3)
        np.matmul(
            x.reshape(1, rows // height, height, self.in_size), self._weight[:, None], out=blocks
        )
        if self.out_size != out.shape[1]:
            out = out[:, : self.out_size]
        if self._bias is not None:
            out += self._bias
        return out
