"""`octavo model`: what is printed where, and the exit codes."""

from __future__ import annotations

import json

import pytest

from executor_svc.model_store.cli import main


def test_fetch_prints_the_folder_last(tmp_path, make_model, capsys):
    """A script takes the folder from standard output."""
    folder = make_model(tmp_path / "store" / "mine")
    assert main(["fetch", "mine", "--model-store", str(tmp_path / "store")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)


def test_the_environment_names_the_store(tmp_path, make_model, monkeypatch, capsys):
    """OCTAVO_MODEL_STORE is the flag's default."""
    folder = make_model(tmp_path / "mine")
    monkeypatch.setenv("OCTAVO_MODEL_STORE", str(tmp_path))
    assert main(["fetch", "mine"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)


def test_stages_go_to_standard_error(tmp_path, make_gguf, capsys):
    """Off a terminal each stage is a line, and none is in the output."""
    make_gguf(tmp_path / "m.gguf")
    assert main(["fetch", str(tmp_path / "m.gguf"), "--model-store", str(tmp_path / "s")]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1
    assert "converting the tokenizer ..." in printed.err.splitlines()
    assert "\r" not in printed.err


def test_an_error_is_one_line_and_exit_code_one(tmp_path, capsys):
    """No trace, and nothing on standard output."""
    assert main(["fetch", "nothing", "--model-store", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("error: no model 'nothing'")


def test_help_keeps_the_list_of_references_a_list(capsys):
    """Each way to name a model has a line of its own."""
    assert main(["fetch", "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "\\b" not in lines
    for name in ("NAME ", "FOLDER ", "FILE.gguf ", "ORG/NAME"):
        assert any(line.startswith(name) for line in lines), name


def test_a_wrong_flag_is_exit_code_two(capsys):
    """Usage errors differ from failures, as everywhere."""
    assert main(["fetch", "--no-such-flag"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--no-such-flag" in line


def test_list_shows_each_model(tmp_path, make_model, capsys):
    """One line a model, uncut when the output is not a terminal."""
    folder = make_model(tmp_path / ("long-name-" * 8) / "mine")
    assert main(["list", "--model-store", str(folder.parent)]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        "NAME",
        "SIZE",
        "PARAMETERS",
        "DTYPE",
        "ARCHITECTURE",
        "CONTEXT",
        "PATH",
    ]
    assert line.split()[0] == "mine"
    assert "bfloat16" in line
    assert "LlamaForCausalLM" in line
    assert line.rstrip().endswith(str(folder))


def test_list_as_json_gives_one_object_a_line(tmp_path, make_model, capsys):
    """For programs: exact numbers."""
    make_model(tmp_path / "a")
    make_model(tmp_path / "b")
    assert main(["list", "--json", "--model-store", str(tmp_path)]) == 0
    models = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [model["name"] for model in models] == ["a", "b"]
    assert [model["num_parameters"] for model in models] == [15, 15]
    assert {model["context_tokens"] for model in models} == {64}


def test_an_empty_store_says_how_to_fill_it(tmp_path, capsys):
    """The hint is not part of the list."""
    assert main(["list", "--model-store", str(tmp_path / "none")]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "octavo model fetch" in printed.err


@pytest.mark.parametrize("form", ["NAME", "FOLDER", "FILE.gguf", "ORG/NAME[@REVISION]"])
def test_help_explains_each_form_of_a_reference(form, capsys):
    """What may be given is found without the documentation."""
    assert main(["fetch", "--help"]) == 0
    assert form in capsys.readouterr().out
