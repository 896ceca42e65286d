"""Tests of all packages, in folders named after the packages."""

import os

import pytest

# One BLAS thread, set before numpy is imported, as `gateway up` sets it for Triton. Each of
# thousands of small products would wait for all threads, and long so on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Rewrite assertions in helpers too, before any is imported, so that failures show the values.
pytest.register_assert_rewrite("tests.support")
