"""The browser, for all tests of pages."""

from tests.support.browser import browser

__all__ = ["browser"]
