"""A GGUF file becomes a model folder with the weights and the tokenizer it describes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from executor_svc.model_store import resolve
from executor_svc.model_store.errors import ConversionFailed, UnknownReference

# The order of the vocabulary that the fixture writes.
END, BOS, EOT = range(3)


@pytest.fixture(scope="module")
def converted(tmp_path_factory, make_gguf):
    """The folder of one conversion, and the tensors that went into its file."""
    root = tmp_path_factory.mktemp("gguf")
    tensors = make_gguf(root / "Tiny Model.gguf")
    return resolve(str(root / "Tiny Model.gguf"), root / "store"), tensors


@pytest.fixture(scope="module")
def tokenizer(converted) -> Tokenizer:
    return Tokenizer.from_file(str(converted[0] / "tokenizer.json"))


def convert(tmp_path: Path, make_gguf, progress=None, **choices) -> Path:
    make_gguf(tmp_path / "m.gguf", **choices)
    return resolve(str(tmp_path / "m.gguf"), tmp_path / "store", progress=progress)


def ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer.token_to_id(token) for token in tokens]


def test_the_folder_is_an_ordinary_model_folder(converted):
    """The files that any Hugging Face model has, and nothing else."""
    names = {path.name for path in converted[0].iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }


def test_weights_are_the_files_rounded_to_bfloat16(converted):
    """No tensor is lost, renamed wrongly or rounded twice."""
    folder, tensors = converted
    stored = load_file(folder / "model.safetensors")
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    for name, source in pairs.items():
        expected = torch.from_numpy(tensors[source]).to(torch.bfloat16)
        assert stored[name].dtype == torch.bfloat16
        assert torch.equal(stored[name], expected), name


def test_transformers_loads_the_folder(converted):
    """It is served the way any other model is."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(converted[0])
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    logits = model(torch.tensor([tokenizer("ab 12")["input_ids"]])).logits
    assert logits.shape[-1] == model.config.vocab_size
    assert torch.isfinite(logits).all()
    assert tokenizer.apply_chat_template([{"content": "ab"}], tokenize=False) == "ab"


def test_each_digit_stands_alone(tokenizer):
    """The rule "smollm" keeps digits apart even where a merge would join them."""
    assert tokenizer.encode("12").ids == ids(tokenizer, "1", "2")


def test_blanks_before_a_digit_stay_together(tokenizer):
    """Digits are split off first, so that the blanks before one end their piece."""
    assert tokenizer.encode("\n\n1").ids == ids(tokenizer, "ĊĊ", "1")


def test_blanks_before_a_letter_do_not(tokenizer):
    """The last blank belongs to what follows it, as in GPT-2's rule."""
    assert tokenizer.encode("\n\nab").ids == ids(tokenizer, "Ċ", "Ċ", "ab")


@pytest.mark.parametrize("token", ["<|end|>", "<|bos|>", "<|eot|>"])
def test_control_tokens_are_one_id(tokenizer, token):
    """Chat templates write them as text."""
    assert tokenizer.encode(f"a{token}b").ids == ids(tokenizer, "a", token, "b")


def test_another_rule_is_left_to_transformers(tmp_path, make_gguf, recorder):
    """GPT-2's rule joins digits and is known, so nothing is warned of."""
    folder = convert(tmp_path, make_gguf, recorder, pre="gpt-2")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("12").ids == ids(tokenizer, "12")
    assert recorder.warnings == []


def test_an_unknown_rule_is_said_aloud(tmp_path, make_gguf, recorder):
    """A tokenizer that may differ from training does not pass in silence."""
    convert(tmp_path, make_gguf, recorder, pre="of-tomorrow")
    assert len(recorder.warnings) == 1
    assert "'of-tomorrow'" in recorder.warnings[0]


@pytest.mark.parametrize(("add_bos", "begins"), [(True, [BOS]), (False, []), (None, [])])
def test_a_prompt_begins_with_bos_where_the_file_says_so(tmp_path, make_gguf, add_bos, begins):
    """A byte-level file that says nothing means no bos."""
    folder = convert(tmp_path, make_gguf, add_bos=add_bos)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab").ids == [*begins, *ids(tokenizer, "ab")]


def test_generation_ends_at_the_files_end_token(converted):
    """The server stops where the model was trained to stop."""
    settings = json.loads((converted[0] / "generation_config.json").read_text())
    assert settings == {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": END}


def test_the_end_of_a_turn_ends_generation_too(tmp_path, make_gguf):
    """Chat models end a turn and a document with different tokens."""
    folder = convert(tmp_path, make_gguf, eot=True)
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [END, EOT]


def test_a_file_without_a_chat_template_is_converted_with_a_warning(tmp_path, make_gguf, recorder):
    """A base model can be served; the user hears that chat can not."""
    folder = convert(tmp_path, make_gguf, recorder, chat_template=None)
    assert not (folder / "chat_template.jinja").exists()
    assert ["chat" in warning for warning in recorder.warnings] == [True]


def test_a_file_is_converted_once_wherever_it_lies(converted, tmp_path, recorder):
    """A copy of the file, even elsewhere, is the same model."""
    folder, _ = converted
    source = next(folder.parent.parent.glob("*.gguf"))
    copy = Path(shutil.copy(source, tmp_path))
    assert resolve(str(copy), folder.parent, progress=recorder) == folder
    assert recorder.stages == []


def test_another_file_of_the_same_name_is_another_model(converted, tmp_path, make_gguf):
    """Weights that differ are never served under the older ones' folder."""
    folder, _ = converted
    make_gguf(tmp_path / "Tiny Model.gguf", seed=1)
    other = resolve(str(tmp_path / "Tiny Model.gguf"), folder.parent)
    assert other != folder
    assert other.name.startswith("Tiny-Model-")


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"GGUF" + bytes(400)])
def test_a_file_that_is_not_gguf_is_refused(tmp_path, content):
    """One line that names the file, and nothing left in the store."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    store = tmp_path / "store"
    with pytest.raises(ConversionFailed, match=r"cannot convert .*bad\.gguf") as error:
        resolve(str(path), store)
    assert "\n" not in str(error.value)
    assert [item.name for item in store.iterdir() if not item.name.startswith(".")] == []


def test_a_cut_file_is_refused(converted, tmp_path):
    """A download that stopped half-way does not become a model."""
    source = next(converted[0].parent.parent.glob("*.gguf"))
    path = tmp_path / "cut.gguf"
    path.write_bytes(source.read_bytes()[:-5000])
    with pytest.raises(ConversionFailed, match=r"cut\.gguf"):
        resolve(str(path), tmp_path / "store")


def test_a_missing_file_is_named(tmp_path):
    """The path that was looked at is in the message."""
    with pytest.raises(UnknownReference, match=r"gone\.gguf"):
        resolve(str(tmp_path / "gone.gguf"), tmp_path / "store")
