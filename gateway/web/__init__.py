"""Files of the console's web pages. All files except Python files are served unchanged."""
