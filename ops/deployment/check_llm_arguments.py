"""Rules that check the arguments of TensorRT-LLM's `LLM` class in an llmapi model's model.yaml."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from adapters.adapter import MODULE_IDS
from adapters.errors import AdapterError
from adapters.model_files import is_incomplete, tokenizer_problems, weight_problems
from adapters.modules import FAMILIES
from adapters.peft import read
from ops.deployment.check_findings import Finding, Severity
from ops.deployment.check_repository import LocalFolders, RepositoryModel
from ops.deployment.check_serving import has_chat_template
from ops.deployment.llmapi_yaml import LlmapiYaml

# Defaults of the LLM API, for values that are not in model.yaml.
MAX_NUM_TOKENS = 8192
MAX_LORA_RANK = 64
TOKENS_PER_BLOCK = 32
_LORA = "lora_config"
_Make = Callable[[Severity, str, str, str], Finding]
_LORA_INPUTS = ("lora_id", "lora_name", "lora_path")
_PEFT_NAMES = frozenset(
    path.rpartition(".")[2] for family in FAMILIES.values() for path in family.projections
)


def llm_findings(
    model: RepositoryModel, yaml: LlmapiYaml, places: LocalFolders, adapters: Sequence[Path]
) -> Iterator[Finding]:
    """Yield all findings on the arguments of `LLM` in a model.yaml.

    `adapters` are the PEFT folders that the model must be able to serve.
    """

    def finding(severity: Severity, field: str, problem: str, fix: str) -> Finding:
        where = yaml.at(*field.split("."))
        return Finding(severity, model.name, field, f"{where}: {problem}", fix)

    rules = _Arguments(model, yaml, finding)
    yield from rules.checkpoint(places)
    yield from rules.lengths()
    yield from rules.without_effect()
    yield from rules.lora(wanted=bool(adapters))
    if yaml.get(_LORA) is not None:
        for adapter in adapters:
            yield from rules.adapter(adapter)


class _Arguments:
    def __init__(self, model: RepositoryModel, yaml: LlmapiYaml, finding: _Make) -> None:
        self._model = model
        self._yaml = yaml
        self._finding = finding

    def checkpoint(self, places: LocalFolders) -> Iterator[Finding]:
        found = self._yaml.get("model")
        if not isinstance(found, str) or not found:
            yield self._finding(
                "error",
                "model",
                f"found {found!r}: LLM needs it, and the model does not load",
                "write the Hugging Face folder as Triton sees it, or a model's name there",
            )
            return
        if not found.startswith((".", "/", "~")) and not Path(found).exists():
            yield self._finding(
                "note",
                "model",
                f"found {found}, no path: each machine fetches it from Hugging Face at its first "
                "start, in the version of that day",
                "write the folder of a download; the gateway needs its tokenizer anyway",
            )
            return
        if not found.startswith("/"):
            yield self._finding(
                "warning",
                "model",
                f"found {found}: it counts from the folder that Triton is started in",
                "write an absolute path",
            )
        here = places.tokenizer_dir or Path(found)
        if not (here / "config.json").is_file():
            yield self._finding(
                "error",
                "model",
                f"{here} holds no config.json: the model does not load",
                "correct it; if it is right where Triton runs, give --tokenizer-dir here",
            )
            return
        problems = tokenizer_problems(here)
        if is_incomplete(here):
            problems += weight_problems(here)
        for problem in problems:
            found = f"{problem.found}: the model does not load"
            yield self._finding("error", "model", found, problem.fix)
        if not has_chat_template(here):
            yield self._finding(
                "note",
                "model",
                f"{here} has no chat template: /v1/chat/completions cannot be served, "
                "only /v1/completions",
                "use the folder of the chat model, or add chat_template.jinja to it",
            )

    def lengths(self) -> Iterator[Finding]:
        yaml = self._yaml
        longest = yaml.count("max_seq_len")
        if longest is None:
            yield self._finding(
                "note",
                "max_seq_len",
                "not set: the engine takes the checkpoint's limit, which no tensor reports, and "
                "the gateway does not start without it",
                "write max_seq_len: N, and set GATEWAY_MAX_SEQ_LEN=N for the gateway",
            )
            return
        step = yaml.count("max_num_tokens") or MAX_NUM_TOKENS
        if step < longest and not yaml.get("enable_chunked_prefill"):
            yield self._finding(
                "warning",
                "max_num_tokens",
                f"{step} tokens in a step, and max_seq_len {longest}: a longer prompt than that "
                'fails with "should not exceed max_num_tokens"',
                "write enable_chunked_prefill: true, or a max_num_tokens of max_seq_len",
            )

    def without_effect(self) -> Iterator[Finding]:
        yaml = self._yaml
        if yaml.get("guided_decoding_backend") is not None:
            yield self._finding(
                "note",
                "guided_decoding_backend",
                "the model has no input for a schema or a grammar: it is never used",
                "remove it; the gateway refuses response_format and forced tools by name",
            )
        blocks = yaml.count("kv_cache_config", "tokens_per_block")
        if blocks not in (None, TOKENS_PER_BLOCK):
            yield self._finding(
                "note",
                "kv_cache_config.tokens_per_block",
                f"found {blocks}: no tensor reports it, and the gateway counts cached tokens with "
                f"{TOKENS_PER_BLOCK}",
                f"set GATEWAY_TOKENS_PER_BLOCK={blocks} for the gateway",
            )

    def lora(self, *, wanted: bool) -> Iterator[Finding]:
        assert self._model.file is not None
        yaml, takes = self._yaml, set(_LORA_INPUTS) <= self._model.file.inputs.keys()
        if yaml.get(_LORA) is None:
            if wanted or takes:
                yield self._finding(
                    "error" if wanted else "note",
                    _LORA,
                    "not set: every request with an adapter fails",
                    f"write {_LORA}: {{lora_target_modules: [attn_q, attn_k, attn_v], "
                    "max_lora_rank: 16, max_loras: 8, max_cpu_loras: 32}",
                )
            return
        if not takes:
            yield self._finding(
                "error" if wanted else "warning",
                _LORA,
                f"config.pbtxt has no input {', '.join(_LORA_INPUTS)}: no adapter can be asked for",
                "take config.pbtxt and model.py from a release since 1.3, or remove it",
            )
        yield from self._check_lora_modules()
        on_gpu, on_host = (yaml.count(_LORA, name) for name in ("max_loras", "max_cpu_loras"))
        if on_gpu is not None and on_host is not None and on_host < on_gpu:
            yield self._finding(
                "warning",
                f"{_LORA}.max_cpu_loras",
                f"found {on_host}, below max_loras, {on_gpu}: the host's cache bounds the GPU's",
                f"write at least {on_gpu}",
            )

    def _check_lora_modules(self) -> Iterator[Finding]:
        field = f"{_LORA}.lora_target_modules"
        found = self._yaml.get(_LORA, "lora_target_modules")
        if not found and not self._yaml.get(_LORA, "lora_dir"):
            yield self._finding(
                "warning",
                field,
                "not set: the engine does not know which modules adapters will change",
                "write the list, such as [attn_q, attn_k, attn_v]",
            )
        unknown = set(map(str, found)) - MODULE_IDS.keys() if found else set()
        if of_peft := sorted(unknown & _PEFT_NAMES):
            yield self._finding(
                "error",
                field,
                f"found {', '.join(of_peft)}: TensorRT-LLM has its own names for modules",
                f"allowed: {', '.join(MODULE_IDS)}; q_proj of PEFT is attn_q",
            )
        if later := sorted(unknown - _PEFT_NAMES):
            yield self._finding(
                "warning",
                field,
                f"found {', '.join(later)}, which the gateway does not know: it refuses adapters "
                "with such modules and takes all others",
                f"keep what your TensorRT-LLM knows; the gateway knows {', '.join(MODULE_IDS)}",
            )

    def adapter(self, folder: Path) -> Iterator[Finding]:
        try:
            settings = read(folder).settings
        except AdapterError as error:
            yield Finding(
                "error",
                self._model.name,
                str(folder),
                f"{error}: requests with this adapter fail",
                "mend it, or leave it out",
            )
            return
        # Compare the largest rank of the adapter's modules with the limit, because TensorRT-LLM
        # allocates the memory of all modules for this rank.
        rank = max(settings.r, *(rank for _, rank in settings.rank_pattern), 0)
        limit = self._yaml.count(_LORA, "max_lora_rank") or MAX_LORA_RANK
        if rank > limit:
            yield self._finding(
                "error",
                f"{_LORA}.max_lora_rank",
                f"found {limit}, but {folder} has rank {rank}: its first request fails",
                f"write max_lora_rank: {rank}",
            )
