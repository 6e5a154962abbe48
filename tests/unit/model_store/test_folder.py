"""What the store reads in a model's folder."""

from __future__ import annotations

import json

import pytest

from executor_svc.model_store import describe, missing_files


def test_a_folder_with_config_tokenizer_and_weights_lacks_nothing(tmp_path, make_model):
    """The three files that both services load are all that is asked for."""
    assert missing_files(make_model(tmp_path / "m")) == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_each_needed_file_is_named_when_it_is_absent(tmp_path, make_model, name):
    """The message can say which file to bring."""
    folder = make_model(tmp_path / "m")
    (folder / name).unlink()
    assert missing_files(folder) == [name]


def test_an_absent_shard_is_named(tmp_path, make_model, make_safetensors):
    """Weights in several files are complete only with every file of the index."""
    folder = make_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    make_safetensors(folder / "one.safetensors", {"a": ("F16", [2])})
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert missing_files(folder) == ["two.safetensors"]
    make_safetensors(folder / "two.safetensors", {"b": ("F16", [2])})
    assert missing_files(folder) == []


def test_parameters_are_counted_over_all_shards(tmp_path, make_model, make_safetensors):
    """The count comes from the stored shapes: 2 x 3 here and 4 x 5 there."""
    folder = make_model(tmp_path / "m")
    make_safetensors(folder / "model.safetensors", {"a": ("F16", [2, 3])})
    make_safetensors(folder / "more.safetensors", {"b": ("F16", [4, 5])})
    assert describe(folder).num_parameters == 26


def test_the_dtype_is_that_of_most_elements(tmp_path, make_model, make_safetensors):
    """A few float32 norms do not make a bfloat16 model a float32 one."""
    folder = make_model(tmp_path / "m")
    tensors = {"norm": ("F32", [8]), "other_norm": ("F32", [8]), "proj": ("BF16", [8, 8])}
    make_safetensors(folder / "model.safetensors", tensors)
    assert describe(folder).dtype == "bfloat16"


def test_the_context_is_found_one_level_down(tmp_path, make_model):
    """Multimodal configurations keep the language model's settings in text_config."""
    folder = make_model(tmp_path / "m", text_config={"max_position_embeddings": 4096})
    assert describe(folder).context_tokens == 4096


def test_a_model_without_a_stated_context_has_none(tmp_path, make_model):
    """No number is made up."""
    folder = make_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": "odd"}))
    info = describe(folder)
    assert info.context_tokens is None
    assert info.architecture == "odd"


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64])
def test_a_file_that_is_not_safetensors_is_refused(tmp_path, make_model, content):
    """Garbage is an error that names the file, not a huge read."""
    folder = make_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
        describe(folder)
