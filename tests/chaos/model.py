"""A small model of random weights, so that two cores have time for two executors and faults.

Its tokens are bytes, so that nearly every token is only a part of a character. Weights are
scaled so that what comes next depends on all that came before, and logits lie well apart.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 288
_HIDDEN = 128
_HEAD_DIM = 64
_HEADS_OF_A_KV_HEAD = 2
_MLP = 256
_NUM_LAYERS = 3
_LOGIT_SCALE = 3.0
_SPECIAL = ("<unk>", "<s>", "</s>")
_EOS = 2


def write_model(folder: Path, num_kv_heads: int = 1) -> Path:
    """Write configuration, weights and tokenizer of a Llama of some 500 thousand parameters.

    Args:
        folder: where to.
        num_kv_heads: with two attention heads each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": _HEADS_OF_A_KV_HEAD * num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": _EOS,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_weights(num_kv_heads), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _SPECIAL[_EOS]})
    )
    return folder


def _weights(num_kv_heads: int) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(11)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(scale / columns**0.5)

    one = np.ones(_HIDDEN, np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, _HIDDEN, _HIDDEN**0.5),
        "model.norm.weight": one,
        "lm_head.weight": matrix(VOCAB_SIZE, _HIDDEN, _LOGIT_SCALE),
    }
    for number in range(_NUM_LAYERS):
        layer = f"model.layers.{number}"
        kv_heads = num_kv_heads * _HEAD_DIM
        heads = _HEADS_OF_A_KV_HEAD * kv_heads
        weights |= {
            f"{layer}.input_layernorm.weight": one,
            f"{layer}.post_attention_layernorm.weight": one,
            f"{layer}.self_attn.q_proj.weight": matrix(heads, _HIDDEN, 1.4),
            f"{layer}.self_attn.k_proj.weight": matrix(kv_heads, _HIDDEN, 1.4),
            f"{layer}.self_attn.v_proj.weight": matrix(kv_heads, _HIDDEN, 1.4),
            f"{layer}.self_attn.o_proj.weight": matrix(_HIDDEN, heads, 1.4),
            f"{layer}.mlp.gate_proj.weight": matrix(_MLP, _HIDDEN, 1.4),
            f"{layer}.mlp.up_proj.weight": matrix(_MLP, _HIDDEN, 1.4),
            f"{layer}.mlp.down_proj.weight": matrix(_HIDDEN, _MLP, 1.4),
        }
    return weights


def _tokenizer() -> Tokenizer:
    """One token a byte; the rest of the vocabulary are pairs of letters."""
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = (a + b for a in "etaoin" for b in "shrdlu")
    tokens += [next(pairs) for _ in range(VOCAB_SIZE - len(tokens))]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[])
    )
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
