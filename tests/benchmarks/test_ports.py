"""The model of ports reads listings and reports of LLVM's tools; these need not be installed."""

import shutil

import pytest

from benchmarks import ports
from benchmarks.ports import Family, Instruction, Loop, Model, instructions_of

MODEL, SKYLAKE = Model("model"), Model("skylake-avx512", 4)
LISTING = """
kernel.o:	file format elf64-x86-64

Disassembly of section .text:

0000000000000000 <foo_kernel>:
       0:      	xorl	%ecx, %ecx
       2:      	nopw	(%rax,%rax)
      10:      	vxorps	%xmm0, %xmm0, %xmm0
      20:      	vmovups	(%rsi), %zmm28
      26:      	vmovups	0x40(%rsi), %zmm29
      2c:      	vbroadcastss	(%rdi), %zmm24
      32:      	vfmadd231ps	%zmm28, %zmm24, %zmm0 # zmm0 = (zmm24 * zmm28) + zmm0
      38:      	vfmadd231ps	%zmm29, %zmm24, %zmm1
      3e:      	vbroadcastss	(%rdi,%r13), %zmm24
      44:      	vfmadd231ps	%zmm28, %zmm24, %zmm2
      4a:      	vfmadd231ps	%zmm29, %zmm24, %zmm3
      50:      	vbroadcastss	0x8(%rdi), %zmm24
      56:      	vfmadd231ps	%zmm28, %zmm24, %zmm4
      5c:      	vfmadd231ps	%zmm29, %zmm24, %zmm5
      62:      	vmovups	0x3a0(%rsp), %zmm7
      68:      	decq	%rdx
      6c:      	jne	0x20 <foo_kernel+0x20>
      70:      	vreduceps	$0x1, (%r8), %zmm3
      76:      	vfmadd213ps	%zmm25, %zmm3, %zmm4
      7c:      	decq	%rax
      80:      	jne	0x70 <foo_kernel+0x70>
      82:      	vmaxps	(%r8), %zmm1, %zmm1
      88:      	jg	0x82 <foo_kernel+0x82>
      8a:      	prefetcht1	0x2000(%r9)
      90:      	vpmovzxwd	(%r9), %zmm2
      96:      	vfmadd231ps	(%r10), %zmm2, %zmm3
      9c:      	jg	0x8a <foo_kernel+0x8a>
      9e:      	addq	$0x10, %r12
      a2:      	jl	0x10 <foo_kernel+0x10>
      a8:      	retq
"""

REPORT = """Iterations:        1000
Instructions:      3000
Total Cycles:      2504
Total uOps:        3000

Dispatch Width:    6
uOps Per Cycle:    1.20
IPC:               1.20
Block RThroughput: 2.5


Resources:
[0]   - SKXDivider
[1]   - SKXPort0
[2.0] - SKXPort23
[2.1] - SKXPort23


Resource pressure per iteration:
[0]    [1]    [2.0]  [2.1]
 -     2.50   0.50   0.50

Resource pressure by instruction:
[0]    [1]    [2.0]  [2.1]  Instructions:
 -     2.50   0.50   0.50   vfmadd231ps	(%rax), %zmm1, %zmm2
"""


def loops() -> list[Loop]:
    return ports.innermost_loops(instructions_of(LISTING))


def test_listing_without_comments_and_symbols():
    read = {it.address: it for it in instructions_of(LISTING)}
    assert read[0x32] == Instruction(0x32, "vfmadd231ps", "%zmm28, %zmm24, %zmm0")
    assert read[0x6C].operands == "0x20"
    assert read[0x6C].target() == 0x20
    assert read[0xA8] == Instruction(0xA8, "retq", "")


def test_loops_are_innermost_and_in_the_order_of_their_code():
    begins = [it.instructions[0].address for it in loops()]
    assert begins == [0x20, 0x70, 0x82, 0x8A]
    assert len(loops()[0].instructions) == 14


def test_loops_are_chosen_by_their_instructions():
    tile, exponential, maximum, row = loops()
    assert ports.tile_loops(loops()) == [tile]
    assert ports.exponential_loops(loops()) == [exponential]
    assert ports.maximum_loops(loops()) == [maximum]
    assert ports.one_row_loops(loops()) == [row]


def test_loops_of_scores_are_those_with_most_operations():
    """Loops of corrections are shorter, and round one exponent where pairs of keys have two."""
    short, search = loops()[1], loops()[2]
    pair = Loop(2 * short.instructions)
    assert ports.exponential_loops([short, pair]) == [pair]
    assert ports.maximum_loops([search, Loop(4 * search.instructions), short])[0].units() == 4


def test_register_tile():
    tile = loops()[0]
    assert tile.tile() == (3, 2)
    assert tile.products == 6 * 16
    # Two vectors and three numbers; the spilled register is none of the product's data.
    assert tile.loaded_bytes == 2 * 64 + 3 * 4
    assert tile.lanes_and_step() == (16, 1)


@pytest.mark.parametrize(
    ("name", "operands", "products", "loaded"),
    [
        ("vfmadd231ps", "%ymm1, %ymm2, %ymm3", 8, 0),
        ("vfnmadd213pd", "%zmm1, %zmm2, %zmm3", 8, 0),
        ("vfmadd231ps", "(%rax){1to16}, %zmm2, %zmm3", 16, 4),
        ("vfmadd231ps", "-64(%rax,%rcx,4), %zmm2, %zmm3", 16, 64),
        ("vfmadd231ss", "%xmm1, %xmm2, %xmm3", 0, 0),
        ("vdpbf16ps", "%zmm1, %zmm2, %zmm3", 32, 0),
        ("vpdpbusd", "%zmm1, %zmm2, %zmm3", 64, 0),
        ("vpdpwssd", "%ymm1, %ymm2, %ymm3", 16, 0),
        ("vpmovsxbd", "(%rax), %zmm2", 0, 16),
        ("vmovups", "%zmm2, (%rax)", 0, 0),
        ("movq", "(%rax), %rcx", 0, 0),
        ("leaq", "(%rax,%rcx), %rcx", 0, 0),
    ],
)
def test_products_and_bytes_of_an_instruction(name, operands, products, loaded):
    instruction = Instruction(0, name, operands)
    assert instruction.products() == products
    assert instruction.loaded_bytes() == loaded


def test_loads_of_a_tile_are_only_loads_in_the_model():
    text = loops()[0].text().splitlines()
    assert text[:4] == [
        "prefetcht0 (%rsi)",
        "prefetcht0 0x40(%rsi)",
        "prefetcht0 (%rdi)",
        "vfmadd231ps %zmm28, %zmm24, %zmm0",
    ]
    assert loops()[1].text().startswith("vreduceps $0x1, (%r8), %zmm3\n")
    dot = Instruction(0, "vdpbf16ps", "%zmm1, %zmm2, %zmm3")
    assert dot.for_model(True) == "vfmadd231ps %zmm1, %zmm2, %zmm3"


def test_report():
    result = ports.result_of(REPORT)
    assert (result.cycles, result.busiest, result.use) == (2.504, "SKXPort0", 2.5)
    with pytest.raises(ValueError, match="this is no report of llvm-mca: 'error'"):
        ports.result_of("error")


def test_prediction_adds_loops_of_other_work(monkeypatch):
    tile, exponential, maximum, _ = loops()
    cycles = {tile.text(): 4.0, exponential.text(): 10.0, maximum.text(): 6.0}

    def simulate(text: str, model: Model) -> ports.Result:
        # All else is the 14 independent multiply-adds.
        return ports.Result(cycles.get(text, 7.0), "port", 1.0)

    monkeypatch.setattr(ports, "simulate", simulate)
    assert ports.fraction(tile, MODEL) == 6 * 0.5 / 4
    # For each vector of scores 128 multiply-adds, of 4 / 6 cycles instead of 0.5, and 16 cycles.
    expected = 128 * 0.5 / (128 * 4 / 6 + 16)
    assert ports.prediction(ports.attention("float32"), loops(), MODEL) == pytest.approx(expected)
    # For gradients 320, and an exponential.
    expected = 320 * 0.5 / (320 * 4 / 6 + 10)
    gradients = ports.attention("float32", backward=True)
    assert ports.prediction(gradients, loops(), MODEL) == pytest.approx(expected)


def test_cycles_of_a_matrix_unit():
    product = ports.Product(128, 64, 64, accumulates=0.5)
    # 8 x 4 registers of sums, each of 2 products of registers.
    assert product.busy == 8 * 4 * 2 * 16
    assert product.sums == 8 * 4 * (8 / 2 + 16)


def test_prediction_of_a_matrix_unit(monkeypatch):
    _, exponential, _, _ = loops()
    cycles = {exponential.text(): 10.0}
    monkeypatch.setattr(
        ports, "simulate", lambda text, model: ports.Result(cycles[text], "port", 1.0)
    )
    call = ports.MatrixCall(
        "call", "kernel", (ports.Product(64, 64, 64), ports.Product(64, 64, 64, accumulates=1)),
        ((ports.exponential_loops, 100),), 1, 4, 0.125,
    )  # fmt: skip
    busy, sums, vectors = 1024, 640, 1000
    # The first product and its sums, except for those of one of four panels.
    beside = (512 + 256) * 3 / 4
    times = busy + sums + vectors, busy + sums - beside + vectors, max(busy, sums, vectors)
    fractions = [f"{busy / time:.2f}" for time in times]
    assert call.cells(loops(), MODEL) == [*map(str, (busy, sums, vectors)), *fractions, "0.12"]


def test_span():
    assert ports.span([0.5]) == "0.50"
    assert ports.span([0.9, 0.5, 0.7]) == "0.50-0.90"
    assert ports.span([0.501, 0.499]) == "0.50"


def test_missing_tool(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(SystemExit, match="llvm-mca is missing: install Debian's package llvm-19"):
        ports.tool("llvm-mca")


def test_environment_of_a_family():
    family = Family("name", "haswell", ("avx", "fma"), Model("haswell"))
    assert family.environment() == {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+fma,-prefer-256-bit",
        "FOO_MATRIX_UNIT": "0",
    }


def test_environment_of_a_matrix_unit():
    environment = ports.WITH_MATRIX_UNIT.environment()
    assert environment["FOO_MATRIX_UNIT"] == "1"
    assert "+amx-bf16" in environment["NUMBA_CPU_FEATURES"].split(",")


def has_tools() -> bool:
    try:
        return bool(ports.tool("llvm-mca"))
    except SystemExit:
        return False


@pytest.mark.skipif(not has_tools(), reason="llvm-mca is not installed")
def test_simulation():
    two_ports = ports.cycles_of_one(loops()[0], SKYLAKE)
    assert two_ports == pytest.approx(0.5, rel=0.01)
    assert ports.fraction(loops()[0], SKYLAKE) == pytest.approx(0.75, abs=0.05)
