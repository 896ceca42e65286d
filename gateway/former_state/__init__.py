"""State that the release before stored in Redis and in files, for the move to the database.

This release reads it and does not write it. The next minor release no longer has this package.
"""
