"""Tests of all packages, in folders named as they are."""

import pytest

# Before any of it is imported: what an assertion there compared is told as it is in a test.
pytest.register_assert_rewrite("tests.support")
