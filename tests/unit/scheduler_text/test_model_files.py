"""Tests of scheduler_svc.model_files and scheduler_svc.fingerprint."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.config import DEFAULT_MODEL
from scheduler_svc.errors import StartupError
from scheduler_svc.fingerprint import fingerprint
from scheduler_svc.model_files import load_model, resolve

CONFIG: dict[str, Any] = {"vocab_size": 30, "max_position_embeddings": 64, "eos_token_id": 2}


def write_model(folder: Path, **files: Any) -> Path:
    """Write a model's folder; a keyword a__json is a.json, and None leaves it out."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = {"added_tokens": [{"id": 9, "content": "</s>"}]}
    for name, value in ({"config": CONFIG, "tokenizer": tokenizer} | files).items():
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def write_weights(path: Path, shapes: dict[str, list[int]]) -> None:
    header: dict[str, Any] = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    data = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data)


def test_a_name_means_the_store(tmp_path: Path) -> None:
    """Clients call the model by the name it has there."""
    write_model(tmp_path / "store" / "tiny-1.5")
    model = load_model("tiny-1.5", tmp_path / "store")
    assert (model.name, model.folder) == ("tiny-1.5", tmp_path / "store" / "tiny-1.5")


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    """Its last part is the model's name."""
    folder = write_model(tmp_path / "some" / "where")
    model = load_model(str(folder), tmp_path / "store")
    assert (model.name, model.folder) == ("where", folder)


def test_a_hub_id_is_found_in_the_store(tmp_path: Path) -> None:
    """What was fetched under its id needs no network."""
    folder = write_model(tmp_path / "org--tiny@v1")
    model = load_model("org/tiny@v1", tmp_path)
    assert (model.name, model.folder) == ("org/tiny@v1", folder)


@pytest.mark.parametrize("reference", [DEFAULT_MODEL, "weights.gguf", "/no/such/x.gguf"])
def test_what_is_not_there_says_what_to_run(tmp_path: Path, reference: str) -> None:
    """One line with the command that fetches or converts it."""
    with pytest.raises(StartupError) as caught:
        resolve(reference, tmp_path)
    assert f"octavo model fetch {reference}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("reference", ["absent", "./a/b/c"])
def test_what_nobody_can_fetch_says_what_to_give(tmp_path: Path, reference: str) -> None:
    """One line that does not send anyone to a command that fails as well."""
    with pytest.raises(StartupError, match="give a folder, a hub id") as caught:
        resolve(reference, tmp_path)
    assert repr(reference) in str(caught.value)
    assert "octavo model fetch" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's own errors become one line."""
    import huggingface_hub

    def fail(*args: object, **kwargs: object) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(StartupError, match="octavo model fetch org/tiny"):
        resolve("org/tiny", tmp_path)


def test_the_hub_gives_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only configuration, tokenizer and template are asked for."""
    import huggingface_hub

    asked: dict[str, Any] = {}

    def download(repository: str, **kwargs: Any) -> str:
        asked.update(kwargs, repository=repository)
        return str(write_model(tmp_path / "cache"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_model("org/tiny@v2", tmp_path / "store").name == "org/tiny@v2"
    assert (asked["repository"], asked["revision"]) == ("org/tiny", "v2")
    assert asked["allow_patterns"] == ["*.json", "*.jinja"]


def test_an_incomplete_folder_names_what_it_lacks(tmp_path: Path) -> None:
    """A folder without a tokenizer is no model."""
    with pytest.raises(StartupError, match=r"lacks tokenizer\.json"):
        resolve(str(write_model(tmp_path / "m", tokenizer=None)), tmp_path)


@pytest.mark.parametrize("config", [{"max_position_embeddings": 3}, [], {"vocab_size": "many"}])
def test_a_broken_configuration_stops_the_start(tmp_path: Path, config: object) -> None:
    """One line that names the folder."""
    folder = write_model(tmp_path / "m", config=config)
    with pytest.raises(StartupError, match="cannot be read") as caught:
        load_model(str(folder), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "expected"),
    [
        ({"max_position_embeddings": 64}, {"model_max_length": 32}, 64),
        ({"n_positions": 16}, {}, 16),
        ({}, {"model_max_length": 32}, 32),
        ({}, {"model_max_length": 1e30}, None),
        ({}, {}, None),
        ({"text_config": {"vocab_size": 5, "max_position_embeddings": 8}}, {}, 8),
    ],
)
def test_the_context_comes_from_the_configuration(
    tmp_path: Path, config: dict[str, Any], tokenizer_config: dict[str, Any], expected: int | None
) -> None:
    """By any of its names, nested or not; a tokenizer's limit is the last resort."""
    folder = write_model(
        tmp_path / "m", config={"vocab_size": 30, **config}, tokenizer_config=tokenizer_config
    )
    assert load_model(str(folder), tmp_path).max_model_len == expected


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_config", "expected"),
    [
        ({"eos_token_id": [2, 5, 2]}, {"eos_token_id": 3}, {}, (2, 5)),
        ({}, {"eos_token_id": 3}, {}, (3,)),
        ({}, {"eos_token_id": 0}, {}, (0,)),
        ({}, {}, {"eos_token": {"content": "</s>"}}, (9,)),
        ({}, {}, {"eos_token": "</s>"}, (9,)),
        ({}, {}, {}, ()),
    ],
)
def test_end_of_sequence_tokens_come_from_the_first_file_that_has_any(
    tmp_path: Path,
    generation: dict[str, Any],
    config: dict[str, Any],
    tokenizer_config: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    """generation_config.json, then config.json, then the tokenizer's own."""
    folder = write_model(
        tmp_path / "m",
        config={"vocab_size": 30, **config},
        generation_config=generation,
        tokenizer_config=tokenizer_config,
    )
    assert load_model(str(folder), tmp_path).eos_token_ids == expected


def test_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    """What it does not name is neutral; a temperature of 0 is kept."""
    bare = load_model(str(write_model(tmp_path / "a")), tmp_path).sampling
    assert (bare.temperature, bare.top_k, bare.top_p) == (1.0, 0, 1.0)
    given = {"temperature": 0, "top_k": 50, "top_p": 0.9}
    folder = write_model(tmp_path / "b", generation_config=given)
    sampling = load_model(str(folder), tmp_path).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 50, 0.9)


def test_the_template_file_wins_over_the_tokenizers(tmp_path: Path) -> None:
    """Then a string, then the one named default of a list; a model may have none."""
    templates = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    folder = write_model(tmp_path / "m", tokenizer_config={"chat_template": templates})
    assert load_model(str(folder), tmp_path).chat_template == "D"
    write_model(folder, tokenizer_config={"chat_template": "S"})
    assert load_model(str(folder), tmp_path).chat_template == "S"
    (folder / "chat_template.jinja").write_text("F")
    assert load_model(str(folder), tmp_path).chat_template == "F"
    assert load_model(str(write_model(tmp_path / "n")), tmp_path).chat_template is None


def test_the_fingerprint_is_as_defined(tmp_path: Path) -> None:
    """The hash of canonical configuration and layout, over all weight files in order."""
    config = {"b": [1, 2], "a": "é", "dtype": "float32", "_name_or_path": "x"}
    folder = write_model(tmp_path / "m", config=config)
    write_weights(folder / "model-2.safetensors", {"a.weight": [2, 3]})
    write_weights(folder / "model-1.safetensors", {"z": [], "b.weight": [4]})
    text = '{"a":"\\u00e9","b":[1,2]}[["a.weight",[2,3]],["b.weight",[4]],["z",[]]]'
    assert fingerprint(folder) == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_the_fingerprint_sees_what_matters(tmp_path: Path) -> None:
    """Another dtype or library version is the same model; another shape is not."""
    folder = write_model(tmp_path / "m")
    write_weights(folder / "model.safetensors", {"w": [2, 3]})
    first = fingerprint(folder)
    write_model(folder, config={"torch_dtype": "bfloat16", "transformers_version": "9", **CONFIG})
    assert fingerprint(folder) == first
    write_weights(folder / "model.safetensors", {"w": [3, 2]})
    second = fingerprint(folder)
    assert second != first
    write_model(folder, config={**CONFIG, "rope_theta": 1e6})
    assert fingerprint(folder) not in (first, second)


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    """A scheduler beside a tokenizer alone takes any executor."""
    assert fingerprint(write_model(tmp_path / "m")) == ""


@pytest.mark.parametrize("data", [b"", b"\x01", b"\xff" * 16, struct.pack("<Q", 4) + b"nope"])
def test_a_broken_weight_file_stops_the_start(tmp_path: Path, data: bytes) -> None:
    """It is found at the start, in one line."""
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(StartupError, match="cannot be read"):
        load_model(str(folder), tmp_path)
