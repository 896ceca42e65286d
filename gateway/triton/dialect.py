"""What the served `tensorrt_llm` model is: tensor names, limits and modes, read from the server.

Names changed between releases of the repository, so they are looked up in ModelConfig rather
than assumed; limits come from the engine's config.json where its folder can be seen.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2

from adapters.adapter import Dtype
from gateway.errors import EngineUnavailable

_KV_STATS = ("return_kv_cache_reuse_stats", "return_perf_metrics")
_DEFAULT_BLOCK = 64
_DEFAULT_LORA_HOST_BYTES = 1024**3
_LORA_DTYPES: dict[int, Dtype] = {
    model_config_pb2.TYPE_FP16: "float16",
    model_config_pb2.TYPE_BF16: "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """Facts about one core model; `seed` and `min_tokens` are names of tensors.

    `max_seq_len` and `max_input_len` are in tokens. `engine_dir` is the folder as Triton sees it.
    `lora_dtype` is the declared type of `lora_weights`, None where the model takes none;
    `lora_host_bytes` is the size of its cache. `guided` says whether guided decoding is set up.
    `vocab_size` is that of the logits; `generation_logits` and `context_logits` say whether they
    can be had.
    `kv_stats` is the input that asks for KV-cache statistics, in blocks of `tokens_per_block`;
    `fingerprint` changes with the model's configuration.
    """

    model: str
    seed: str
    min_tokens: str
    max_seq_len: int
    max_input_len: int | None
    engine_dir: Path
    lora_dtype: Dtype | None
    lora_host_bytes: int
    guided: bool
    max_beam_width: int
    generation_logits: bool
    context_logits: bool
    kv_stats: str | None
    tokens_per_block: int
    fingerprint: str
    vocab_size: int


def read_dialect(model: str, config: Any, *, max_seq_len: int | None, vocab_size: int) -> Dialect:
    """Builds the dialect from an `inference.ModelConfig`.

    `max_seq_len` and `vocab_size` stand in where the engine's config.json is out of sight.

    Raises EngineUnavailable when the model cannot be driven: not decoupled, unknown seed tensor,
    or a length limit found neither in the engine's config.json nor in the settings.
    """
    inputs = {tensor.name for tensor in config.input}
    seed = next((name for name in ("random_seed", "seed") if name in inputs), None)
    if seed is None or "input_ids" not in inputs:
        raise EngineUnavailable(f"Triton model {model!r} has no input_ids or random_seed input.")
    if not config.model_transaction_policy.decoupled:
        raise EngineUnavailable(
            f"Triton model {model!r} must be rendered with decoupled_mode:true."
        )
    engine_dir = Path(_parameter(config, "gpt_model_path"))
    engine = _engine_config(engine_dir)
    # v0.5 to v0.7 engines have `builder_config` in place of `build_config`.
    build = _section(engine, "build_config") or _section(engine, "builder_config")
    plugins = _section(build, "plugin_config")
    digest = hashlib.sha256(config.SerializeToString(deterministic=True))
    digest.update(json.dumps(engine, sort_keys=True).encode())
    shapes = _section(engine, "pretrained_config") or build
    limit = _first_int(build.get("max_seq_len"), _old_max_seq_len(build), max_seq_len)
    if limit is None:
        raise EngineUnavailable(
            "The engine's length limit is unknown: its config.json is out of sight, so set "
            "GATEWAY_MAX_SEQ_LEN."
        )
    host_bytes = _parameter(config, "lora_cache_host_memory_bytes")
    return Dialect(
        model=model,
        seed=seed,
        min_tokens="min_tokens" if "min_tokens" in inputs else "min_length",
        max_seq_len=limit,
        max_input_len=_first_int(build.get("max_input_len")),
        engine_dir=engine_dir,
        lora_dtype=_lora_dtype(config),
        guided="guided_decoding_guide_type" in inputs
        and bool(_parameter(config, "guided_decoding_backend")),
        max_beam_width=_beam_width(config, build),
        context_logits=build.get("gather_context_logits") is True,
        generation_logits=build.get("gather_generation_logits") is True,
        kv_stats=next((name for name in _KV_STATS if name in inputs), None),
        tokens_per_block=_first_int(plugins.get("tokens_per_block")) or _DEFAULT_BLOCK,
        fingerprint=f"fp_{digest.hexdigest()[:12]}",
        vocab_size=_first_int(shapes.get("vocab_size")) or vocab_size,
        lora_host_bytes=int(host_bytes) if host_bytes.isdecimal() else _DEFAULT_LORA_HOST_BYTES,
    )


def _parameter(config: Any, name: str) -> str:
    """A string parameter of the model; both backends take an unfilled `${...}` as unset."""
    value = config.parameters[name].string_value if name in config.parameters else ""
    return "" if value.startswith("${") else str(value)


def _beam_width(config: Any, build: dict[str, Any]) -> int:
    """The smaller of the engine's limit and the model's; 1 unless both allow more."""
    allowed = _parameter(config, "max_beam_width")
    model = int(allowed) if allowed.isdecimal() else 1
    return min(model, _first_int(build.get("max_beam_width")) or model)


def _lora_dtype(config: Any) -> Dtype | None:
    for tensor in config.input:
        if tensor.name == "lora_weights":
            return _LORA_DTYPES.get(tensor.data_type)
    return None


def _engine_config(engine_dir: Path) -> dict[str, Any]:
    """config.json of the engine, {} when the folder is on another host or has none."""
    try:
        data = json.loads((engine_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _old_max_seq_len(build: dict[str, Any]) -> int | None:
    """Engines before v0.11 limit input and output apart."""
    parts = (build.get("max_input_len"), build.get("max_output_len"))
    return sum(parts) if all(isinstance(part, int) for part in parts) else None  # type: ignore[arg-type]


def _first_int(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int)), None)
