"""The benchmark: a short run, and a scripted upstream that behaves like the Triton it replaces."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from bench import direct, frames, pace, report
from bench.machine import cores_for
from bench.text_answer import MET_UNDER_WAY, PIECE, Texts, tokens_before
from bench.upstream import TOKEN
from gateway.triton import bytes_tensor
from ops.local_stack.ports import PortClaims
from tests.support.llmapi_models import build_synthetic
from tests.support.triton_server import render_core, repository_parameters, serving
from triton_repo.cpu_executor import synthetic
from triton_repo.llmapi_repository import render_llmapi
from triton_repo.render import render

SERVICE = "/inference.GRPCInferenceService/"
STREAM_INFER = SERVICE + "ModelStreamInfer"
FRAME_HEAD, GRPC_HEAD = 9, 5
ASKED = ("return_finish_reason", "return_stop_reason", "sampling_param_exclude_input_from_output")
WITHIN = 120.0
"""Timeout in seconds, only for a test that hangs."""


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the host:port of a scripted upstream in its own process."""
    folder = tmp_path_factory.mktemp("upstream")
    synthetic.build(folder / "engine", vocab_size=4096)
    render(folder / "repository", repository_parameters(folder))
    with PortClaims() as claims:
        port = claims.take_free()
        command = [sys.executable, "-m", "bench.upstream", "--port", str(port)]
        command += ["--repository", str(folder / "repository")]
        process = subprocess.Popen(command)
        try:
            deadline = time.monotonic() + WITHIN
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def stream_infer(address: str, *requests: bytes) -> list[bytes]:
    """Return the serialized messages of one call."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(
            STREAM_INFER, request_serializer=None, response_deserializer=None
        )
        return list(call(iter(requests), timeout=WITHIN))


@pytest.mark.slow
def test_upstream_sends_what_triton_sends(upstream: str, tmp_path: Path) -> None:
    # Tokens come so slowly that no two share a response, even on a busy machine.
    synthetic.build(
        tmp_path / "engine",
        **{"vocab_size": 4096, "max_seq_len": 8192, "tokens": [TOKEN]},
        **{"first_token_ms": 0, "tokens_per_second": 0.25},
    )
    request = direct.infer_request("an id", [5, 6, 7], 3, pace.BURST)
    render_core(tmp_path)
    with serving(tmp_path) as triton:
        real = stream_infer(triton.grpc, request)
    assert stream_infer(upstream, request) == real
    assert len(real) == 3


@pytest.mark.slow
def test_texts_so_far_are_sent_as_triton_sends_them(tmp_path: Path) -> None:
    build_synthetic(tmp_path / "engine")
    render_llmapi(tmp_path / "repository", {"model": str(tmp_path / "engine")})
    request = pb.ModelInferRequest(model_name="tensorrt_llm", id="an id")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    inputs = {
        "text_input": ("BYTES", bytes_tensor.pack(["x"])),
        "sampling_param_max_tokens": ("INT32", struct.pack("<i", 3)),
        **dict.fromkeys(("streaming", *ASKED), ("BOOL", b"\1")),
    }
    for name, (datatype, raw) in inputs.items():
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        request.raw_input_contents.append(raw)
    with serving(tmp_path) as triton:
        real = stream_infer(triton.grpc, request.SerializeToString())
    texts = Texts(request, 1)
    for data in real:
        message = pb.ModelStreamInferResponse.FromString(data)
        response = message.infer_response
        [text] = bytes_tensor.unpack(response.raw_output_contents[0])
        tokens, final = text.count(" one"), data is real[-1]
        response.raw_output_contents[0] = bytes_tensor.pack([PIECE.decode() * tokens])
        [scripted] = texts.frames(tokens, final=final)
        assert scripted[FRAME_HEAD + GRPC_HEAD :] == message.SerializeToString()
    assert tokens == 3


def test_long_texts_go_in_frames_of_16_kib_and_are_met_at_all_places() -> None:
    request = pb.ModelInferRequest(model_name="tensorrt_llm", id="an id")
    sent = bytearray(b"".join(Texts(request, 1).frames(10_000, final=True)))
    payloads = [payload for _, _, _, payload in frames.take_frames(sent)]
    assert [len(payload) for payload in payloads[:-1]] == [16_384] * 2
    [message] = frames.take_messages(bytearray(b"".join(payloads)))
    outputs = pb.ModelStreamInferResponse.FromString(message).infer_response.raw_output_contents
    assert bytes_tensor.unpack(outputs[0]) == [PIECE.decode() * 10_000]
    places = sorted(tokens_before(number, 1000) for number in range(MET_UNDER_WAY))
    assert all(later - earlier < 30 for earlier, later in pairwise([0, *places, 1000]))
    assert tokens_before(MET_UNDER_WAY, 1000) == 0


def test_upstream_serves_the_rendered_config(upstream: str, tmp_path: Path) -> None:
    with grpc.insecure_channel(upstream) as channel:
        ask = channel.unary_unary(
            SERVICE + "ModelConfig",
            request_serializer=None,
            response_deserializer=pb.ModelConfigResponse.FromString,
        )
        config = ask(b"", timeout=WITHIN).config
        assert config.model_transaction_policy.decoupled
        assert "random_seed" in {tensor.name for tensor in config.input}
        unknown = channel.unary_unary(SERVICE + "ModelStatistics", None, None)
        with pytest.raises(grpc.RpcError) as refused:
            unknown(b"", timeout=WITHIN)
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_upstream_keeps_within_the_windows(upstream: str) -> None:
    """Check that a client with the initial flow control window gets no more data than that."""
    host, _, port = upstream.rpartition(":")
    with socket.create_connection((host, int(port))) as line:
        headers = b"\x83\x86" + frames.literal(":path", STREAM_INFER)
        message = frames.grpc_message(direct.infer_request("id", [5], 100_000, pace.BURST))
        line.sendall(
            frames.PREFACE
            + frames.frame(frames.SETTINGS, 0, 0)
            + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, headers)
            + frames.frame(frames.DATA, frames.END_STREAM, 1, message)
        )
        least = frames.DEFAULT_WINDOW - 200
        assert least < data_size(line, least) <= frames.DEFAULT_WINDOW
        line.sendall(frames.window_update(0, 1000) + frames.window_update(1, 1000))
        assert 800 <= data_size(line, 800) <= 1200


def data_size(line: socket.socket, least: int) -> int:
    """Return the bytes of DATA frames: wait for `least` bytes, then until none arrive for 0.7 s."""
    size, buffer = 0, bytearray()
    line.settimeout(WITHIN)
    with contextlib.suppress(TimeoutError):
        while data := line.recv(65536):
            buffer += data
            for kind, _, _, payload in frames.take_frames(buffer):
                size += len(payload) if kind == frames.DATA else 0
            if size >= least:
                line.settimeout(0.7)
    return size


def test_frames_are_taken_whole_wherever_they_are_cut() -> None:
    sent = [(frames.DATA, 1, 3, b"abc"), (frames.PING, 0, 0, bytes(8)), (frames.DATA, 0, 5, b"")]
    wire = b"".join(frames.frame(*each) for each in sent)
    for cut in range(len(wire)):
        buffer = bytearray(wire[:cut])
        taken = list(frames.take_frames(buffer))
        buffer += wire[cut:]
        assert taken + list(frames.take_frames(buffer)) == sent


def test_padding_and_priority_are_left_out() -> None:
    flags = frames.PADDED | frames.PRIORITY
    assert frames.bare_payload(flags, b"\x02" + bytes(5) + b"block" + bytes(2)) == b"block"


def test_a_core_for_each_worker_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    cores = cores_for(8)
    assert len(cores.gateway) == 8
    every = [*cores.gateway, *cores.upstream, *cores.client]
    assert sorted(every) == list(range(16))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert cores_for(1).upstream == cores_for(1).client == (0,)


@pytest.mark.nightly
def test_bench_runs_and_reports(tmp_path: Path) -> None:
    """Check a tiny run: all results exist and are numbers, though meaningless."""
    parts = ["tokens", "llmapi", "cancel"]
    command = [sys.executable, "-m", "bench", "--quick", "--seconds", "0.2", "--output"]
    done = subprocess.run(
        [*command, str(tmp_path), "--only", *parts],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["parts"]) == parts
    assert {"cpu", "cores", "commit"} <= set(results["machine"])
    tokens = results["parts"]["tokens"]
    assert {row["who"] for row in tokens} >= {"gateway", "ordinary gateway"}
    assert any(row["tokens/s"] > 0 for row in tokens)
    assert all(math.isfinite(row["CPU us/token"]) for row in tokens)
    for row in results["parts"]["cancel"]:
        assert row["stop seen"] == row["reset seen"] == row["requests"]
    for part in parts:
        assert f"### {report.TITLES[part]}" in done.stdout
    assert ET.parse(tmp_path / "results.svg").getroot().tag.endswith("svg")
