"""Small models and GGUF files, made from nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

HIDDEN = 32
LAYERS = 1
HEADS = 2


class Recorder:
    """Progress that remembers what it heard."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.warnings: list[str] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def update(self, done: int, total: int) -> None:
        pass

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A file with these names, dtypes and shapes, all zero."""
    width = {"BF16": 2, "F16": 2, "F32": 4}
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = width[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(offset))


def write_model(folder: Path, **config: object) -> Path:
    """A folder that has everything a model needs, in its smallest form."""
    folder.mkdir(parents=True)
    settings = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", {"w": ("BF16", [3, 5])})
    return folder


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in its own order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in printable}
    hidden = [byte for byte in range(256) if byte not in spelled]
    spelled |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [spelled[byte] for byte in sorted(spelled)]


SPECIALS = ["<|end|>", "<|bos|>", "<|eot|>"]
END, BOS, EOT = range(3)
MERGES = ["Ċ Ċ", "1 2", "a b"]
TOKENS = [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]


def write_gguf(
    path: Path,
    *,
    pre: str = "smollm",
    add_bos: bool | None = None,
    eot: bool = False,
    chat_template: str | None = "{{ messages[0]['content'] }}",
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """A one-layer Llama with a byte-level vocabulary; gives the tensors it wrote."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control] * len(SPECIALS) + [normal] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(END)
    if eot:
        writer.add_eot_token_id(EOT)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    tensors = _random_tensors(seed)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _random_tensors(seed: int) -> dict[str, np.ndarray]:
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (2 * HIDDEN, HIDDEN),
        "blk.0.ffn_up.weight": (2 * HIDDEN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, 2 * HIDDEN),
    }
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def make_model() -> Callable[..., Path]:
    return write_model


@pytest.fixture
def make_safetensors() -> Callable[..., None]:
    return write_safetensors


@pytest.fixture(scope="session")
def make_gguf() -> Callable[..., dict[str, np.ndarray]]:
    return write_gguf
