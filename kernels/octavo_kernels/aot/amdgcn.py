"""Read AMD assembly as LLVM writes it: code, and the metadata after it."""

from __future__ import annotations

import re

from octavo_kernels.aot.listing import Instruction, Listing

_LABEL = re.compile(r"^(\.LBB\d+_\d+):")
_INSTRUCTION = re.compile(r"^\s+([a-z]\w+)\s*([^;]*)")
_BRANCHES = re.compile(r"^s_c?branch")
_ACCESS = re.compile(r"^(?:global|buffer|flat)_(load|store)_(?:lds_)?(\w+)")
# NVIDIA's waits stand inside the instructions that wait, and are no instructions either.
_WAITS = {"s_nop", "s_waitcnt"}
_SCRATCH_STORE = re.compile(r"^scratch_store_(\w+)")
_METADATA = re.compile(r"^\s+\.(\w+):\s+(\d+)$", re.MULTILINE)

_BITS = {
    "ubyte": 8,
    "sbyte": 8,
    "byte": 8,
    "ushort": 16,
    "sshort": 16,
    "short": 16,
    "short_d16": 16,
    "short_d16_hi": 16,
    "dword": 32,
    "dwordx2": 64,
    "dwordx3": 96,
    "dwordx4": 128,
}
_FLOAT = re.compile(r"^v_(?:pk_)?(?:fma|fmac|mul|add|dot2\w*)_f(?:16|32)")


def parse_amdgcn(text: str) -> Listing:
    """Read the code of an assembly file with one kernel; waits are not counted."""
    labels: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for line in text.partition(".Lfunc_end0")[0].splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif (instruction := _INSTRUCTION.match(line)) and instruction[1] not in _WAITS:
            lines.append((instruction[1], instruction[2].strip()))
    return Listing([_instruction(opcode, rest, labels) for opcode, rest in lines])


def _instruction(opcode: str, operands: str, labels: dict[str, int]) -> Instruction:
    access = _ACCESS.match(opcode)
    bits = _BITS.get(access[2], 32) if access else 0
    spill = _SCRATCH_STORE.match(opcode)
    return Instruction(
        opcode,
        target=labels.get(operands) if _BRANCHES.match(opcode) else None,
        load_bits=bits if access and access[1] == "load" else 0,
        store_bits=bits if access and access[1] == "store" else 0,
        spill_bytes=_BITS.get(spill[1], 32) // 8 if spill else 0,
        is_matrix=opcode.startswith("v_mfma"),
        is_float=_FLOAT.match(opcode) is not None,
    )


def parse_metadata(text: str) -> dict[str, int]:
    """Read the kernel's numbers from the metadata: vgpr_count, vgpr_spill_count, ...

    Raises:
        ValueError: if the text has no such metadata.
    """
    _, _, metadata = text.partition(".amdgpu_metadata")
    found = {name: int(value) for name, value in _METADATA.findall(metadata)}
    if "vgpr_count" not in found:
        raise ValueError("no kernel metadata in the assembly")
    return found
