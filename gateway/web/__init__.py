"""The console's pages. All files here that are not Python are served to browsers unchanged."""
