"""vLLM-Omni: all stages of an any-to-any model behind one server of one machine.

Which parts of a model make a stage is fixed by it: encoders and llm are one (the thinker), diffusion with its
text encoder and VAE another. Executors of a plan become devices, copies and shares of memory of these stages;
a split that it does not have is refused. What a plan does not say stays as its own configuration for the
model has it, sampling of talkers included: so stages are told by `--stage-overrides` and by no file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.core.errors import InputError
from atoll.engines.engine import Engine, ServedModel, ServerCommand, ServerHost

_MEMORY_SHARE = 0.95
"""Of a GPU's memory that stages have together at most."""
_WORK_SHARE = 0.1
"""Of a GPU's memory that a stage without a KV cache has beside its weights, as its own configurations for
GPUs of 80 GB leave it."""
_HINT = "serve it by components (`atoll up --parts FILE`), or plan with `paths` that it has"


@dataclass(frozen=True, slots=True)
class OmniStage:
    """A stage: parts that one process runs, whether it keeps a KV cache, and if several GPUs split it."""

    parts: frozenset[str]
    keeps_tokens: bool = True
    splits: bool = True


_THINKER = OmniStage(frozenset({"vision", "audio", "llm"}))
_TALKER = OmniStage(frozenset({"talker"}))


def _vocoder(part: str) -> OmniStage:
    return OmniStage(frozenset({part}), keeps_tokens=False, splits=False)


STAGES: Mapping[str, tuple[OmniStage, ...]] = {
    "qwen2.5-omni-7b": (_THINKER, _TALKER, _vocoder("vocoder")),
    "qwen3-omni-30b": (_THINKER, _TALKER, _vocoder("code2wav")),
    "qwen-image": (OmniStage(frozenset({"text", "dit", "vae"}), keeps_tokens=False),),
}
"""Stages of models, in its order, by the catalog's names."""


@dataclass(frozen=True, slots=True)
class OmniExecutor:
    """An executor of a plan: its parts, and its GPUs by their numbers on its machine.

    `tp` GPUs split a layer. `memory` is the share of each GPU's memory that is the executor's, `weights` what
    each part's weights take of it.
    """

    id: str
    parts: tuple[str, ...]
    machine: str
    gpus: tuple[int, ...]
    tp: int
    memory: float
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OmniDeployment:
    """Stages as the server is told them, by number; `gpus` are those of the machine that it has to see."""

    machine: str
    gpus: tuple[int, ...]
    stages: Mapping[str, Mapping[str, Any]]


class VllmOmni(Engine):
    """`vllm serve --omni`, for any-to-any services alone: plans of plain ones never have it."""

    name = "vllm-omni"
    title = "vLLM-Omni"
    runs_executors = True
    backend_kind = "vllm"
    program = re.compile(r"vllm-omni")
    # One process answers for all stages, and begins again with each of them.
    resume = "repeat"
    counts = "usage"
    platforms: ClassVar = {"cuda": 8.0, "rocm": 9.4}

    def deploy(self, model: str, executors: Sequence[OmniExecutor]) -> OmniDeployment:
        """Return the stages of a service's executors; InputError where it has no such split."""
        name = model.partition("@")[0]
        stages = STAGES.get(name)
        if stages is None:
            raise _refused(f"{self.title} has no stages of {model}; it has {', '.join(STAGES)}")
        machines = sorted({each.machine for each in executors})
        if len(machines) != 1:
            raise _refused(
                f"its executors stand on {len(machines)} machines ({', '.join(machines)})"
            )
        gpus = tuple(sorted({gpu for each in executors for gpu in each.gpus}))
        told = {
            str(number): self._stage(stage, stages, executors, gpus)
            for number, stage in enumerate(stages)
        }
        return OmniDeployment(machines[0], gpus, told)

    def _stage(
        self,
        stage: OmniStage,
        stages: Sequence[OmniStage],
        executors: Sequence[OmniExecutor],
        gpus: Sequence[int],
    ) -> dict[str, Any]:
        used = {part for each in executors for part in each.parts}
        apart = sorted(part for part in used if "." in part)
        if apart:
            raise _refused(f"{apart[0]} is apart, and {self.title} runs an llm's phases together")
        wanted = stage.parts & used
        those = [each for each in executors if stage.parts & set(each.parts)]
        if not those:
            named = "+".join(sorted(stage.parts))
            raise _refused(f"no executor runs {named}, and {self.title} starts all of a model")
        for each in those:
            if not wanted <= set(each.parts):
                left = sorted(wanted - set(each.parts))
                raise _refused(
                    f"{each.id} runs {'+'.join(each.parts)} without {left[0]}, which {self.title} has in"
                    " the same stage"
                )
        tensor = {each.tp for each in those}
        if len(tensor) > 1 or any(len(each.gpus) != each.tp for each in those):
            raise _refused(f"copies of {'+'.join(sorted(wanted))} have unlike numbers of GPUs")
        if not stage.splits and tensor != {1}:
            raise _refused(f"{those[0].id} has {those[0].tp} GPUs, and {self.title} runs it on one")
        devices = [gpus.index(gpu) for each in those for gpu in each.gpus]
        if len(set(devices)) != len(devices):
            raise _refused(f"two copies of {'+'.join(sorted(wanted))} share a GPU")
        return {
            "devices": ",".join(map(str, devices)),
            "num_replicas": len(those),
            "tensor_parallel_size": those[0].tp,
            "gpu_memory_utilization": min(_memory(stage, stages, each) for each in those),
        }

    def serve(
        self, deployment: OmniDeployment, served: ServedModel, host: ServerHost
    ) -> ServerCommand:
        """Return the command of a server, which is to see `deployment.gpus` of its machine."""
        arguments = (
            *("vllm", "serve", served.repository[0], *served.revision_words(), "--omni"),
            *("--host", "127.0.0.1", "--port", host.port),
            *("--served-model-name", *served.names),
            *("--stage-overrides", json.dumps(deployment.stages, separators=(",", ":"))),
        )
        shown = ",".join(map(str, deployment.gpus))
        return ServerCommand(arguments, {"CUDA_VISIBLE_DEVICES": shown})


def _memory(stage: OmniStage, stages: Sequence[OmniStage], executor: OmniExecutor) -> float:
    """Return the share of its GPUs' memory that a stage of an executor has.

    Stages with KV caches divide, by their weights, what the weights of all and the work of others leave.
    """
    beside = [each for each in stages if each.parts & set(executor.parts)]

    def weights(each: OmniStage) -> float:
        return sum(executor.weights[part] for part in sorted(each.parts & set(executor.parts)))

    fixed = {each: weights(each) + _WORK_SHARE * (not each.keeps_tokens) for each in beside}
    left = min(executor.memory, _MEMORY_SHARE) - sum(fixed.values())
    if left <= 0.0:
        raise _refused(
            f"{executor.id} has {executor.memory:.2f} of its GPUs' memory, and its stages take"
            f" {sum(fixed.values()):.2f} before any KV cache"
        )
    sharing = [each for each in beside if each.keeps_tokens] or beside
    more = left * weights(stage) / sum(map(weights, sharing)) if stage in sharing else 0.0
    # Rounded down: together they must not be more than there is.
    return int(1000 * (fixed[stage] + more)) / 1000


def _refused(why: str) -> InputError:
    return InputError(why, field="executors", hint=_HINT)


ENGINE = VllmOmni()
