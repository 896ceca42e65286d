"""The JDK's HTTP client, which LangChain4j and Spring AI use."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.local_stack import Stack


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("javac") is None, reason="needs a JDK, which is not installed")
def test_java_net_http(stack: Stack) -> None:
    done = subprocess.run(
        ["java", str(Path(__file__).parent / "java" / "Chat.java")],
        env=os.environ | {"GATEWAY_BASE_URL": f"{stack.gateway}/v1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
