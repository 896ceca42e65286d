"""The worker process that compiles guides, and the gateway's protocol with it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import psutil

from guides.worker import CPU_S


def test_each_guide_has_an_answer_and_the_process_its_bounds() -> None:
    asked = [
        ["regex", "a+", "xgrammar", []],
        ["regex", "(", "xgrammar", []],
        ["json_schema", '{"const": "é😀"}', "llguidance", []],
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "guides.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = []
        for guide in asked:
            process.stdin.write(json.dumps(guide).encode() + b"\n")
            process.stdin.flush()
            answers.append(json.loads(process.stdout.readline()))
        worker = psutil.Process(process.pid)
        cpu, _ = worker.rlimit(psutil.RLIMIT_CPU)
        memory, _ = worker.rlimit(psutil.RLIMIT_AS)
        process.stdin.close()
        assert process.wait(60) == 0  # stdin is closed
    assert [verdict[0] is None for verdict, _ in answers] == [True, False, True]
    assert [verdict[1] for verdict, _ in answers] == ["a+", "(", '{"const":"é😀"}']
    assert all(2**20 < size < 100 * 2**20 for _, size in answers)
    # The CPU limit counts from the process' start: time used so far plus CPU_S.
    used = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    assert CPU_S < cpu <= used + CPU_S + 1
    assert memory == 1 << 30
