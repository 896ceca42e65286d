"""Requests that run now and figures of the last hour, held in the process for readers."""
