"""Data about requests that run now, and statistics of the last hour, in this process' memory."""
