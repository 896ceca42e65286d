"""Tests of all packages, in folders named as they are."""

import os

import pytest

# As `gateway up` has it for Triton: threads of BLAS wait for each other in each of thousands of
# small products, and so for long where other processes have the cores. Before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Before any of it is imported: what an assertion there compared is told as it is in a test.
pytest.register_assert_rewrite("tests.support")
