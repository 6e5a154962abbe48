"""The tokenizer of a GGUF file, with what transformers' reader drops put back.

A vocabulary gives the true ids only together with the rule that splits text before
BPE. The file has only that rule's name. transformers knows some names and falls back
to GPT-2's rule for the rest, so that "2024" becomes other tokens than the model was
trained on, with no error anywhere. Here the missing rules are added, an unknown name is
said aloud, and the result is tried before it is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor_svc.model_store._progress import Progress
from executor_svc.model_store.errors import ConversionFailed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from executor_svc.model_store._gguf import GgufMetadata

# Names of llama.cpp whose rule is GPT-2's after each digit stands alone.
# Source: llama.cpp, src/llama-vocab.cpp, the cases that list "\p{N}" first.
SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
# Names whose rule is GPT-2's own.
PLAIN_GPT2 = frozenset({"default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "trillion"})

# Scripts without spaces, emoji built of several code points, indentation, digits,
# and trailing blanks: each breaks when a rule or the byte alphabet is wrong.
_ROUND_TRIPS = (
    "The quick brown fox, 1234567890 times -- isn't it?",
    "def f(x):\n    return [x ** 2 for _ in range(10)]\n\n\t# done  ",
    "日本語のテキストと한국어, 中文。",
    "👩‍👩‍👧‍👦 🇫🇷 naïve café ½ ﷽",
)
_NO_LIMIT_TOKENS = 1 << 30


def convert(
    gguf_file: Path,
    folder: Path,
    metadata: GgufMetadata,
    config: dict[str, Any],
    progress: Progress,
) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template.

    Args:
        gguf_file: absolute path.
        folder: exists, with config.json already in it.
        metadata: the file's keys.
        config: the model's configuration, for its context length and vocabulary size.
        progress: hears of each stage, and of a splitting rule that is unknown.
    Raises:  ConversionFailed: if the written tokenizer does not read back as it should.
    """
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    backend: Tokenizer = loaded.backend_tokenizer
    _restore_split(backend, metadata, progress)
    _restore_bos(backend, metadata)
    _save(backend, folder / "tokenizer.json", metadata)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.get("max_position_embeddings", _NO_LIMIT_TOKENS),
        **{
            f"{name}_token": backend.id_to_token(metadata.special_ids[name])
            for name in ("bos", "eos", "unk", "pad")
            if name in metadata.special_ids
        },
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    if loaded.chat_template:
        (folder / "chat_template.jinja").write_text(loaded.chat_template, encoding="utf-8")
    progress.stage("checking the tokenizer")
    verify(folder, metadata, config)


def verify(folder: Path, metadata: GgufMetadata, config: dict[str, Any]) -> None:
    """Try a written tokenizer on what a wrong conversion gets wrong.

    Raises:  ConversionFailed: naming the first thing that is not so.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = config.get("vocab_size", tokenizer.get_vocab_size())
    if tokenizer.get_vocab_size() > size:
        raise ConversionFailed(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model only {size}"
        )
    for name, token_id in metadata.special_ids.items():
        if name == "unk":  # an ordinary token in many vocabularies
            continue
        token = tokenizer.id_to_token(token_id)
        if token is None or tokenizer.encode(token, add_special_tokens=False).ids != [token_id]:
            raise ConversionFailed(
                f"the {name} token {token!r} does not encode to {token_id} alone"
            )
    if metadata.tokenizer_model != "gpt2":
        return  # SentencePiece normalizes: its texts need not come back byte for byte
    for text in _ROUND_TRIPS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        back = tokenizer.decode(ids, skip_special_tokens=False)
        if back != text:
            raise ConversionFailed(f"the tokenizer turns {text!r} into {back!r}")


def _save(backend: Tokenizer, path: Path, metadata: GgufMetadata) -> None:
    """Write the tokenizer without tokens that the file does not have.

    transformers builds it from GPT-2's class, which adds that model's "<|endoftext|>"
    behind the vocabulary: an id past the model's last row.
    """
    written = json.loads(backend.to_str())
    written["added_tokens"] = [
        token for token in written["added_tokens"] if token["id"] < metadata.num_tokens
    ]
    path.write_text(json.dumps(written, ensure_ascii=False, indent=1), encoding="utf-8")


def _restore_split(backend: Tokenizer, metadata: GgufMetadata, progress: Progress) -> None:
    """Put the pre-tokenizer right where transformers fell back to GPT-2's."""
    from tokenizers import pre_tokenizers

    if metadata.tokenizer_model != "gpt2":
        return
    if metadata.pre_tokenizer in SINGLE_DIGITS:
        split = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(split)
    elif metadata.pre_tokenizer not in PLAIN_GPT2 and isinstance(
        backend.pre_tokenizer, pre_tokenizers.ByteLevel
    ):
        progress.warn(
            f"the rule {metadata.pre_tokenizer!r} that splits text before BPE is unknown here and "
            "GPT-2's is used: some text will be tokenized otherwise than in training"
        )


def _restore_bos(backend: Tokenizer, metadata: GgufMetadata) -> None:
    """Begin plain prompts with bos where the file says that the model expects it."""
    from tokenizers import processors

    if not metadata.add_bos or "bos" not in metadata.special_ids:
        return
    token_id = metadata.special_ids["bos"]
    token = backend.id_to_token(token_id)
    if backend.encode("a").ids[:1] == [token_id]:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, token_id)]
    )
