"""Translation of one row of a Triton request to a request for the executor."""

from datetime import timedelta
from typing import Any

from executor_api import LOOKAHEAD, RequestRow, drop_unset, trtllm

# Maps input tensors to keywords of SamplingConfig. `triton_repo.render` copies only the lines for
# the chosen release (`until`, `since`), because an executor refuses keywords of other releases.
SAMPLING = {
    "beam_width": "beam_width",
    "num_return_sequences": "num_return_sequences",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "runtime_top_p_min": "top_p_min",
    "runtime_top_p_reset_ids": "top_p_reset_ids",
    "runtime_top_p_decay": "top_p_decay",
    "random_seed": "random_seed",  # until 0.19
    "seed": "seed",  # since 0.20
    "temperature": "temperature",
    "min_length": "min_length",  # until 0.19
    "min_tokens": "min_tokens",  # since 0.20
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "len_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "beam_search_diversity_rate": "beam_search_diversity_rate",
}
PERF_METRICS = (
    "return_kv_cache_reuse_stats",  # until 0.17
    "return_perf_metrics",  # since 0.19
)
# Maps values of the input guided_decoding_guide_type to members of the executor's enum GuideType.
GUIDE_TYPES = {
    "json": "JSON",
    "json_schema": "JSON_SCHEMA",
    "regex": "REGEX",
    "ebnf_grammar": "EBNF_GRAMMAR",
}
REFUSED = ("context_phase_params", "skip_cross_attn_blocks")


def executor_request(row: RequestRow, *, exclude_input: bool) -> Any:
    """Build the executor's request from one row.

    Args:
        row: the inputs, named as in config.pbtxt.
        exclude_input: True to omit the prompt from the output. The row's own input
            exclude_input_in_output takes precedence.

    Raises:
        ValueError: a tensor is missing, has wrong values or is not supported.
        RuntimeError, TypeError: a constructor of the executor refused a value.
    """
    for name in REFUSED:
        if row.array(name) is not None:
            raise ValueError(f"{name} is not supported by triton_backend: python; leave it out")
    if "input_ids" not in row:
        raise ValueError("A value is required for input_ids")
    ids = row.ids("input_ids")
    if ids is None:
        raise ValueError("Invalid format for input_ids")
    ids = ids[: max(0, row.require("input_lengths"))]
    exclude = row.scalar("exclude_input_in_output")
    return trtllm.Request(
        **drop_unset(
            input_token_ids=ids,
            max_new_tokens=row.require("request_output_len"),  # until 0.19
            max_tokens=row.require("request_output_len"),  # since 0.20
            streaming=bool(row.scalar("streaming")),
            end_id=row.scalar("end_id"),
            pad_id=row.scalar("pad_id"),
            stop_words=_words(row, "stop_words_list"),
            bad_words=_words(row, "bad_words_list"),
            embedding_bias=row.engine_tensor("embedding_bias"),
            encoder_input_features=row.engine_tensor("encoder_input_features"),
            encoder_output_length=row.scalar("encoder_output_lengths"),
            cross_attention_mask=row.engine_tensor("cross_attention_mask"),
            sampling_config=_sampling(row),
            output_config=trtllm.OutputConfig(
                return_log_probs=bool(row.scalar("return_log_probs")),
                return_context_logits=bool(row.scalar("return_context_logits")),
                return_generation_logits=bool(row.scalar("return_generation_logits")),
                return_perf_metrics=any(row.scalar(name) for name in PERF_METRICS),
                exclude_input_from_output=exclude_input if exclude is None else exclude,
            ),
            external_draft_tokens_config=_draft_tokens(row),
            prompt_tuning_config=_prompt_tuning(row, len(ids)),
            mrope_config=_mrope(row),
            lora_config=_lora(row),
            lookahead_config=_lookahead(row),
            kv_cache_retention_config=_retention(row),
            guided_decoding_params=_guide(row),
        )
    )


def _sampling(row: RequestRow) -> Any:
    found = ((keyword, row.scalar(name)) for name, keyword in SAMPLING.items())
    values = {keyword: value for keyword, value in found if value is not None}
    if values.get("top_p", 1) <= 0:
        # Omit top_p if it is 0: clients send 0 for "unset".
        del values["top_p"]
    return trtllm.SamplingConfig(**values)


def _words(row: RequestRow, name: str) -> list[list[int]] | None:
    """Return the words, as lists of token ids, of an input int32 [2, N]; None if it is missing.

    Row 0 has the ids of all words, joined. Row 1 has the end offset of each word in ascending
    order, padded with -1. Raises ValueError for other offsets.
    """
    array = row.array(name)
    if array is None:
        return None
    ids, ends = array.tolist()
    count = ends.index(-1) if -1 in ends else len(ends)
    words = [ids[start:end] for start, end in zip([0, *ends], ends[:count], strict=False)]
    rising = all(words) and all(end <= len(ids) for end in ends)
    if not rising or any(end != -1 for end in ends[count:]):
        raise ValueError("Invalid format for word list.")
    return words


def _draft_tokens(row: RequestRow) -> Any:
    tokens = row.ids("draft_input_ids")
    if tokens is None:
        return None
    return trtllm.ExternalDraftTokensConfig(
        **drop_unset(
            tokens=tokens,
            logits=row.engine_tensor("draft_logits"),
            acceptance_threshold=row.scalar("draft_acceptance_threshold"),
        )
    )


def _prompt_tuning(row: RequestRow, length: int) -> Any:
    table = row.engine_tensor("prompt_embedding_table")
    if table is None:
        return None
    extra = row.ids("prompt_table_extra_ids")
    return trtllm.PromptTuningConfig(
        **drop_unset(embedding_table=table, input_token_extra_ids=extra and extra[:length])
    )


def _mrope(row: RequestRow) -> Any:
    table, deltas = row.engine_tensor("mrope_rotary_cos_sin"), row.scalar("mrope_position_deltas")
    if (table is None) != (deltas is None):
        raise ValueError("mrope_rotary_cos_sin and mrope_position_deltas must be given together")
    if table is None:
        return None
    return trtllm.MropeConfig(mrope_rotary_cos_sin=table, mrope_position_deltas=deltas)


def _lookahead(row: RequestRow) -> Any:
    sizes = [row.scalar(name) for name in LOOKAHEAD]
    if all(size is None for size in sizes):
        return None
    if None in sizes:
        raise ValueError(f"{', '.join(LOOKAHEAD)} must be given together")
    return trtllm.LookaheadDecodingConfig(*sizes)


def _lora(row: RequestRow) -> Any:
    task_id = row.scalar("lora_task_id")
    adapter = drop_unset(
        weights=row.engine_tensor("lora_weights"), config=row.engine_tensor("lora_config")
    )
    if task_id is None:
        if adapter:
            raise ValueError("lora_task_id must be set for LoRA inference")
        return None
    return trtllm.LoraConfig(task_id=task_id, **adapter)


def _guide(row: RequestRow) -> Any:
    """Return the guide of a row; None if the row has none.

    Raises ValueError for an unknown type; upstream v0.19 silently ignores such a guide.
    """
    kind = row.text("guided_decoding_guide_type")
    guide = row.text("guided_decoding_guide")
    if kind is None:
        if guide is not None:
            raise ValueError("guided_decoding_guide_type must be set with guided_decoding_guide")
        return None
    if kind not in GUIDE_TYPES:
        allowed = ", ".join(GUIDE_TYPES)
        raise ValueError(f"guided_decoding_guide_type: found {kind!r}; allowed: {allowed}")
    if kind == "json" and guide:
        raise ValueError("guided_decoding_guide: json takes none; use json_schema")
    params = trtllm.GuidedDecodingParams
    return params(
        **drop_unset(guide_type=getattr(params.GuideType, GUIDE_TYPES[kind]), guide=guide)
    )


def _retention(row: RequestRow) -> Any:
    starts = row.ids("retention_token_range_starts")
    if starts is None:
        return None

    def per_range(name: str) -> list[int]:
        values = row.ids(name)
        if values is None or len(values) != len(starts):
            raise ValueError(
                f"{name} must be provided, and have the same length as retention_token_range_starts"
            )
        return values

    durations = [-1] * len(starts)
    if row.array("retention_token_range_durations_ms") is not None:
        durations = per_range("retention_token_range_durations_ms")
    ranges = [
        trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig(
            token_start=start,
            token_end=None if end == -1 else end,
            priority=priority,
            duration_ms=_duration(milliseconds),
        )
        for start, end, priority, milliseconds in zip(
            starts,
            per_range("retention_token_range_ends"),
            per_range("retention_token_range_priorities"),
            durations,
            strict=True,
        )
    ]
    return trtllm.KvCacheRetentionConfig(
        token_range_retention_configs=ranges,
        **drop_unset(
            decode_retention_priority=row.scalar("retention_decode_priority"),
            decode_duration_ms=_duration(row.scalar("retention_decode_duration_ms")),
        ),
    )


def _duration(milliseconds: int | None) -> timedelta | None:
    """Return the duration as a timedelta. Return None, which means no expiry, for None and -1."""
    if milliseconds is None or milliseconds == -1:
        return None
    return timedelta(milliseconds=milliseconds)
