"""The fingerprint: what makes two folders the same model."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from executor_svc.fingerprint import fingerprint


def write(folder: Path, config: dict[str, object], tensors: dict[str, list[int]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            **{
                name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
                for name, shape in tensors.items()
            },
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_it_is_the_documented_hash(tmp_path: Path) -> None:
    """Anyone can compute it: SHA-256 of canonical config and sorted names and shapes."""
    folder = write(tmp_path, {"b": 1, "a": "ü", "dtype": "float32"}, {"w.2": [3], "w.1": [2, 5]})
    text = r'{"a":"\u00fc","b":1}' + '[["w.1",[2,5]],["w.2",[3]]]'
    assert fingerprint(folder) == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_versions_names_and_dtypes_do_not_count(tmp_path: Path) -> None:
    """The same model saved by another version and in another dtype stays the same."""
    one = write(
        tmp_path / "1", {"n": 1, "transformers_version": "5", "dtype": "float32"}, {"w": [1]}
    )
    two = write(
        tmp_path / "2", {"_name_or_path": "x", "torch_dtype": "float16", "n": 1}, {"w": [1]}
    )
    assert fingerprint(one) == fingerprint(two)


@pytest.mark.parametrize(
    ("config", "tensors"), [({"n": 2}, {"w": [1]}), ({"n": 1}, {"w": [2]}), ({"n": 1}, {"v": [1]})]
)
def test_configuration_names_and_shapes_count(
    tmp_path: Path, config: dict[str, object], tensors: dict[str, list[int]]
) -> None:
    """Another setting, shape or name of a weight is another model."""
    base = write(tmp_path / "base", {"n": 1}, {"w": [1]})
    assert fingerprint(base) != fingerprint(write(tmp_path / "other", config, tensors))


def test_sharding_does_not_count(tmp_path: Path) -> None:
    """Weights in two files are the same model as in one."""
    one = write(tmp_path / "one", {"n": 1}, {"a": [1], "b": [2]})
    two = write(tmp_path / "two", {"n": 1}, {"b": [2]})
    shutil.move(two / "model.safetensors", two / "model-2.safetensors")
    write(two, {"n": 1}, {"a": [1]})
    assert fingerprint(one) == fingerprint(two)


def test_it_needs_no_torch() -> None:
    """A service without torch can compute it."""
    code = "import sys, executor_svc.fingerprint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
