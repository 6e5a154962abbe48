"""The committed code is what the committed protos say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOLS = Path(sys.executable).parent


def test_generated_code_is_what_the_protos_generate(root, files, tmp_path):
    """Byte for byte, with no file too many: run `make proto` after a change."""
    script = root / "scripts" / "generate_protos.py"
    subprocess.run([sys.executable, "-P", script, tmp_path], check=True)
    fresh = {
        path.relative_to(tmp_path): path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    committed = {
        path.relative_to(root / "proto"): path.read_bytes()
        for path in files
        if path.is_relative_to(root / "proto") and "_pb2" in path.stem
    }
    assert fresh.keys() == committed.keys()
    assert [str(name) for name in fresh if fresh[name] != committed[name]] == []


def test_buf_finds_nothing_to_mend(root):
    """Names, packages and comments follow buf's rules."""
    done = subprocess.run(
        [TOOLS / "buf", "lint"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
