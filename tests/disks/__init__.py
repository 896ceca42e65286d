"""Tests of Tritons with separate disks: killed agents, full disks, and a Redis that loses data."""
