"""Reading machine code: what counts as a load, a spill and the main loop."""

from __future__ import annotations

import pytest
from octavo_kernels.aot.amdgcn import parse_amdgcn, parse_metadata
from octavo_kernels.aot.listing import Instruction, Listing
from octavo_kernels.aot.sass import parse_resources, parse_sass

# A loop with a table entry (32 bits) and two vectors of K/V, a loop that only stores,
# and what pads a kernel.
SASS = """
	.section	.text.attend,"ax",@progbits
attend:
.text.attend:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.64 R12, desc[UR12][R8.64] ;
.L_x_1:
        /*0020*/                   LDGSTS.E [R66+0x9800], desc[UR12][R8.64], P2 ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R67], desc[UR12][R10.64], P2 ;
        /*0040*/             @!UP1 LDG.E.LTC128B.128.CONSTANT R4, desc[UR12][R10.64] ;
        /*0050*/                   HMMA.16816.F32.BF16 R12, R24.reuse, R28, RZ ;
        /*0060*/                   STL.64 [R1+0x8], R4 ;
        /*0070*/               @P6 BRA `(.L_x_1) ;
.L_x_2:
        /*0080*/                   STG.E.128 desc[UR12][R2.64], R4 ;
        /*0090*/               @P0 BRA `(.L_x_2) ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   BRA `(.L_x_3);
        /*00c0*/                   NOP;
"""

AMDGCN = """
attend:                                 ; @attend
; %bb.0:
	.loc	1 4 0 prologue_end              ; attend.py:4:0
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_branch .LBB0_1
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	buffer_load_dword v123, v112, s[36:39], 0 offen
	global_load_dwordx4 v[136:139], v[34:35], off
	global_load_dwordx4 v[124:127], v[36:37], off offset:2048
	s_waitcnt vmcnt(0)
	s_nop 1
	v_mfma_f32_16x16x16_bf16 v[38:41], v[30:31], v[2:3], 0
	scratch_store_dwordx2 off, v[2:3], s33
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	global_store_dwordx4 v[0:1], v[2:5], off
	s_endpgm
.Lfunc_end0:
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     0
    .group_segment_fixed_size: 0
    .name:           attend
    .private_segment_fixed_size: 16
    .sgpr_count:     56
    .sgpr_spill_count: 0
    .vgpr_count:     160
    .vgpr_spill_count: 3
"""


def test_sass_widths_and_spills():
    """Widths come from the opcode's modifiers, past predicates and cache hints."""
    listing = parse_sass(SASS)
    assert [each.load_bits for each in listing.instructions if each.load_bits] == [
        64,
        32,
        128,
        128,
    ]
    assert listing.store_bits == 128
    assert listing.spill_bytes == 8
    assert len(listing) == 12  # without the NOP


def test_sass_main_loop():
    """The main loop is the one that loads and multiplies, from its label to its branch."""
    loop = parse_sass(SASS).main_loop()
    assert loop is not None
    assert [each.opcode for each in loop.instructions] == [
        "LDGSTS.E",
        "LDGSTS.E.BYPASS.128",
        "LDG.E.LTC128B.128.CONSTANT",
        "HMMA.16816.F32.BF16",
        "STL.64",
        "BRA",
    ]
    assert loop.loaded_bytes == 4 + 16 + 16
    assert loop.load_bits == 128


def test_sass_resources():
    """The usage of the kernel is read, and its absence is an error."""
    usage = " Function attend:\n  REG:80 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:432 TEXTURE:0"
    assert parse_resources(usage) == {"REG": 80, "STACK": 16, "SHARED": 1024, "LOCAL": 0}
    with pytest.raises(ValueError, match="no resource usage"):
        parse_resources("cuobjdump info : no kernel")


def test_amdgcn_widths_and_loop():
    """Directives and comments are no code, scalar loads no data, and waits are not counted."""
    listing = parse_amdgcn(AMDGCN)
    assert len(listing) == 10
    assert listing.store_bits == 128
    assert listing.spill_bytes == 8
    loop = listing.main_loop()
    assert loop is not None
    assert len(loop) == 6
    assert loop.loaded_bytes == 4 + 16 + 16
    assert loop.load_bits == 128


def test_amdgcn_metadata():
    """Registers and spills stand in the metadata, and its absence is an error."""
    metadata = parse_metadata(AMDGCN)
    assert metadata["vgpr_count"] == 160
    assert metadata["vgpr_spill_count"] == 3
    assert metadata["private_segment_fixed_size"] == 16
    with pytest.raises(ValueError, match="no kernel metadata"):
        parse_metadata("attend:\n\ts_endpgm\n")


def _load(bits: int) -> Instruction:
    return Instruction("load", load_bits=bits)


_DOT = Instruction("dot", is_matrix=True)
_ADD = Instruction("add", is_float=True)


def _branch(target: int) -> Instruction:
    return Instruction("branch", target=target)


def test_narrow_loads_that_matter_are_told_from_those_that_do_not():
    """One table entry beside wide loads is no narrow load; half of the bytes are."""
    assert Listing([_load(32), _load(128), _load(128)]).load_bits == 128
    assert Listing([_load(64), _load(64), _load(128)]).load_bits == 64
    assert Listing([_ADD]).load_bits == 0


def test_outer_loops_are_not_innermost():
    """A loop around a loop is left out; code after the inner branch is the outer's."""
    code = [_ADD, _load(128), _DOT, _branch(1), _ADD, _branch(0)]
    assert [len(loop) for loop in Listing(code).innermost_loops()] == [3]


def test_main_loop_is_the_unmasked_one():
    """Of two loops over the same bytes, the one with fewer instructions is the steady one."""
    masked = [_load(128), _DOT, _ADD, _ADD, _branch(0)]
    steady = [_load(128), _DOT, _ADD, _branch(5)]
    loop = Listing([*masked, *steady]).main_loop()
    assert loop is not None
    assert len(loop) == 4


def test_main_loop_uses_the_matrix_units_if_any_does():
    """A short loop that sums up partial results is not the one over K/V."""
    code = [_load(128), _ADD, _branch(0), _load(128), _DOT, _ADD, _ADD, _branch(3)]
    loop = Listing(code).main_loop()
    assert loop is not None
    assert loop.num_matrix == 1
    assert Listing([_load(128), _branch(0)]).main_loop() is None
