"""Read NVIDIA machine code: the text of nvdisasm and of cuobjdump."""

from __future__ import annotations

import re

from octavo_kernels.aot.listing import Instruction, Listing

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_BRANCH_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")

_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
_LOADS = {"LDG", "LDGSTS"}
_MATRIX = {"HMMA", "HGMMA", "UTCHMMA", "IMMA", "QGMMA"}
_FLOAT = {"FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2", "HFMA2"}


def parse_sass(text: str) -> Listing:
    """Read what `nvdisasm --print-code` prints of a binary with one kernel.

    NOP, which pads code and makes it wait, is not counted.
    """
    labels: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif (instruction := _INSTRUCTION.match(line)) and instruction[1] != "NOP":
            lines.append((instruction[1], instruction[2]))
    return Listing([_instruction(opcode, rest, labels) for opcode, rest in lines])


def _instruction(opcode: str, operands: str, labels: dict[str, int]) -> Instruction:
    name, *modifiers = opcode.split(".")
    bits = next((_BITS[each] for each in modifiers if each in _BITS), 32)
    branch = _BRANCH_TARGET.search(operands) if name == "BRA" else None
    return Instruction(
        opcode,
        target=labels[branch[1]] if branch else None,
        load_bits=bits if name in _LOADS else 0,
        store_bits=bits if name == "STG" else 0,
        spill_bytes=bits // 8 if name == "STL" else 0,
        is_matrix=name in _MATRIX,
        is_float=name in _FLOAT,
    )


def parse_resources(text: str) -> dict[str, int]:
    """Read `cuobjdump --dump-resource-usage`: REG, STACK, SHARED, LOCAL of the kernel.

    Raises:
        ValueError: if the text names no registers.
    """
    found = {name: int(value) for name, value in _RESOURCE.findall(text)}
    if "REG" not in found:
        raise ValueError(f"no resource usage in {text!r}")
    return found
