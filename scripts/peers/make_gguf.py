"""Write a Llama-like Hugging Face folder as GGUF, for llama.cpp's server.

Usage: python scripts/peers/make_gguf.py [MODEL_FOLDER [OUTPUT_FOLDER]]

The output folder gets f32.gguf, bf16.gguf and f16.gguf, of the same weights; vectors stay
f32, as llama.cpp's own converter leaves them. The comparison sends token ids, so the
tokenizer is only carried along to satisfy the loader. Covers models of "llama" type with
a byte-level BPE tokenizer and rotary positions without scaling, such as the default one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

MODEL = Path("~/.cache/octavo/models/smollm2-135m-instruct")
OUTPUT = Path("~/.cache/octavo/gguf")

TYPES = {
    "f32": (torch.float32, gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bf16": (torch.bfloat16, gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16": (torch.float16, gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}


def write(model: Path, path: Path, kind: str) -> None:
    """Write one file."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or (config.get("rope_scaling") or {}).get("factor"):
        sys.exit(f"{model}: only models of type llama without scaled positions")
    dtype, quantization, file_type = TYPES[kind]
    writer = gguf.GGUFWriter(path, "llama")
    add_config(writer, config, model.name)
    writer.add_file_type(file_type)
    add_tokenizer(writer, model, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None:
            sys.exit(f"{model}: no place in GGUF for the tensor {name!r}")
        add_tensor(writer, target, permuted(tensor, name, config), dtype, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any], name: str) -> None:
    """Write the model's shape."""
    num_heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_rope_dimension_count(config["hidden_size"] // num_heads)
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, model: Path, config: dict[str, Any]) -> None:
    """Write the vocabulary and the merges."""
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [f"[unused{number}]" for number in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * config["vocab_size"]
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    for name, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
    ):
        if config.get(name) is not None:
            add(config[name])
    writer.add_add_bos_token(False)


def permuted(tensor: torch.Tensor, name: str, config: dict[str, Any]) -> torch.Tensor:
    """Reorder Q and K for llama.cpp's rotary layout: pairs beside each other, not half apart."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part not in heads:
        return tensor
    rows, columns = tensor.shape
    num_heads = config[heads[part]]
    halves = tensor.view(num_heads, 2, rows // num_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    quantization: gguf.GGMLQuantizationType,
) -> None:
    """Add a matrix in the file's type, a vector in f32."""
    if tensor.dim() < 2 or dtype is torch.float32:
        writer.add_tensor(name, tensor.float().numpy())
    elif dtype is torch.bfloat16:  # NumPy has no such type: the bytes, with their true one
        writer.add_tensor(
            name, tensor.to(dtype).contiguous().view(torch.uint8).numpy(), raw_dtype=quantization
        )
    else:
        writer.add_tensor(name, tensor.to(dtype).numpy(), raw_dtype=quantization)


def main() -> None:
    """Write all three."""
    folders = [Path(argument) for argument in sys.argv[1:]]
    model, output = (*folders, *(MODEL, OUTPUT)[len(folders) :])[:2]
    output = output.expanduser()
    output.mkdir(parents=True, exist_ok=True)
    for kind in TYPES:
        path = output / f"{kind}.gguf"
        write(model.expanduser(), path, kind)
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
