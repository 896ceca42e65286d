"""Rules that check `triton_config` in an llmapi model's model.yaml against its config.pbtxt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.triton.pbtxt import ModelFile
from ops.deployment.check_findings import Finding, Severity
from ops.deployment.check_repository import RepositoryModel
from ops.deployment.llmapi_yaml import TRITON_CONFIG, LlmapiYaml

_DECOUPLED = "model_transaction_policy { decoupled: true }"
# Longest cancellation_check_period_ms without a warning. The engine may continue an answer for this
# time after the client has disconnected.
_MAX_PERIOD_MS = 1000


def triton_config_findings(
    model: RepositoryModel, config: ModelFile, yaml: LlmapiYaml
) -> Iterator[Finding]:
    yield from _Rules(model, config, yaml).findings()


@dataclass(frozen=True, slots=True)
class _Rules:
    model: RepositoryModel
    config: ModelFile
    yaml: LlmapiYaml

    def finding(self, severity: Severity, field: str, problem: str, fix: str) -> Finding:
        return Finding(severity, self.model.name, field, problem, fix)

    def findings(self) -> Iterator[Finding]:
        yield from self._check_own_keys()
        yield from self._check_decoupled()
        yield from self._check_period()
        yield from self._check_images()
        yield from self._check_instances()

    def _check_own_keys(self) -> Iterator[Finding]:
        for name, value in (("max_batch_size", "0"), ("decoupled", "true")):
            if not self.yaml.has(TRITON_CONFIG, name):
                yield self.finding(
                    "error",
                    f"{TRITON_CONFIG}.{name}",
                    f"{self.yaml.at(TRITON_CONFIG, name)}: not there: model.py stops with KeyError",
                    f"write {name}: {value} below {TRITON_CONFIG}:",
                )
        found = self.yaml.get(TRITON_CONFIG, "max_batch_size")
        if found not in (None, 0):
            yield self.finding(
                "error",
                f"{TRITON_CONFIG}.max_batch_size",
                f"{self.yaml.at(TRITON_CONFIG, 'max_batch_size')}: found {found!r}: model.py knows "
                "no batches of Triton's; the engine batches by itself",
                "write max_batch_size: 0 there; the engine's own is the one at the top of the file",
            )

    def _check_decoupled(self) -> Iterator[Finding]:
        if not self.yaml.has(TRITON_CONFIG, "decoupled"):
            return
        found, keys = self.yaml.get(TRITON_CONFIG, "decoupled"), (TRITON_CONFIG, "decoupled")
        where = self.yaml.at(*keys)
        if not isinstance(found, bool):
            yield self.finding(
                "error",
                ".".join(keys),
                f"{where}: found {found!r}: neither true nor false",
                "write decoupled: true to stream",
            )
        elif found and not self.config.decoupled:
            yield self.finding(
                "error",
                "model_transaction_policy",
                f"config.pbtxt does not say decoupled, and {where} does: launchers start Triton "
                "with --disable-auto-complete-config, so that it reads config.pbtxt alone, and "
                "every streaming request fails, or is never answered",
                f"write {_DECOUPLED} into config.pbtxt",
            )
        elif self.config.decoupled and not found:
            yield self.finding(
                "error",
                ".".join(keys),
                f"{where}: false, but config.pbtxt says decoupled: upstream's model.py goes by "
                'this, and streaming requests fail with "Streaming is only supported in decoupled '
                'mode"; without --disable-auto-complete-config the model does not load',
                "write decoupled: true here, too",
            )
        elif not found:
            yield self.finding(
                "warning",
                "model_transaction_policy",
                "not decoupled: every streaming request fails with "
                '"Streaming is only supported in decoupled mode"',
                f"to stream, write {_DECOUPLED} into config.pbtxt, and decoupled: true below "
                f"{TRITON_CONFIG}: in {self.yaml.path.name}",
            )

    def _check_period(self) -> Iterator[Finding]:
        keys = (TRITON_CONFIG, "cancellation_check_period_ms")
        if not self.yaml.has(*keys):
            return
        found = self.yaml.count(*keys)
        if found is None or found < 1:
            yield self.finding(
                "error",
                ".".join(keys),
                f"{self.yaml.at(*keys)}: found {self.yaml.get(*keys)!r}: not a number of "
                "milliseconds above 0",
                "write 100, or leave it out",
            )
        elif found > _MAX_PERIOD_MS:
            yield self.finding(
                "warning",
                ".".join(keys),
                f"{self.yaml.at(*keys)}: found {found}: for so long the engine continues an "
                "answer whose client has left",
                "write 100, or leave it out",
            )

    def _check_images(self) -> Iterator[Finding]:
        keys = (TRITON_CONFIG, "multimodal")
        if self.yaml.get(*keys):
            yield self.finding(
                "warning",
                ".".join(keys),
                f"{self.yaml.at(*keys)}: true: everybody who reaches Triton can have it fetch any "
                "http(s) address that it can reach, those inside your network included",
                "let only the gateway reach Triton's ports, or write false",
            )
        elif "image_url" in self.config.inputs and not self.yaml.is_ours:
            yield self.finding(
                "note",
                "image_url",
                "multimodal is false: clients of Triton itself that send images get an answer to "
                "the text alone, without an error",
                "write multimodal: true for a model that takes images, or remove the input",
            )

    def _check_instances(self) -> Iterator[Finding]:
        count, given = self.config.instance_count, self.model.parameter("gpu_device_ids")
        if count <= 1:
            if given:
                yield self.finding(
                    "warning",
                    "gpu_device_ids",
                    f"found {given} with one instance: it is not looked at",
                    "remove it and set CUDA_VISIBLE_DEVICES for Triton, or set count to the "
                    "number of its lists",
                )
            return
        if self.yaml.is_ours:
            yield self.finding(
                "error",
                "instance_group",
                f"found {count} instances; this project's model.py allows 1, and does not load",
                "write count: 1, and start one Triton for each engine",
            )
            return
        lists = [[gpu.strip() for gpu in part.split(",")] for part in given.split(";")]
        gpus = [gpu for part in lists for gpu in part]
        world = self.yaml.world_size
        problem = ""
        if not given:
            problem = "no gpu_device_ids: all instances load their engine onto the same GPUs"
        elif len(lists) != count:
            problem = f"{len(lists)} lists in gpu_device_ids: one is needed for each instance"
        elif not all(gpu.isdecimal() for gpu in gpus) or len(set(gpus)) != len(gpus):
            problem = f"gpu_device_ids {given}: allowed: numbers of GPUs, each once"
        elif any(len(part) != world for part in lists):
            problem = (
                f"gpu_device_ids {given}, but {self.yaml.path.name} says {world} GPUs for each "
                "engine (tensor_parallel_size times pipeline_parallel_size)"
            )
        if problem:
            right = ";".join(
                ",".join(map(str, range(first, first + world)))
                for first in range(0, count * world, world)
            )
            yield self.finding(
                "error",
                "gpu_device_ids",
                f"{count} instances and {problem}",
                'write parameters { key: "gpu_device_ids" value { string_value: "'
                f'{right}" }} }} into config.pbtxt, or count: 1',
            )
        yield self.finding(
            "note",
            "instance_group",
            f"{count} instances: they start processes of their own, which fails below mpirun",
            "start Triton without MPI: gateway triton launch, or --no-mpi of "
            "launch_triton_server.py",
        )
