"""``Executor`` of ``tensorrt_llm.bindings.executor``, implemented with numpy."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, overload

from triton_repo.cpu_executor.checks import as_duration, as_int, check
from triton_repo.cpu_executor.engine import SYNTHETIC, CpuEngineConfig, load_config
from triton_repo.cpu_executor.enums import CommunicationMode, ModelType
from triton_repo.cpu_executor.executor_config import ExecutorConfig
from triton_repo.cpu_executor.gpt import Gpt
from triton_repo.cpu_executor.inflight import InflightLoop
from triton_repo.cpu_executor.llama import Llama
from triton_repo.cpu_executor.loop import RequestLoop
from triton_repo.cpu_executor.mailbox import Mailbox
from triton_repo.cpu_executor.pretrained import GPT
from triton_repo.cpu_executor.ranks import own_rank
from triton_repo.cpu_executor.request import Request
from triton_repo.cpu_executor.result import Response
from triton_repo.cpu_executor.stats import IterationStats, RequestStatsPerIteration
from triton_repo.cpu_executor.synthetic import SyntheticLoop


class Executor:
    """Executor of requests for one engine, in a background thread, with in-flight batching.

    All methods may be called from any thread. The constructor blocks until the model is loaded.
    Durations are ``datetime.timedelta`` or float seconds.

    In an MPI job the leader, rank 0, does all the work. The other ranks hold no model and accept no
    requests. As in TensorRT-LLM, the other ranks call ``shutdown`` to wait for the leader. In the
    CPU executor, this call blocks until the process is killed, because the other ranks cannot
    detect that the leader has ended.
    """

    def __init__(
        self, model_path: str | Path, model_type: ModelType, executor_config: ExecutorConfig
    ) -> None:
        if not isinstance(model_path, str | Path):
            raise TypeError(
                "Executor(): incompatible constructor arguments: model_path must be a path, "
                f"found {model_path!r}"
            )
        check(
            ModelType(model_type) == ModelType.DECODER_ONLY,
            "the CPU executor runs DECODER_ONLY models only",
        )
        self._mailbox = Mailbox(
            executor_config.max_queue_size,
            executor_config.iter_stats_max_iterations,
            executor_config.request_stats_max_iterations,
        )
        folder = Path(model_path)
        config = load_config(folder)
        _refuse_unsupported(executor_config, config)
        if own_rank(os.environ) == 0:
            work = _make_loop(folder, config, executor_config, self._mailbox).run
        else:
            self._mailbox.close()
            work = _wait_for_ever
        self._thread = threading.Thread(target=work, name="executor-loop", daemon=True)
        self._thread.start()

    def enqueue_request(self, request: Request) -> int:
        return self._mailbox.enqueue([request])[0]

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Queue all requests, or none of them if one cannot be queued. Return the ids in order."""
        return self._mailbox.enqueue(requests)

    @overload
    def await_responses(
        self, id: None = None, timeout: timedelta | float | None = None
    ) -> list[Response]: ...
    @overload
    def await_responses(
        self, id: int, timeout: timedelta | float | None = None
    ) -> list[Response]: ...
    @overload
    def await_responses(
        self, id: Iterable[int], timeout: timedelta | float | None = None
    ) -> list[list[Response]]: ...
    def await_responses(
        self, id: Any = None, timeout: timedelta | float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Wait for responses, and return them.

        Args:
            id: id of the request to wait for; None to wait for any request. For several ids, the
                result has a list of responses for each id. As in TensorRT-LLM, a duration in this
                position is used as `timeout`.
            timeout: the longest wait, as a ``timedelta`` or in seconds; None to wait without limit.

        Return ``[]`` (for several ids, one ``[]`` per id) on timeout or shutdown.
        """
        if isinstance(id, timedelta | float):
            id, timeout = None, id
        seconds = None if timeout is None else as_duration(timeout).total_seconds()
        if id is None:
            return self._mailbox.take_all(seconds)
        if isinstance(id, Iterable):
            return self._mailbox.take_each([as_int(i) for i in id], seconds)
        return self._mailbox.take(as_int(id), seconds)

    def get_num_responses_ready(self, id: int | None = None) -> int:
        return self._mailbox.ready_count(id)

    def cancel_request(self, id: int) -> None:
        """End a request after the current step. A finished request is ignored."""
        self._mailbox.cancel(as_int(id))

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Return the statistics of the iterations since the last call."""
        return self._mailbox.drain_stats()

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """Return the request statistics of each iteration since the last call.

        Only the last ``request_stats_max_iterations`` iterations (default: 0) are stored.
        """
        return self._mailbox.drain_request_stats()

    def can_enqueue_requests(self) -> bool:
        return self._mailbox.is_open

    def shutdown(self) -> None:
        """Refuse new requests, and block until the accepted requests have ended."""
        self._mailbox.close()
        self._thread.join()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()


def _refuse_unsupported(settings: ExecutorConfig, config: CpuEngineConfig) -> None:
    """Raise ``RuntimeError`` for a setting that the CPU executor does not implement."""
    decoding = settings.decoding_config
    mode = None if decoding is None else decoding.decoding_mode
    parallel = settings.parallel_config
    windows = settings.kv_cache_config.max_attention_window or []
    unsupported = {
        "decoding_mode": mode is not None
        and not (mode.isAuto() or mode.isTopKorTopP() or mode.isBeamSearch()),
        "medusa_choices": decoding is not None and bool(decoding.medusa_choices),
        "eagle_config": decoding is not None and decoding.eagle_config is not None,
        "lookahead_decoding_config": decoding is not None
        and decoding.lookahead_decoding_config is not None,
        "logits_post_processor_config": settings.logits_post_processor_config is not None,
        "lora_prefetch_dir": settings.peft_cache_config.lora_prefetch_dir is not None,
        "spec_dec_config": settings.spec_dec_config is not None,
        "debug_config": settings.debug_config is not None,
        "orchestrator mode": parallel is not None
        and parallel.communication_mode == CommunicationMode.ORCHESTRATOR,
        "max_attention_window below max_seq_len": any(w < config.max_seq_len for w in windows),
        "sink_token_length": bool(settings.kv_cache_config.sink_token_length),
    }
    for name, is_set in unsupported.items():
        check(not is_set, f"{name} is not supported by the CPU executor")
    check(
        settings.max_beam_width <= config.max_beam_width,
        f"max_beam_width ({settings.max_beam_width}) exceeds the engine's "
        f"({config.max_beam_width})",
    )


def _make_loop(
    folder: Path, config: CpuEngineConfig, settings: ExecutorConfig, mailbox: Mailbox
) -> RequestLoop:
    if config.architecture == SYNTHETIC:
        return SyntheticLoop(config, settings, mailbox)
    model = Gpt if config.architecture == GPT else Llama
    return InflightLoop(model(config, folder), config, settings, mailbox)


def _wait_for_ever() -> None:
    threading.Event().wait()
