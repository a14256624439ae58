"""Turns a GGUF file into a model folder: safetensors, config.json, tokenizer. Done once, then kept.

Only the Llama family is converted (the layout of SmolLM2, Llama and Mistral files); its query and
key rows are stored in another order than transformers wants and are put back.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.engine.engine_errors import WeightsError
from atoll.engine.weights.reader import INDEX, SINGLE, Progress

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# Whether a tokenizer family cuts digits apart one by one before byte-pair merging.
_SPLITS_DIGITS = {"smollm": True, "gpt-2": False, "default": False}
_CONTROL = 3


def convert_gguf(source: Path, target: Path, progress: Progress | None = None) -> Path:
    """Write the model of `source` into the folder `target` in one step and return the folder.

    Weights are dequantised to float32, so that every stage and every layout reads the same bits.
    """
    # The folder appears with everything in it, so this file shows that it is whole.
    if (target / "config.json").is_file():
        return target
    reader = _open(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise WeightsError(
            f"GGUF files of the architecture {fields.get('general.architecture')!r} are not converted",
            path=source,
            hint="use the model's safetensors folder",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that renaming works: both are on one file system.
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        names = _write_weights(reader, fields, work, source, progress)
        (work / "config.json").write_text(json.dumps(_config(fields, names), indent=2))
        _write_tokenizer(fields, work, source)
        try:
            os.replace(work, target)
        except OSError:
            # Someone else finished first; theirs is as good.
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _open(source: Path) -> Any:
    import gguf

    try:
        return gguf.GGUFReader(source)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise WeightsError(
            f"not a readable GGUF file: {error}", path=source, hint="download it again"
        ) from error


def _tensors(
    reader: Any, fields: dict[str, Any], source: Path, progress: Progress | None
) -> Iterator[tuple[str, Any]]:
    import gguf

    total = len(reader.tensors)
    heads = int(fields["llama.attention.head_count"])
    kv_heads = int(fields.get("llama.attention.head_count_kv", heads))
    for number, tensor in enumerate(reader.tensors, 1):
        name = tensor_name(tensor.name, source)
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (ValueError, NotImplementedError, KeyError) as error:
            raise WeightsError(
                f"the tensor {tensor.name!r} cannot be read: {error}", path=source
            ) from error
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, heads)
        elif name.endswith("k_proj.weight"):
            values = _unpermute(values, kv_heads)
        yield name, values
        if progress is not None:
            progress(number, total, name)


def _unpermute(values: Any, heads: int) -> Any:
    """Undo the pairing of rotary halves: rows of a head go from (d/2, 2) to (2, d/2) order."""
    rows, columns = values.shape
    return (
        values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def tensor_name(gguf_name: str, source: Path) -> str:
    """Return what transformers calls a tensor of a GGUF file; `source` is named in the error."""
    parts = gguf_name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise WeightsError(f"the tensor {gguf_name!r} has no place in a Llama model", path=source)


def _write_weights(
    reader: Any, fields: dict[str, Any], folder: Path, source: Path, progress: Progress | None
) -> set[str]:
    import numpy as np
    from safetensors.numpy import save_file

    tensors = {
        name: np.ascontiguousarray(values, dtype=np.float32)
        for name, values in _tensors(reader, fields, source, progress)
    }
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    total = sum(values.nbytes for values in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(tensors, SINGLE)}
    (folder / INDEX).write_text(json.dumps(index))
    return set(tensors)


def _config(fields: dict[str, Any], names: set[str]) -> dict[str, object]:
    heads = int(fields["llama.attention.head_count"])
    width = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        # Without a head of its own the model uses its embeddings.
        "tie_word_embeddings": "lm_head.weight" not in names,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _write_tokenizer(fields: dict[str, Any], folder: Path, source: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    family = str(fields.get("tokenizer.ggml.pre", "default"))
    if fields.get("tokenizer.ggml.model") != "gpt2" or family not in _SPLITS_DIGITS:
        raise WeightsError(
            f"GGUF tokenizers of the kind {fields.get('tokenizer.ggml.model')}/{family} are not "
            "converted",
            path=source,
            hint="use the model's safetensors folder",
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if _SPLITS_DIGITS[family]
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        f"{role}_token": tokens[int(fields[key])]
        for role, key in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
            ("unk", "tokenizer.ggml.unknown_token_id"),
        )
        if key in fields
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "chat_template": fields.get("tokenizer.chat_template"),
        "model_max_length": int(fields["llama.context_length"]),
        **named,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
