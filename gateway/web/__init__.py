"""The console: pages for browsers, as they are sent. What is not Python here, browsers get."""
