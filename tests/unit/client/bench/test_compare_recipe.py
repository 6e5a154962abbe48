from __future__ import annotations

from pathlib import Path

import pytest
from octavo_client.bench.compare_recipe import RecipeError, read_recipe

RECIPES = Path(__file__).parents[4] / "scripts" / "peers"
GOOD = """
command = ["{bin}", "--dtype={dtype}", "--port={port}", "{cache}"]
url = "http://127.0.0.1:{port}/v1"
[values]
bin = "~/server"
dtype = "float32"
cache = { float32 = "f32", bfloat16 = "bf16" }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "peer.toml"
    path.write_text(text)
    return path


def test_names_are_filled(tmp_path: Path) -> None:
    """Values come from the recipe, ~ is the home folder, a table goes by dtype."""
    recipe = read_recipe(write(tmp_path, GOOD))
    words = [recipe.fill(word, {"port": "7"}) for word in recipe.command]
    assert words == [str(Path.home() / "server"), "--dtype=float32", "--port=7", "f32"]
    assert (recipe.kind, recipe.ready, recipe.ready_seconds) == ("server", "/v1/models", 180)


def test_settings_change_values(tmp_path: Path) -> None:
    """A setting replaces a value, leads the choice by dtype, and is ignored where unknown."""
    settings = {"dtype": "bfloat16", "python": "/py", "other": "x"}
    recipe = read_recipe(write(tmp_path, GOOD), settings)
    assert recipe.values["cache"] == "bf16"
    assert recipe.fill("{python}", {"python": "built-in"}) == "/py"
    assert "other" not in recipe.values


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('command = ["{bin}",', 'command = "server" #', "'command' must be a list of strings"),
        ('url = "http', 'url = "ftp', "'url' must begin with http://"),
        ("[values]", "ready_seconds = 0\n[values]", "'ready_seconds' must be seconds above 0"),
        ("[values]", "ready_seconds = 1e6\n[values]", "at most 86400, got 1000000.0"),
        ("[values]", "ready = 'health'\n[values]", "'ready' must be a path"),
        ("[values]", "kind = 'thing'\n[values]", "'kind' must be one of server, script"),
        ("[values]", "kind = 'script'\n[values]", "'url' is for kind 'server' only"),
        ("[values]", "env = { A = 1 }\n[values]", "'env' must be a table of strings"),
        ("[values]", "reddy = '/'\n[values]", "'reddy' is unknown"),
        ("{bin}", "{bim}", "'command' uses {bim}, which is not under [values]"),
        ("{bin}", "{bin", "'command' has a stray brace"),
        ('"float32"', '"int4"', "'values.cache' must be used with a dtype of float32, bfloat16"),
        ('bin = "~/server"', "bin = 3", "'values.bin' must be a string"),
        ('bin = "~/server"', "bin = 'x'\nport = '1'", "'values.port' is built in"),
        ("[values]", "[values", "not valid TOML"),
    ],
)
def test_errors_name_file_field_and_bound(tmp_path: Path, old: str, new: str, said: str) -> None:
    """What is wrong with a recipe is told by file, field and what it must be."""
    assert old in GOOD
    with pytest.raises(RecipeError) as caught:
        read_recipe(write(tmp_path, GOOD.replace(old, new, 1)))
    assert "peer.toml: " in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_committed_recipes_are_good(dtype: str) -> None:
    """Every recipe of this repository reads, in every dtype."""
    recipes = [read_recipe(path, {"dtype": dtype}) for path in sorted(RECIPES.glob("*.toml"))]
    assert len(recipes) == 5
    assert {recipe.values["dtype"] for recipe in recipes} == {dtype}
