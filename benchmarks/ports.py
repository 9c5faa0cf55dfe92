"""How fast kernels could be on other processors: their inner loops on a model of the ports.

``python -m benchmarks.ports`` compiles kernels for processors by name, whatever machine this is,
and has llvm-mca (in Debian's package llvm-19) simulate their innermost loops. With ``--publish``
it writes a table into docs/architecture.md. Nothing is run or timed. All data is in L1 in the
model, and branches are predicted.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from benchmarks.pages import replace_between_marks

TOOLS = ("llvm-mca", "llvm-objdump")
PACKAGE, VERSION = "llvm-19", 19
ITERATIONS = 1000
PAGE = Path("docs/architecture.md")

# -------------------------------------------------------------------------------------- processors

AVX2 = ("avx", "avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
AMX = ("amx-tile", "amx-bf16", "amx-int8")
STAND_INS = {"vdpbf16ps": "vfmadd231ps"}
"""An instruction whose throughput the model of a Zen 4 has wrong, and one that takes as long."""
# Loads of vectors that compute nothing, with their addresses.
_LOAD = re.compile(r"(?:vmov|vp?broadcast)\S* (\S*\(\S*\)), %[xyz]mm\d+$")


@dataclass(frozen=True)
class Model:
    """The ports of LLVM's processor ``name``, and how many operations begin in a cycle."""

    name: str
    width: int = 6


@dataclass(frozen=True)
class Family:
    """Processors with the same ports.

    Attributes:
        name: the name in tables.
        processor: LLVM's name, for which kernels are compiled.
        features: those that kernels depend on.
        model: the ports that are simulated. LLVM's models of servers from Ice Lake on have one port
            for FMA of 512 bits; these have two, as Skylake's do.
    """

    name: str
    processor: str
    features: tuple[str, ...]
    model: Model

    def environment(self) -> dict[str, str]:
        switches = [*(f"+{it}" for it in self.features), "-prefer-256-bit"]
        return {
            "NUMBA_CPU_NAME": self.processor,
            "NUMBA_CPU_FEATURES": ",".join(switches),
            "FOO_MATRIX_UNIT": "1" if set(AMX) <= set(self.features) else "0",
        }


FAMILIES = (
    Family("Cascade Lake", "cascadelake", (*AVX512, "avx512vnni"), Model("skylake-avx512", 4)),
    Family(
        "Sapphire Rapids",
        "sapphirerapids",
        (*AVX512, "avx512vnni", "avx512bf16"),
        Model("skylake-avx512"),
    ),
    Family("Zen 3", "znver3", AVX2, Model("znver3")),
    Family("Zen 4", "znver4", (*AVX512, "avx512vnni", "avx512bf16"), Model("znver4")),
)
WITH_MATRIX_UNIT = Family(
    "Sapphire Rapids with AMX",
    "sapphirerapids",
    (*AVX512, "avx512vnni", "avx512bf16", *AMX),
    Model("skylake-avx512"),
)

# ------------------------------------------------------------------------------------------- loops

_MULTIPLY_ADD = re.compile(r"vfn?m(?:add|sub)\d+p([sd])|vdpbf16ps|vpdpbusds?$|vpdpwssds?$")
_ROUNDING = re.compile(r"vreducep|vroundp|vrndscalep")
_MAXIMUM = re.compile(r"vmaxp")
_SHUFFLE = re.compile(r"vshuf|vunpck|vperm|vinsert")
_PREFETCH = re.compile(r"prefetch")
_ADDITION, _NARROWING = re.compile(r"vaddps"), re.compile(r"vpmovdw|vcvtneps2bf16")
_BROADCAST_BYTES = {"vbroadcastss": 4, "vpbroadcastd": 4, "vbroadcastsd": 8, "vpbroadcastq": 8}
# Loads of fewer bytes than a register has.
_PART = {"vpmovzxwd": 2, "vpmovsxwd": 2, "vpmovsxbd": 4, "vpmovzxbd": 4, "vcvtph2ps": 2}
_REGISTER_BYTES = {"x": 16, "y": 32, "z": 64}


@dataclass(frozen=True)
class Instruction:
    """An instruction in AT&T's order: its destination comes last."""

    address: int
    name: str
    operands: str

    def target(self) -> int | None:
        """Return the address that a jump leads to."""
        found = re.match(r"0x([0-9a-f]+)$", self.operands) if self.name.startswith("j") else None
        return int(found[1], 16) if found else None

    def width(self) -> int:
        """Return the bytes of the widest register, 0 without vectors."""
        return max(
            (_REGISTER_BYTES[it] for it in re.findall(r"%([xyz])mm", self.operands)), default=0
        )

    def products(self) -> int:
        """Return the number of products that are added up."""
        found = _MULTIPLY_ADD.match(self.name)
        if not found:
            return 0
        if found[1]:
            return self.width() // (4 if found[1] == "s" else 8)
        return self.width() // (1 if "busd" in self.name else 2)

    def loaded_bytes(self) -> int:
        """Return the bytes that a vector instruction loads, except registers that were spilled."""
        source = self.operands.rpartition(",%")[0] or self.operands.rpartition(", %")[0]
        if "(" not in source or "(%rsp" in source or not self.width():
            return 0
        if re.search(r"\{1to\d+\}", source):
            return 8 if self.name.endswith("pd") else 4
        if self.name in _BROADCAST_BYTES:
            return _BROADCAST_BYTES[self.name]
        return self.width() // _PART.get(self.name, 1)

    def for_model(self, is_in_tile: bool) -> str:
        """Return the instruction, or one to which llvm-mca gives the ports that it has.

        The models charge many loads an operation on the ports of multiply-adds, which processors
        do not: loads of the registers that AVX-512 added on Intel's, and broadcasts on AMD's. In
        register tiles they are prefetches: only loads, for which nothing waits.
        """
        text = f"{STAND_INS.get(self.name, self.name)} {self.operands}"
        load = _LOAD.match(text) if is_in_tile else None
        return f"prefetcht0 {load[1]}" if load else text

    def is_broadcast(self) -> bool:
        return self.loaded_bytes() > 0 and (
            self.name in _BROADCAST_BYTES or "{1to" in self.operands
        )


@dataclass(frozen=True)
class Loop:
    """An innermost loop of a kernel."""

    instructions: tuple[Instruction, ...]

    @property
    def products(self) -> int:
        return sum(it.products() for it in self.instructions)

    @property
    def loaded_bytes(self) -> int:
        return sum(it.loaded_bytes() for it in self.instructions)

    def count(self, pattern: re.Pattern[str]) -> int:
        return sum(bool(pattern.match(it.name)) for it in self.instructions)

    def tile(self) -> tuple[int, int] | None:
        """Return the rows and vectors of a register tile whose rows are broadcast."""
        loads = [it for it in self.instructions if it.loaded_bytes()]
        broadcasts = sum(it.is_broadcast() for it in loads)
        vectors, sums = len(loads) - broadcasts, self.count(_MULTIPLY_ADD)
        if not broadcasts or not vectors or sums % vectors or sums % broadcasts:
            return None
        return sums // vectors, sums // broadcasts

    def lanes_and_step(self) -> tuple[int, int]:
        """Return the lanes of a sum, and the numbers that a multiply-add sums over in each."""
        first = next(it for it in self.instructions if it.products())
        lanes = first.width() // (8 if first.name.endswith("pd") else 4)
        return lanes, first.products() // lanes

    def units(self) -> int:
        """Return the vectors of scores that an iteration reads, or 1 for a square."""
        return self.count(_ROUNDING) or self.count(_MAXIMUM) or 1

    def text(self) -> str:
        """Return the loop for llvm-mca."""
        return "".join(f"{it.for_model(bool(self.tile()))}\n" for it in self.instructions)


def instructions_of(listing: str) -> list[Instruction]:
    """Read the text that llvm-objdump prints."""
    found = []
    for line in listing.splitlines():
        match = re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)", line)
        if match:
            operands = re.sub(r"\s*(?:#.*|<[^>]*>)", "", match[3]).strip()
            found.append(Instruction(int(match[1], 16), match[2], operands))
    return found


def innermost_loops(instructions: Sequence[Instruction]) -> list[Loop]:
    """Return the loops that contain no other, in the order of their code."""
    places = {it.address: place for place, it in enumerate(instructions)}
    spans = []
    for place, it in enumerate(instructions):
        target = it.target()
        if target is not None and target <= it.address and target in places:
            spans.append((places[target], place))
    innermost = [
        (first, last)
        for first, last in spans
        if not any(
            first <= begin and end <= last and (begin, end) != (first, last) for begin, end in spans
        )
    ]
    return [Loop(tuple(instructions[first : last + 1])) for first, last in sorted(innermost)]


def tile_loops(loops: Sequence[Loop]) -> list[Loop]:
    """Return the loops of the register tile with most products, and of these, with most vectors."""
    tiles = [(it.products, it.tile() or (0, 0), it) for it in loops if it.tile()]
    most = max(products for products, _, _ in tiles)
    widest = max(tile[1] for products, tile, _ in tiles if products == most)
    return [it for products, tile, it in tiles if products == most and tile[1] == widest]


def exponential_loops(loops: Sequence[Loop]) -> list[Loop]:
    """Return the loop that rounds most exponents at a time, the shortest of them.

    Scores have this loop; others round the exponents of corrections.
    """
    rounding = [it for it in loops if it.count(_ROUNDING)]
    return [min(rounding, key=lambda it: (-it.count(_ROUNDING), len(it.instructions)))]


def maximum_loops(loops: Sequence[Loop]) -> list[Loop]:
    """Return the loop that searches the largest scores: that with most maxima at a time."""
    searching = [it for it in loops if it.count(_MAXIMUM) and not it.count(_ROUNDING)]
    return [max(searching, key=lambda it: it.count(_MAXIMUM))]


def transpose_loops(loops: Sequence[Loop]) -> list[Loop]:
    """Return the loop that transposes squares of numbers in the fewest instructions."""
    squares = [it for it in loops if it.count(_SHUFFLE) >= 16 and not it.products]
    return [min(squares, key=lambda it: len(it.instructions))]


def one_row_loops(loops: Sequence[Loop]) -> list[Loop]:
    """Return the first loop that multiplies and prefetches: later ones take four rows."""
    return [it for it in loops if it.products and it.count(_PREFETCH)][:1]


# ------------------------------------------------------------------------------------- simulation


@dataclass(frozen=True)
class Result:
    """A simulated loop.

    Attributes:
        cycles: of an iteration.
        busiest: the port that is used in most of the cycles.
        use: its use in an iteration, in cycles.
    """

    cycles: float
    busiest: str
    use: float


def tool(name: str) -> str:
    """Return the path of a tool of LLVM; raise a `SystemExit` if it is missing."""
    folders = f"/usr/lib/{PACKAGE}/bin:{os.environ.get('PATH', '')}"
    for candidate in (f"{name}-{VERSION}", name):
        path = shutil.which(candidate, path=folders)
        if path:
            return path
    raise SystemExit(f"{name} is missing: install Debian's package {PACKAGE}")


@functools.cache
def simulate(text: str, model: Model) -> Result:
    """Have llvm-mca run a loop."""
    command = [
        *(tool("llvm-mca"), f"-mcpu={model.name}", f"-iterations={ITERATIONS}"),
        *("-instruction-info=0", f"-dispatch={model.width}"),
    ]
    process = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if process.returncode:
        raise ValueError(f"llvm-mca does not simulate the loop on {model.name}: {process.stderr}")
    return result_of(process.stdout)


def result_of(report: str) -> Result:
    """Read what llvm-mca prints."""
    cycles = re.search(r"^Total Cycles:\s+(\d+)", report, re.MULTILINE)
    iterations = re.search(r"^Iterations:\s+(\d+)", report, re.MULTILINE)
    names = dict(re.findall(r"^\[([\d.]+)\]\s+- (\S+)$", report, re.MULTILINE))
    pressure = re.search(r"^Resource pressure per iteration:\n(.*)\n(.*)\n", report, re.MULTILINE)
    if not (cycles and iterations and names and pressure):
        raise ValueError(f"this is no report of llvm-mca: {report!r}")
    columns, values = (line.split() for line in pressure.groups())
    used = {
        names[column.strip("[]")]: float(value)
        for column, value in zip(columns, values, strict=True)
        if value != "-"
    }
    busiest = max(used, key=lambda name: used[name])
    return Result(int(cycles[1]) / int(iterations[1]), busiest, used[busiest])


def cycles_of_one(loop: Loop, model: Model) -> float:
    """Return the cycles of one of a loop's multiply-adds if nothing else is to do.

    These are as many independent instructions on registers as the processor can overlap.
    """
    name, width = max(
        (STAND_INS.get(it.name, it.name), it.width()) for it in loop.instructions if it.products()
    )
    letter = next(letter for letter, size in _REGISTER_BYTES.items() if size == width)
    targets = range(2, 16)
    text = "".join(f"{name} %{letter}mm0, %{letter}mm1, %{letter}mm{it}\n" for it in targets)
    return simulate(text, model).cycles / len(targets)


def fraction(loop: Loop, model: Model) -> float:
    """Return the multiply-adds' share of a loop's cycles."""
    least = cycles_of_one(loop, model) * loop.count(_MULTIPLY_ADD)
    return least / simulate(loop.text(), model).cycles


def span(values: Sequence[float]) -> str:
    """Return a number, or the smallest and the largest."""
    first, last = f"{min(values):.2f}", f"{max(values):.2f}"
    return first if first == last else f"{first}-{last}"


# ----------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Part:
    """Loops of a kernel that do the same."""

    name: str
    kernel: str
    dtype: str
    choose: Callable[[Sequence[Loop]], list[Loop]]

    def cell(self, loops: Sequence[Loop], model: Model) -> str:
        """Return the share of the loops' products; of other work, the cycles of a unit."""
        if self.choose is tile_loops:
            return span([fraction(it, model) for it in loops])
        cycles = [simulate(it.text(), model).cycles for it in loops]
        if self.choose is one_row_loops:
            rates = [it.loaded_bytes / count for it, count in zip(loops, cycles, strict=True)]
            return f"{rates[0]:.0f} bytes"
        units = [count / it.units() for it, count in zip(loops, cycles, strict=True)]
        return f"{units[0]:.1f} cycles"


FORWARD, BACKWARD = "attention_forward.without_options", "attention_backward.without_options"
PARTS = (
    *(
        part
        for dtype in ("float32", "bfloat16")
        for part in (
            Part("linear, products", "linear_product", dtype, tile_loops),
            Part("attention forward, products", FORWARD, dtype, tile_loops),
            Part("attention forward, exponentials", FORWARD, dtype, exponential_loops),
            Part("attention backward, products", BACKWARD, dtype, tile_loops),
            Part("attention backward, exponentials", BACKWARD, dtype, exponential_loops),
            Part("linear, packing", "linear_product", dtype, transpose_loops),
        )
    ),
    Part("experts, products", "linear_product.silu_mul", "bfloat16", tile_loops),
    Part("linear, one row", "linear_few_rows", "bfloat16", one_row_loops),
    Part("linear_int8, one row", "linear_int8_few_rows", "bfloat16", one_row_loops),
    Part("linear_int4, one row", "linear_int4_few_rows.32", "bfloat16", one_row_loops),
)


def compiled(family: Family) -> Sequence[tuple[str, str]]:
    """Return the kernels that are compiled for a family, with their dtypes."""
    if family is WITH_MATRIX_UNIT:
        return tuple(dict.fromkeys((it.kernel, "bfloat16") for it in MATRIX_CALLS))
    return tuple(dict.fromkeys((part.kernel, part.dtype) for part in PARTS))


def emit(folder: Path, kernels: Sequence[tuple[str, str]]) -> None:
    """Compile kernels for the processor that NUMBA_CPU_NAME names, with their dtypes."""
    import foo_ops.kernels.table  # noqa: F401
    from foo_ops.kernels.compiler import processor
    from foo_ops.kernels.compiler.emit import compile_kernel
    from foo_ops.kernels.compiler.kernel import KERNELS

    # This machine may have no matrix unit. The code is not run.
    with mock.patch.object(processor, "_ask_for_tiles", return_value=True):
        for kernel, dtype in kernels:
            code = compile_kernel(functools.partial(KERNELS[kernel].build, dtype))
            (folder / f"{kernel}-{dtype}.o").write_bytes(code)


def loops_of(family: Family) -> dict[tuple[str, str], list[Loop]]:
    """Compile the kernels in a process of their own; return the loops of each."""
    kernels = compiled(family)
    with tempfile.TemporaryDirectory() as name:
        names = [f"{kernel}-{dtype}" for kernel, dtype in kernels]
        subprocess.run(
            [sys.executable, "-m", "benchmarks.ports", "--emit", name, *names],
            env={**os.environ, **family.environment()},
            check=True,
        )
        return {
            (kernel, dtype): innermost_loops(disassemble(Path(name) / f"{kernel}-{dtype}.o"))
            for kernel, dtype in kernels
        }


def disassemble(path: Path) -> list[Instruction]:
    command = [tool("llvm-objdump"), "-d", "--no-show-raw-insn", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return instructions_of(listing)


# ------------------------------------------------------------------------------------- whole calls


HEAD = 64


@dataclass(frozen=True)
class Call:
    """A call whose time is that of some loops.

    Attributes:
        name: the name in the table.
        kernel: the kernel.
        dtype: its dtype.
        multiply_adds: their number in a unit of work, a vector of scores or a packed square of
            weights, from the lanes of a vector and the numbers that a multiply-add sums over.
        others: choose the loops that run once for a unit of work.
    """

    name: str
    kernel: str
    dtype: str
    multiply_adds: Callable[[int, int], int]
    others: tuple[Callable[[Sequence[Loop]], list[Loop]], ...]


def attention(dtype: str, backward: bool = False) -> Call:
    """Attention with heads of 64: two products for each score, or five for its gradients."""
    products = 5 if backward else 2
    return Call(
        f"attention {'backward' if backward else 'forward'}",
        BACKWARD if backward else FORWARD,
        dtype,
        lambda lanes, step: products * HEAD // step,
        (exponential_loops,) if backward else (maximum_loops, exponential_loops),
    )


def linear(dtype: str, rows: int) -> Call:
    """A linear layer, whose weights are packed once for as many rows."""
    return Call(
        f"linear, {rows} rows", "linear_product", dtype, lambda lanes, step: rows * lanes,
        (transpose_loops,),
    )  # fmt: skip


# Blocks of more rows are cut into blocks of 512.
CALLS = tuple(
    call
    for dtype in ("float32", "bfloat16")
    for call in (
        linear(dtype, 64), linear(dtype, 512), attention(dtype), attention(dtype, backward=True)
    )
)  # fmt: skip


def prediction(call: Call, loops: Sequence[Loop], model: Model) -> float:
    """Return the fraction of the multiply-adds' peak that a call reaches."""
    tiles = tile_loops(loops)
    lanes, step = tiles[0].lanes_and_step()
    count = call.multiply_adds(lanes, step)
    each = sum(simulate(it.text(), model).cycles / it.count(_MULTIPLY_ADD) for it in tiles)
    others = sum(
        simulate(it.text(), model).cycles / it.units()
        for choose in call.others
        for it in choose(loops)[:1]
    )
    return count * cycles_of_one(tiles[0], model) / (count * each / len(tiles) + others)


# ------------------------------------------------------------------------------------- matrix unit

# LLVM's models know nothing of AMX. These are the cycles between two instructions of a kind that
# Intel's optimization reference manual (248966, "Intel AMX") has for registers of 16 rows in L1. A
# product's result can be used 52 cycles after its start, a load's 45.
DOT_CYCLES, LOAD_CYCLES, STORE_CYCLES = 16, 8, 16


@dataclass(frozen=True)
class Product:
    """A product on a matrix unit, by two by two registers of sums.

    Attributes:
        rows, columns, depth: its size, in multiples of 32.
        accumulates: the share of the sums that are loaded first.
    """

    rows: int
    columns: int
    depth: int
    accumulates: float = 0.0

    @property
    def busy(self) -> float:
        """Return the cycles in which registers are multiplied. Loads of factors take half of it."""
        return self.rows / 16 * self.columns / 16 * self.depth / 32 * DOT_CYCLES

    @property
    def sums(self) -> float:
        """Return the cycles of loads and stores of sums."""
        return self.rows / 16 * self.columns / 16 * (LOAD_CYCLES * self.accumulates + STORE_CYCLES)


@dataclass(frozen=True)
class MatrixCall:
    """Work of a call on a matrix unit.

    Attributes:
        name: the name in the table.
        kernel: the kernel, for bfloat16.
        products: its products.
        vectors: choose the loops of its other work, each with the number of their units.
        pipelined: the number of its first products that are computed beside the other work, except
            for a share of 1 / panels.
        panels: the panels of a tile.
        measured: the fraction of the peak that was reached on one of two cores of an Intel with
            AMX, a Granite Rapids by its caches, on 2026-11-30.
    """

    name: str
    kernel: str
    products: tuple[Product, ...]
    vectors: tuple[tuple[Callable[[Sequence[Loop]], list[Loop]], float], ...]
    pipelined: int
    panels: int
    measured: float

    def cells(self, loops: Sequence[Loop], model: Model) -> list[str]:
        """Return cycles of products, sums and vectors, and the fractions of the peak.

        The fractions are of one after the other, of the kernel, of all at the same time, and the
        one that was measured.
        """
        busy, sums = (sum(getattr(it, name) for it in self.products) for name in ("busy", "sums"))
        vectors = sum(
            count * simulate(it.text(), model).cycles / it.units()
            for choose, count in self.vectors
            for it in choose(loops)[:1]
        )
        beside = sum(it.busy + it.sums for it in self.products[: self.pipelined])
        beside *= 1 - 1 / self.panels
        times = (
            busy + sums + vectors,
            busy + sums - beside + max(vectors, beside),
            max(busy, sums, vectors),
        )
        fractions = (*(busy / it for it in times), self.measured)
        return [*(f"{it:.0f}" for it in (busy, sums, vectors)), *(f"{it:.2f}" for it in fractions)]


def rounding_loops(loops: Sequence[Loop]) -> list[Loop]:
    """Return the loop that adds a bias to a vector of sums, and rounds it to bfloat16."""
    return [it for it in loops if it.count(_ADDITION) and it.count(_NARROWING)][:1]


KEYS, QUERIES, LANES = 128, 128, 16
SCORES = KEYS * QUERIES // LANES
"""Vectors of scores of a tile of keys and two panels of queries."""
SIDE, SECTION, SECTIONS = 512, 256, 4
"""The rows and columns of a block of a linear layer, the depth that is summed over at a time, and
the sections of a layer of 1024, after which sums are written."""

MATRIX_CALLS = (
    MatrixCall(
        "attention forward",
        FORWARD,
        (Product(KEYS, QUERIES, HEAD), Product(HEAD, QUERIES, KEYS, accumulates=1)),
        ((maximum_loops, SCORES), (exponential_loops, SCORES)),
        *(0, 1, 0.15),
    ),
    MatrixCall(
        "attention backward",
        BACKWARD,
        (
            *(2 * (Product(KEYS, QUERIES, HEAD),)),
            Product(HEAD, QUERIES, KEYS, accumulates=1),
            *(2 * (Product(KEYS, HEAD, QUERIES, accumulates=1),)),
        ),
        ((exponential_loops, SCORES),),
        *(3, 2, 0.15),
    ),
    MatrixCall(
        "linear, 1024 x 1024 x 2816",
        "linear_product",
        (Product(SIDE, SIDE, SECTION, accumulates=1 - 1 / SECTIONS),),
        (
            # Its weights are multiplied in place by the packed input, and its output is transposed,
            # by as many squares as the input has.
            (transpose_loops, 2 * (SIDE // LANES) * (SECTION // 2 // LANES)),
            (rounding_loops, SIDE * SIDE / LANES / SECTIONS),
        ),
        *(0, 1, 0.27),
    ),
)


# ------------------------------------------------------------------------------------------ tables


def details(family: Family, loops: dict[tuple[str, str], list[Loop]]) -> Iterator[str]:
    """Describe the loops of each part."""
    yield f"{family.name}, ports of {family.model.name}"
    for part in PARTS:
        for loop in part.choose(loops[part.kernel, part.dtype]):
            result, tile = simulate(loop.text(), family.model), loop.tile()
            shape = f", tile {tile[0]} x {tile[1]}" if tile else ""
            line = (
                f"  {part.name}, {part.dtype}{shape}: {result.cycles:.1f} cycles, "
                f"{result.busiest} used in {result.use:.1f}"
            )
            if loop.products:
                rate = loop.products / result.cycles
                line += (
                    f", {rate:.1f} of {rate / fraction(loop, family.model):.1f} products a cycle, "
                    f"{loop.loaded_bytes / loop.products:.2f} bytes loaded a product"
                )
            yield line


def table(results: dict[str, dict[tuple[str, str], list[Loop]]]) -> str:
    """Fractions of the peak for each family, in Markdown."""
    lines = [
        f"| of the peak of multiply-adds | {' | '.join(it.name for it in FAMILIES)} |",
        f"| --- |{' ---: |' * len(FAMILIES)}",
    ]
    for part in PARTS:
        cells = []
        for family in FAMILIES:
            loops = part.choose(results[family.name][part.kernel, part.dtype])
            cells.append(part.cell(loops, family.model))
        lines.append(f"| {part.name}, {part.dtype} | {' | '.join(cells)} |")
    for call in CALLS:
        cells = [
            f"{prediction(call, results[it.name][call.kernel, call.dtype], it.model):.2f}"
            for it in FAMILIES
        ]
        lines.append(f"| all of {call.name}, {call.dtype} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def matrix_table(loops: dict[tuple[str, str], list[Loop]]) -> str:
    """Cycles and fractions of the matrix unit's peak, in Markdown."""
    names = (
        *("products", "sums", "vectors", "one after the other", "pipelined", "all at once"),
        "measured",
    )
    lines = [
        f"| of the peak of the matrix unit, bfloat16 | {' | '.join(names)} |",
        f"| --- |{' ---: |' * len(names)}",
    ]
    for call in MATRIX_CALLS:
        cells = call.cells(loops[call.kernel, "bfloat16"], WITH_MATRIX_UNIT.model)
        lines.append(f"| {call.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--publish", action="store_true", help=f"write the table into {PAGE}")
    parser.add_argument("--emit", metavar="FOLDER", type=Path, help="only compile the kernels")
    parser.add_argument("kernels", nargs="*", metavar="KERNEL-DTYPE", help="those to compile")
    options = parser.parse_args()
    if options.emit:
        names = [name.rpartition("-") for name in options.kernels]
        emit(options.emit, [(kernel, dtype) for kernel, _, dtype in names])
        return
    for name in TOOLS:
        tool(name)
    results = {it.name: loops_of(it) for it in FAMILIES}
    for family in FAMILIES:
        print(*details(family, results[family.name]), sep="\n")
    text = table(results) + "\n" + matrix_table(loops_of(WITH_MATRIX_UNIT))
    if options.publish:
        replace_between_marks(PAGE, "ports", text)
    print(text, end="")


if __name__ == "__main__":
    main()
