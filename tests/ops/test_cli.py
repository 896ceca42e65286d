"""The `gateway` command line, as far as it needs no stack."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from ops.cli import with_dashes
from tests.support import commands
from tests.support.commands import Answer
from tests.support.full_disk import full_disk

ROOT = Path(__file__).parents[2]
Gateway = Callable[..., Answer]


def _run(*arguments: str, largest_file: int | None = None, **variables: str) -> Answer:
    """Run the command in a child process. `largest_file` simulates a full disk; see `full_disk`."""
    settings = {name: value for name, value in os.environ.items() if "GATEWAY_" not in name}
    with contextlib.nullcontext() if largest_file is None else full_disk(largest_file):
        process = subprocess.Popen(
            [sys.executable, "-m", "ops", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=settings | variables,
        )
    with process:
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """Return a function that runs the command in this process, with the given variables only."""

    def run(*arguments: str, **variables: str) -> Answer:
        for name in [name for name in os.environ if "GATEWAY_" in name]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return commands.gateway(*arguments)

    return run


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--world_size", "2"], ["--world-size", "2"]),
        (["--max_input_len=a_b"], ["--max-input-len=a_b"]),
        (["lora_x", "a_b", "-a_b", "-i"], ["lora_x", "a_b", "-a_b", "-i"]),
        (["--a_b", "--", "--c_d"], ["--a-b", "--", "--c_d"]),
        ([], []),
    ],
)
def test_names_of_options_may_have_underscores(given: list[str], read: list[str]) -> None:
    assert list(with_dashes(given)) == read


def test_help_names_the_commands() -> None:
    answer = _run("--help")
    assert answer.returncode == 0
    assert "up" in answer.stdout.split()
    assert "serve" in answer.stdout.split()


def test_version_is_that_of_the_distribution(gateway: Gateway) -> None:
    answer = gateway("--version")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == f"gateway {version('triton-openai-gateway')}\n"


def test_help_of_serve_tells_what_settings_are_and_where_they_are_described(
    gateway: Gateway,
) -> None:
    said = " ".join(gateway("serve", "--help").stdout.split())
    assert "environment variables: GATEWAY_ and the setting's name in capitals" in said
    [page] = re.findall(r"\S+\.md", said)
    assert (ROOT / page).read_text(encoding="utf-8").startswith("# Settings")


def test_the_command_line_imports_nothing_heavy() -> None:
    answer = _run("up", "--help", PYTHONPROFILEIMPORTTIME="1")
    modules = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "ops.cli" in modules
    assert not modules & {"numpy", "fastapi", "transformers", "grpc", "pydantic", "uvicorn"}


@pytest.mark.parametrize("arguments", [[], ["down"], ["up", "--stat", "x"], ["up", "--port", "x"]])
def test_wrong_command_lines(gateway: Gateway, arguments: list[str]) -> None:
    answer = gateway(*arguments)
    assert answer.returncode == 2
    assert "error: " in answer.stderr


@pytest.mark.parametrize("largest_file", [0, 8192])
def test_up_on_a_full_disk_says_so(tmp_path: Path, largest_file: int) -> None:
    state = tmp_path / "state"
    answer = _run("up", "--port", "0", "--state-dir", str(state), largest_file=largest_file)
    assert answer.returncode == 1
    [line] = answer.stderr.splitlines()
    assert line.startswith("error: [Errno 27] File too large")
    assert line.endswith(f"; is --state-dir, {state}, full?")
    # The next start must not find a truncated key.
    key = state / "admin_key"
    assert not key.exists() if largest_file == 0 else len(key.read_text()) > 32


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--parameter", "behaves_as=1.4"), "behaves_as: found '1.4'; allowed: one of main, 1.3"),
        (
            ("--parameter", "engine_dir=x"),
            "engine_dir: unknown parameter; allowed for tensorrt_llm",
        ),
        (("--model", "/nowhere"), "--model: /nowhere/config.json does not exist"),
        (("--imported", "/nowhere"), "--repository: an imported one is there; leave it out"),
    ],
)
def test_up_refuses_an_llmapi_repository_that_cannot_be(
    tmp_path: Path, arguments: tuple[str, str], why: str
) -> None:
    wrong = ("--repository", "llmapi", "--port", "0", "--state-dir", str(tmp_path), *arguments)
    answer = _run("up", *wrong)
    assert answer.returncode == 1
    [line] = answer.stderr.splitlines()
    assert why in line


def test_serve_names_the_variables_that_are_wrong(gateway: Gateway) -> None:
    answer = gateway("serve", GATEWAY_PORT="http")
    assert answer.returncode == 2
    assert "GATEWAY_TOKENIZER_DIR: is not set" in answer.stderr
    assert "GATEWAY_PORT: Input should be a valid integer" in answer.stderr


@pytest.mark.parametrize("name", ["CORS_ORIGINS", "TRITON_METADATA", "ADAPTERS"])
def test_serve_names_what_is_not_json(gateway: Gateway, name: str) -> None:
    answer = gateway("serve", **{f"GATEWAY_{name}": "https://SECRET"})
    assert answer.returncode == 2
    assert answer.stderr == (
        f"gateway: GATEWAY_{name}: is not JSON; docs/settings.md shows what is expected\n"
    )


def test_serve_names_the_files_that_are_not_there(gateway: Gateway, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    answer = gateway("serve", GATEWAY_TOKENIZER_DIR=nowhere, GATEWAY_TRITON_TLS_CA=nowhere)
    assert answer.returncode == 2
    assert answer.stderr == (
        f"gateway: GATEWAY_TOKENIZER_DIR: {nowhere} is not a folder\n"
        f"GATEWAY_TRITON_TLS_CA: {nowhere} is not a file\n"
    )


def test_serve_names_what_it_cannot_write_to(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    places = {"GATEWAY_STORE_DIR": str(file / "store"), "GATEWAY_USAGE_LOG": str(tmp_path)}
    answer = gateway("serve", GATEWAY_TOKENIZER_DIR=str(tmp_path), **places)
    assert answer.returncode == 2
    assert answer.stderr == (
        f"gateway: GATEWAY_STORE_DIR: {file}/store is not a folder that can be written to\n"
        f"GATEWAY_USAGE_LOG: {tmp_path} is not a file that can be written to\n"
    )


@pytest.mark.parametrize(
    ("endpoints", "wrong"),
    [
        ("localhost", "localhost"),
        ("http://localhost:8001", "http://localhost:8001"),
        ("a:1, b:port", "b:port"),
        ("a:1,", ""),
        ("a:65536", "a:65536"),
        ("dns:///grpcs://a:1", "dns:///grpcs://a:1"),
    ],
)
def test_serve_says_what_an_endpoint_is(
    gateway: Gateway, tmp_path: Path, endpoints: str, wrong: str
) -> None:
    answer = gateway("serve", GATEWAY_TOKENIZER_DIR=str(tmp_path), GATEWAY_TRITON_GRPC=endpoints)
    assert answer.returncode == 2
    assert answer.stderr == (
        f"gateway: GATEWAY_TRITON_GRPC: {wrong!r} must be host:port, grpcs://host:port or "
        "dns:///host:port\n"
    )


def test_settings_that_do_not_go_together_name_themselves(gateway: Gateway, tmp_path: Path) -> None:
    answer = gateway("serve", GATEWAY_TOKENIZER_DIR=str(tmp_path), GATEWAY_TLS_CERT="x")
    assert answer.returncode == 2
    assert answer.stderr == "gateway: GATEWAY_TLS_CERT and GATEWAY_TLS_KEY need each other\n"


@pytest.mark.parametrize("release", ["foo", "0.1", "v0.1.32", "0.1.32\n"])
def test_a_release_of_xgrammar_is_three_numbers(
    gateway: Gateway, tmp_path: Path, release: str
) -> None:
    answer = gateway("serve", GATEWAY_TOKENIZER_DIR=str(tmp_path), GATEWAY_XGRAMMAR_RELEASE=release)
    assert answer.returncode == 2
    assert answer.stderr.startswith(
        f"gateway: GATEWAY_XGRAMMAR_RELEASE: found {release!r}; it must be the release of xgrammar "
        "in the engines as X.Y.Z, such as 0.1.32"
    )


# Variables that a kubelet sets in each container for Services such as `gateway`.
SERVICE_LINKS = {
    "GATEWAY_SERVICE_HOST": "10.96.0.10",
    "GATEWAY_SERVICE_PORT": "80",
    "GATEWAY_SERVICE_PORT_API": "80",
    "GATEWAY_PORT_80_TCP": "tcp://10.96.0.10:80",
    "GATEWAY_PORT_80_TCP_PROTO": "tcp",
    "GATEWAY_PORT_80_TCP_PORT": "80",
    "GATEWAY_PORT_80_TCP_ADDR": "10.96.0.10",
    "GATEWAY_ADMIN_SERVICE_HOST": "10.96.0.11",
    "GATEWAY_ADMIN_PORT_9001_UDP_ADDR": "10.96.0.11",
    "GATEWAY_OTHER_PORT": "tcp://10.96.0.12:80",
}


def test_a_service_link_for_a_port_is_refused_with_the_reason(
    gateway: Gateway,
) -> None:
    links = SERVICE_LINKS | {
        "GATEWAY_PORT": "tcp://10.96.0.10:80",
        "GATEWAY_ADMIN_PORT": "tcp://10.96.0.11:9001",
    }
    answer = gateway("serve", GATEWAY_TOKENIZER_DIR=".", **links)
    assert answer.returncode == 2
    reason = (
        "is what Kubernetes puts there for a Service of that name (a service link); set "
        "enableServiceLinks: false in the pod's spec, or this variable to a number"
    )
    assert answer.stderr == (
        f"gateway: GATEWAY_PORT: tcp://10.96.0.10:80 {reason}\n"
        f"GATEWAY_ADMIN_PORT: tcp://10.96.0.11:9001 {reason}\n"
    )


def test_misspelt_variables_are_told_with_the_nearest_setting(
    gateway: Gateway,
) -> None:
    wrong = {
        "GATEWAY_PROT": "9000",
        "GATEWAY_REDIS": "redis://:SECRET@redis:6379/0",
        "gateway_modelname": "llama",
        "GATEWAY_PORT_API": "80",
        "GATEWAY_OTHER_PORT": "80",
    }
    # This project's variables that are no settings: of a rank, the commands and Compose.
    inherited = dict.fromkeys(("GATEWAY_LAUNCH", "GATEWAY_URL", "GATEWAY_IMAGE"), "x")
    expected = (
        "GATEWAY_OTHER_PORT: there is no such setting; the nearest is GATEWAY_PORT\n"
        "GATEWAY_PORT_API: there is no such setting; the nearest is GATEWAY_PORT\n"
        "GATEWAY_PROT: there is no such setting; the nearest is GATEWAY_PORT\n"
        "GATEWAY_REDIS: there is no such setting; the nearest is GATEWAY_REDIS_URL\n"
        "gateway_modelname: there is no such setting; the nearest is GATEWAY_MODEL_NAME\n"
    )
    served = gateway("serve", GATEWAY_TOKENIZER_DIR=".", **(SERVICE_LINKS | wrong | inherited))
    assert (served.returncode, served.stderr) == (2, f"gateway: {expected}")
    # The check comes before anything is started or a folder is created.
    up = gateway("up", "--state-dir", "/dev/null/none", **(SERVICE_LINKS | wrong | inherited))
    assert (up.returncode, up.stderr) == (1, f"gateway up: {expected}")
