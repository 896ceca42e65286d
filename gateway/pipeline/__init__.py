"""Stages between a parsed request and its answer: preparation, scheduling and generation."""
