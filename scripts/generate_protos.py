"""Generate octavo.v1 from proto/octavo/v1: messages, stubs of services, types.

Usage: python scripts/generate_protos.py [OUTPUT_DIR]

The output (default: proto/) is committed; a test generates it afresh into a
temporary folder and fails on any difference.
"""

from __future__ import annotations

import os
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent / "proto"


def generate(output: Path) -> None:
    """Write the generated modules below output.

    Raises:  SystemExit: if protoc refuses a file.
    """
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("octavo/v1/*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    # protoc finds the plug-ins of mypy-protobuf beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT}",
            f"--proto_path={well_known}",
            f"--python_out={output}",
            f"--grpc_python_out={output}",
            f"--mypy_out=quiet:{output}",
            f"--mypy_grpc_out=quiet:{output}",
            *protos,
        ]
    )
    if code != 0:
        raise SystemExit(f"protoc failed with code {code}")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    target.mkdir(parents=True, exist_ok=True)
    generate(target)
