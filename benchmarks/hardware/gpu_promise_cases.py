"""What is served for `benchmarks.gpu_promise`: fleets of one GPU, and models without weights to download.

A model is its shapes and a tokenizer of made-up words: engines fill the weights with random numbers, which
takes as long to compute with as the real ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulation.streaming import draw_prompt

SHARES = (0.5, 0.8, 1.0)
"""Rates of a case's runs, as shares of the planned one."""
SECONDS = 90.0
SERVICE = "chat"
SYSTEM_TOKENS = 1024
"""Length of a system prompt: two blocks as traces count them."""


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet of one service on one GPU, and how its engine is told what its folder of weights does not say.

    `rate_per_s` is the planned rate. Cases with the same `server` load one server, one after the other.
    Every prompt of a case with `systems` begins with one of so many system prompts (`system`). Its GPU is
    offered in `shares`, which as many servers have; `apart`: one runs prefill, the other decode. `runs` names
    the files of what was served, where there is not just one of its own. `port` is its gateway's.
    """

    name: str
    model: str
    ttft_ms: int
    tpot_ms: int
    rate_per_s: float
    lengths: str
    server: str
    options: tuple[str, ...] = ()
    node: str = "H200:1"
    engine: str = "vllm"
    systems: int = 0
    shares: int = 1
    apart: bool = False
    runs: tuple[str, ...] = ()
    port: int = 18080

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files of what was served: one for each server that it was loaded on."""
        return self.runs or (f"gpu_promise_{self.name}",)

    def share(self, row: Mapping[str, str]) -> float | None:
        """Return the share of the planned rate of a served row's run; None: it was no such run."""
        if "share" in row:
            return float(row["share"])
        # Files of `benchmarks.gpu_engine` name a rate, or that there were more requests than fit.
        return float(row["load"]) / self.rate_per_s if row["load"][0].isdigit() else None

    def system(self, request: int) -> int | None:
        """Return the number of the system prompt of a run's so-many-th request, if it has one."""
        return 7 * request % self.systems if self.systems else None

    def begin(self, request: int) -> Sequence[int]:
        """Return the tokens that the prompt of a run's so-many-th request begins with."""
        number = self.system(request)
        return () if number is None else draw_prompt(number, SYSTEM_TOKENS)

    @property
    def fleet(self) -> str:
        """The fleet file."""
        service = {
            "model": self.model,
            "ttft": f"{self.ttft_ms}ms",
            "tpot": f"{self.tpot_ms}ms",
            "rate": f"{self.rate_per_s:g}/s",
            "lengths": self.lengths,
        }
        if self.apart:
            service["phases"] = "apart"
        machines = 1 if self.shares == 1 else {"count": 1, "shares": self.shares}
        whole = {
            "services": {SERVICE: service},
            "pool": {"owned": {"local": {self.node: machines}}},
            "settings": {"engines": [self.engine]},
        }
        return json.dumps(whole, indent=1)  # JSON is YAML


_HALF = ("--gpu-memory-utilization", "0.45", "--kv-cache-memory-bytes", "26000000000")
CASES = {
    case.name: case
    for case in (
        Case("8b-short", "llama-3.1-8b", 500, 20, 16.0, "azure-conv", "8b"),
        Case("8b-long", "llama-3.1-8b", 2000, 40, 5.0, "4096x256", "8b"),
        Case(
            *("8b-fp8", "llama-3.1-8b@fp8", 500, 20, 20.0, "azure-conv", "8b-fp8"),
            options=("--quantization", "fp8"),
        ),
        Case(
            *("8b-atoll", "llama-3.1-8b", 500, 20, 16.0, "azure-conv", "8b-atoll"),
            engine="atoll",
            runs=("gpu_engine_atoll",),
        ),
        Case(
            *("moe", "qwen3-30b-a3b", 800, 30, 10.0, "azure-conv", "moe"),
            runs=("gpu_promise_moe", "gpu_promise_moe-again"),
        ),
        Case("3b-prefix", "llama-3.2-3b", 300, 12, 30.0, "azure-conv", "3b", systems=8),
        Case("3b-shared", "llama-3.2-3b", 500, 20, 30.0, "azure-conv", "3b-shared", shares=2),
        Case(
            *("3b-pair", "llama-3.2-3b", 3000, 30, 2.0, "azure-conv", "3b-pair"),
            shares=2,
            apart=True,
        ),
        # Two servers at a time, of which one is loaded: nothing is fitted on either but its own profile.
        Case(*("14b", "qwen3-14b", 800, 30, 8.0, "azure-conv", "14b"), options=_HALF),
        Case(
            *("14b-int4", "qwen3-14b@int4", 800, 25, 9.0, "azure-conv", "14b-int4"),
            options=_HALF,
            port=18081,
        ),
    )
}

_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_QUANTIZED = {
    # As in the published checkpoint: groups of 128 with zeros, run by Marlin's kernels.
    "int4": {
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
        "torch_dtype": "float16",
    }
}
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    # As many layers, so that plans for the one serve the other, and as many tokens as prompts are drawn from.
    "tiny": {
        **_LLAMA,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "vocab_size": 40960,
        "tie_word_embeddings": False,
    },
    "llama-3.2-3b": {
        **_LLAMA,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": {
        **_LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    "qwen3-30b-a3b": {
        **_LLAMA,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    },
}


def write_model(model: str, folder: Path) -> None:
    """Write what an engine needs to serve a model of random weights: its shapes, and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from atoll.runtime.local.load_probes import WORDS

    name, _, weights = model.partition("@")
    config = {**_CONFIGS[name], **_QUANTIZED.get(weights, {})}
    folder.mkdir(parents=True, exist_ok=True)
    # Parsers of thoughts and of tool calls look their marks up in the tokenizer.
    marks = ("w0", "w1", "w2", "<think>", "</think>", "<tool_call>", "</tool_call>")
    # Words that probes are made of are tokens of their own, or all prompts would be alike.
    named = (*marks, *WORDS.split()) if config["vocab_size"] > 1000 else marks
    words = {f"w{at}": at for at in range(len(named), config["vocab_size"])}
    words |= {word: at for at, word in enumerate(named)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "w0",
        "eos_token": "w1",
        "unk_token": "w2",
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "config.json").write_text(json.dumps(config))


def write_weights(folder: Path) -> int:
    """Write random weights of a Llama's shapes, a file for every layer; return their bytes."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    wide, inner = config["hidden_size"], config["intermediate_size"]
    head = wide // config["num_attention_heads"]
    kv = head * config["num_key_value_heads"]
    outer = {
        "model.embed_tokens.weight": (config["vocab_size"], wide),
        "model.norm.weight": (wide,),
        "lm_head.weight": (config["vocab_size"], wide),
    }
    layer = {
        "self_attn.q_proj": (wide, wide),
        "self_attn.k_proj": (kv, wide),
        "self_attn.v_proj": (kv, wide),
        "self_attn.o_proj": (wide, wide),
        "mlp.gate_proj": (inner, wide),
        "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
        "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
    }
    parts: list[dict[str, tuple[int, ...]]] = [outer]
    parts += (
        {f"model.layers.{at}.{name}.weight": shape for name, shape in layer.items()}
        for at in range(config["num_hidden_layers"])
    )
    # The same numbers again and again: what they are does not matter, drawing them all takes minutes.
    noise = (0.02 * torch.randn(1 << 24)).to(torch.bfloat16)

    def fill(shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        return noise.repeat(-(-size // len(noise)))[:size].reshape(shape).contiguous()

    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        index |= dict.fromkeys(part, name)
        if not (folder / name).exists():
            tensors = {each: fill(shape) for each, shape in part.items()}
            save_file(tensors, folder / name, {"format": "pt"})
    whole = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
