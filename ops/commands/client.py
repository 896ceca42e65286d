"""`gateway client`: sends a request straight to Triton.

The options are those of the client scripts in NVIDIA's tensorrtllm_backend.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.triton.transport import ConnectionOptions
    from ops.client.question import Question

TOKENIZER_TYPES = ("auto", "t5", "llama", "sp")
"""Values of --tokenizer-type, an option of NVIDIA's client scripts.

The option has no effect here. Triton's models detect the type since TensorRT-LLM 0.9.
"""
TOKENIZER_TYPE_HELP = "no effect: the tokenizer's folder says what it is"
_TEXT = "Born in north-east France, Soyer trained as a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sends one request to a model of Triton, past the gateway: token ids to tensorrt_llm, text "
        "to ensemble, tensorrt_llm_bls or the llmapi repository's tensorrt_llm. Options and output "
        "are those of inflight_batcher_llm_client.py and end_to_end_grpc_client.py of "
        "tensorrtllm_backend."
    )
    parser.add_argument("-u", "--url", default="localhost:8001", help="default: localhost:8001")
    parser.add_argument(
        *("-i", "--protocol"), type=grpc_alone, metavar="grpc", help="how Triton is asked"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show each response")
    parser.add_argument("-t", "--stream-timeout", type=float, metavar="SECONDS")
    parser.add_argument("-s", "--ssl", action="store_true", help="TLS to --url")
    for name, what in (
        ("-r/--root-certificates", "authorities to trust"),
        ("--private-key", "the client's key"),
        ("-x/--certificate-chain", "the client's certificate"),
    ):
        parser.add_argument(*name.split("/"), type=Path, metavar="PEM", help=what)
    parser.add_argument("--model-name", default="tensorrt_llm", help="default: tensorrt_llm")
    parser.add_argument("--request-id", default="", help="default: a random one")

    prompt = parser.add_argument_group("prompt")
    prompt.add_argument("--text", "--prompt", default=_TEXT)
    prompt.add_argument(
        "--verbatim",
        action="store_true",
        help=r"send a backslash and an n in --text as they are; without it \n is a newline",
    )
    prompt.add_argument("--input-tokens-csv", type=Path, metavar="FILE", help="ids instead of text")
    prompt.add_argument("--tokenizer-dir", type=Path, metavar="DIR", help="Hugging Face folder")
    prompt.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help=TOKENIZER_TYPE_HELP)
    prompt.add_argument(
        "--end-id", type=int, help="default: the tokenizer's, or none without --tokenizer-dir"
    )
    prompt.add_argument("--pad-id", type=int, help="default: the end id")

    sampling = parser.add_argument_group("generation")
    sampling.add_argument("-S", "--streaming", action="store_true")
    sampling.add_argument("-n", "--num-return-sequences", type=int, default=1, metavar="N")
    sampling.add_argument("-b", "--beam-width", type=int, default=1, metavar="N")
    sampling.add_argument(
        "-o",
        "--request-output-len",
        "--output-len",
        type=int,
        metavar="TOKENS",
        help="default: 16 for tensorrt_llm, 100 for text models",
    )
    sampling.add_argument("--temperature", type=float, default=1.0, help="default: 1.0")
    sampling.add_argument("--top-k", type=int, default=1, help="default: 1")
    sampling.add_argument("--top-p", type=float, default=0.0, help="default: 0, which is none")
    for name in ("repetition", "presence", "frequency"):
        sampling.add_argument(f"--{name}-penalty", type=float)
    sampling.add_argument("--seed", "--random-seed", type=int)
    sampling.add_argument("--stop-words", nargs="+", metavar="WORD")
    sampling.add_argument("--bad-words", nargs="+", metavar="WORD")
    sampling.add_argument("--embedding-bias-words", nargs="+", metavar="WORD")
    sampling.add_argument("--embedding-bias-weights", nargs="+", type=float, metavar="WEIGHT")
    sampling.add_argument(
        "--guided-decoding-guide-type", choices=("json", "json_schema", "regex", "ebnf_grammar")
    )
    sampling.add_argument("--guided-decoding-guide", metavar="TEXT")
    sampling.add_argument(
        "--lora-path",
        type=Path,
        metavar="DIR",
        help="PEFT or npy files; to llmapi PEFT files where Triton sees them",
    )
    sampling.add_argument(
        "--lora-task-id", type=int, default=0, help="default: by content, if that is seen here"
    )
    sampling.add_argument("--lora-name", default="", help="to llmapi; default: that of its folder")

    stop = parser.add_argument_group("stopping it")
    stop.add_argument("--stop-after-ms", type=int, default=0, metavar="MS")
    stop.add_argument("--stop-via-request-cancel", action="store_true")

    answer = parser.add_argument_group("answer")
    answer.add_argument("--exclude-input-in-output", action="store_true")
    answer.add_argument(
        "--overwrite-output-text",
        action="store_true",
        help="each streamed text is the complete text so far (a BLS with accumulate_tokens)",
    )
    for name in ("log-probs", "context-logits", "generation-logits"):
        answer.add_argument(f"--return-{name}", action="store_true")
    answer.add_argument(
        "--return-kv-cache-reuse-stats", "--return-perf-metrics", action="store_true"
    )
    answer.add_argument("--requested-outputs", nargs="+", metavar="NAME")
    answer.add_argument("-c", "--check-output", "--check-outputs", action="store_true")
    answer.add_argument("--output-tokens-csv", type=Path, metavar="FILE", help="for --check-output")
    answer.add_argument("--correctness-threshold", type=float, default=1.0, metavar="PART")


def grpc_alone(protocol: str) -> str:
    if protocol != "grpc":
        raise argparse.ArgumentTypeError(f"found {protocol!r}; Triton is asked over grpc alone")
    return protocol


def run(parsed: argparse.Namespace) -> int:
    """Send the request and return the exit code.

    The code is 1 if the answer is not the expected one or is too late, and 2 if no request could be
    sent.
    """
    import asyncio

    from gateway.errors import GatewayError
    from ops.client.conversation import ask

    url = parsed.url
    if parsed.ssl and not url.startswith("grpcs://"):
        url = f"grpcs://{url}"
    try:
        question = _question(parsed)
        passed = asyncio.run(
            ask(url, _connection_options(parsed), question, lambda line: print(line, flush=True))
        )
    except TimeoutError:
        print("gateway client: error: no answer in time", file=sys.stderr)
        return 1
    except GatewayError as error:
        print(f"gateway client: error: {error.message}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"gateway client: error: {error}", file=sys.stderr)
        return 2
    return 0 if passed else 1


def _question(parsed: argparse.Namespace) -> Question:
    """Return the `Question` that the options describe.

    Raises OptionError for options that contradict each other.
    """
    from gateway.triton.names import LogicalInput
    from ops.client.question import Question
    from ops.errors import OptionError

    if parsed.check_output != (parsed.output_tokens_csv is not None):
        raise OptionError("--check-output and --output-tokens-csv need each other")
    if (parsed.embedding_bias_words is None) != (parsed.embedding_bias_weights is None):
        raise OptionError("--embedding-bias-words and --embedding-bias-weights need each other")
    given: list[tuple[LogicalInput, str, float | None]] = [
        ("temperature", "--temperature", parsed.temperature),
        ("top_k", "--top-k", parsed.top_k),
        ("top_p", "--top-p", parsed.top_p or None),
        ("repetition_penalty", "--repetition-penalty", parsed.repetition_penalty),
        ("presence_penalty", "--presence-penalty", parsed.presence_penalty),
        ("frequency_penalty", "--frequency-penalty", parsed.frequency_penalty),
        ("seed", "--seed", parsed.seed),
        ("log_probs", "--return-log-probs", parsed.return_log_probs or None),
        ("context_logits", "--return-context-logits", parsed.return_context_logits or None),
        (
            "generation_logits",
            "--return-generation-logits",
            parsed.return_generation_logits or None,
        ),
        (
            "cache_stats",
            "--return-kv-cache-reuse-stats",
            parsed.return_kv_cache_reuse_stats or None,
        ),
    ]
    texts: list[tuple[LogicalInput, str, list[str] | str | None]] = [
        ("stop_words", "--stop-words", parsed.stop_words),
        ("bad_words", "--bad-words", parsed.bad_words),
        ("bias", "--embedding-bias-words", parsed.embedding_bias_words),
        ("guide_type", "--guided-decoding-guide-type", parsed.guided_decoding_guide_type),
        ("guide", "--guided-decoding-guide", parsed.guided_decoding_guide),
    ]
    return Question(
        model=parsed.model_name,
        text=_text(parsed),
        prompt_ids=_read_ids(parsed.input_tokens_csv),
        tokenizer_dir=parsed.tokenizer_dir,
        request_id=parsed.request_id,
        max_tokens=parsed.request_output_len,
        streaming=parsed.streaming,
        beam_width=parsed.beam_width,
        sequences=parsed.num_return_sequences,
        end_id=parsed.end_id,
        pad_id=parsed.pad_id,
        scalars={thing: (option, v) for thing, option, v in given if v is not None},
        words={
            thing: (option, [v] if isinstance(v, str) else v)
            for thing, option, v in texts
            if v is not None
        },
        bias_weights=parsed.embedding_bias_weights,
        exclude_input=parsed.exclude_input_in_output,
        stop_after_ms=parsed.stop_after_ms,
        by_cancel=parsed.stop_via_request_cancel,
        lora_path=parsed.lora_path,
        lora_task_id=parsed.lora_task_id,
        lora_name=parsed.lora_name,
        outputs=parsed.requested_outputs,
        expected_ids=_read_ids(parsed.output_tokens_csv),
        threshold=parsed.correctness_threshold,
        overwrite=parsed.overwrite_output_text,
        timeout_s=parsed.stream_timeout,
        verbose=parsed.verbose,
    )


def _text(parsed: argparse.Namespace) -> str:
    r"""Return the prompt. Unless --verbatim is given, replace each `\n` in it by a newline.

    In quotes, Bash passes `\n` as a backslash and an n.
    """
    text: str = parsed.text
    if parsed.verbatim or "\\n" not in text:
        return text
    print(
        r"gateway client: --text: \n is sent as a newline; --verbatim sends a backslash and an n",
        file=sys.stderr,
    )
    return text.replace("\\n", "\n")


def _connection_options(parsed: argparse.Namespace) -> ConnectionOptions:
    from gateway.triton.transport import ConnectionOptions

    return ConnectionOptions(
        tls_ca=parsed.root_certificates,
        tls_cert=parsed.certificate_chain,
        tls_key=parsed.private_key,
    )


def _read_ids(file: Path | None) -> list[int] | None:
    """Return the token ids in a CSV file's first line; None without a file."""
    if file is None:
        return None
    with file.open(encoding="utf-8", newline="") as lines:
        return [int(cell) for cell in next(csv.reader(lines), [])]
