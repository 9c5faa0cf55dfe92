"""A kernel's key changes with the modules that make the kernel, and with no others."""

import ast
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import foo_ops.ops
from foo_ops.kernels.compiler import cache, sources
from foo_ops.kernels.compiler.kernel import KERNELS

PROGRAM = Path(__file__).parents[1] / "support/kernel_codes.py"
SCORE_MOD = (
    "attention_program 0 0\n\nfloat32 input score\nint32 input query\nint32 input key\n"
    "int32 sub 1 2\nfloat32 cast 3\nfloat32 exp 4\nfloat32 add 0 5\noutput 6\n\n\n\n"
)
CACHES = "bfloat16-4d,bfloat16-4d,bfloat16-4d,bfloat16-4d"
# Compiled in less than a second each.
QUICK = {
    "abs": ("foo::abs", "float32"),
    "silu_mul": ("foo::silu_mul", "bfloat16"),
    "rms_norm": ("foo::rms_norm", "float32-2d,float32-1d,float32-2d"),
    "cache_append": ("foo::cache_append", f"{CACHES},int64-1d,none"),
    "score_mod": (SCORE_MOD, "float32"),
    "sum_chunks": ("attention_sum_chunks", "float32"),
    "dropout_mask": ("attention_dropout_mask", "float32"),
    "linear_finish": ("linear_finish.gelu", "bfloat16"),
}
KERNELS_OF = QUICK | {
    "forward": ("attention_forward.without_options", "bfloat16"),
    "backward": ("attention_backward.programs", "float32"),
    "decode": ("attention_decode.int8_cache", "bfloat16"),
    "merge": ("attention_merge", "float32"),
    "linear": ("linear_product", "float32"),
    "int4": ("linear_int4_few_rows.64", "float32"),
    "int8": ("linear_int8_product.groups", "bfloat16"),
    "cross_entropy": ("cross_entropy_gradient", "float32"),
}


def modules_of(name):
    """Return the modules in a kernel's key, without the package's name."""
    kernel, signature = KERNELS_OF[name]
    found = sources.closure(KERNELS[kernel].fingerprint(signature).modules)
    return {it.removeprefix(f"{sources.PACKAGE}.") for it in found}


def kernels_with(module):
    return {name for name in KERNELS_OF if module in modules_of(name)}


USERS = {"abs", "silu_mul", "rms_norm", "cache_append"}
ATTENTION = {"forward", "backward", "decode", "dropout_mask", "merge", "sum_chunks"}
LINEAR = {"linear_finish", "linear", "int4", "int8", "cross_entropy"}


@pytest.mark.parametrize(
    ("module", "kernels"),
    [
        ("attention.scores", ATTENTION),
        ("attention.softmax", ATTENTION),
        ("attention.forward", {"forward", "merge", "dropout_mask"}),
        ("attention.decode", {"decode"}),
        ("attention.programs", {*ATTENTION, "score_mod"}),
        ("linear.product", LINEAR),
        ("linear.cross_entropy", {"cross_entropy"}),
        ("user.elementwise", {"abs", "silu_mul"}),
        ("user.tile", {"rms_norm", "cache_append"}),
        ("user.sources", USERS),
        ("interpret.kernels", set()),
        ("linear.few_rows", {"int4", "int8"}),
        ("lang.dot", set()),
        # Numba calls it for math.lgamma in any kernel.
        ("math.special", set(KERNELS_OF)),
        ("compiler.numba_target.passes", set(KERNELS_OF)),
        ("compiler.processor", set(KERNELS_OF)),
        ("flex.program", {*ATTENTION, "score_mod"}),
        # The module words messages for users' kernels.
        ("compiler.reasons", USERS),
        ("compiler.cache", set()),
    ],
)
def test_modules_count_for_the_kernels_that_they_make(module, kernels):
    assert kernels_with(module) == kernels


@pytest.mark.parametrize("module", ["attention.scores", "compiler.emit"])
def test_keys_change_with_the_sources(monkeypatch, module):
    def keys():
        sources.digest.cache_clear()
        sources._read.cache_clear()
        return {name: cache._key(KERNELS[it], code) for name, (it, code) in KERNELS_OF.items()}

    before, source = keys(), sources.source
    assert len(set(before.values())) == len(before)
    name = f"{sources.PACKAGE}.{module}"
    monkeypatch.setattr(sources, "source", lambda it: source(it) + (b"\n" if it == name else b""))
    after = keys()
    monkeypatch.undo()
    assert keys() == before
    assert {name for name in before if before[name] != after[name]} == kernels_with(module)


@pytest.mark.parametrize("version", ["_NUMBA", "_NUMPY"])
def test_versions_count(monkeypatch, version):
    kernel = KERNELS["foo::abs"]
    before = cache._key(kernel, "float32")
    monkeypatch.setattr(cache, version, "99.0")
    assert cache._key(kernel, "float32") != before


def test_the_version_counts_where_there_are_no_sources(monkeypatch):
    """For example in a program packed into one file."""
    monkeypatch.setattr(sources, "MODULES", frozenset())
    digest = sources.digest.__wrapped__
    before = digest(frozenset())
    monkeypatch.setattr(sources, "__version__", "99.0")
    assert digest(frozenset()) != before


# -------------------------------------------------------------------------------- edits of a copy


class Copy:
    """A copy of the package, and a process that compiles its kernels."""

    def __init__(self, folder):
        self._package = folder / "foo_ops"
        shutil.copytree(Path(foo_ops.__file__).parent, self._package, ignore=_without_cpp)
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # An edit of modules imported before does not affect the code, but it does affect the keys.
        imported = json.loads(self._process.stdout.readline())
        self.imported = {it.removeprefix(f"{sources.PACKAGE}.") for it in imported}
        self._before = {}

    def text(self, module):
        return self._path(module).read_text()

    def _path(self, module):
        path = self._package.joinpath("kernels", *module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def made(self, names):
        """Compile kernels in one process, and return their keys and codes."""
        return self._made(None, names)[0]

    def before(self, names):
        """Return keys and codes of kernels before any edit; each is compiled once."""
        missing = [name for name in names if name not in self._before]
        self._before |= dict(zip(missing, self.made(missing)))
        return {name: self._before[name] for name in names}

    def after(self, module, text, names):
        """Return keys and codes of kernels after an edit of a module."""
        path = self._path(module).relative_to(self._package / "kernels")
        return dict(zip(names, self._made((str(path), text), names)[0], strict=True))

    def modules(self, name):
        """Return the modules that are imported to generate a kernel's IR."""
        ((_, code),), modules = self._made(None, [name], emits=False)
        assert "Error" not in code
        return {it.removeprefix(f"{sources.PACKAGE}.") for it in modules}

    def _made(self, edit, names, emits=True):
        request = json.dumps((edit, [KERNELS_OF[name] for name in names], emits))
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def _without_cpp(folder, names):
    return [name for name in names if name == "csrc"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Provide a copy with its own process, which sees the copy's sources."""
    made = Copy(tmp_path_factory.mktemp("copy"))
    yield made
    made.close()


NEXT = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Lt: ast.LtE, ast.Eq: ast.NotEq}


def edited(text, seed):
    """Change a number or an operator of a module, chosen by the seed."""
    tree = ast.parse(text)
    places = [node for node in ast.walk(tree) if _changed(node) is not None]
    if not places:
        return f"{text}\n# An edit.\n"
    place = random.Random(seed).choice(places)
    vars(place).update(_changed(place))
    return ast.unparse(tree)


def _changed(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return {"value": node.value * 2 + 1}
    if isinstance(node, ast.BinOp) and type(node.op) in NEXT:
        return {"op": NEXT[type(node.op)]()}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in NEXT:
        return {"ops": [NEXT[type(node.ops[0])](), *node.ops[1:]]}
    return None


def check_edit(copy, module, seed, names):
    """Compare keys and codes after an edit, and return the kernels whose code has changed."""
    before = copy.before(names)
    after = copy.after(module, edited(copy.text(module), seed), names)
    keys, codes = ({it for it in names if before[it][i] != after[it][i]} for i in range(2))
    assert keys == kernels_with(module) & set(names)
    assert codes <= keys
    return codes


# Modules that find, cache, load and run kernels, or report their errors. The table of kernels says
# how each is made and with which options; the key itself contains these.
AROUND = {
    *("cache", "fingerprint", "inspection", "interpret", "reasons", "resolve", "sources"),
}
AROUND = {*(f"compiler.{name}" for name in AROUND), "flex", "flex.program", "table"}
OF_USERS = {"user", "user.sources"}


@pytest.mark.parametrize("name", KERNELS_OF)
def test_modules_that_run_count(copy, name):
    """Any module imported to generate a kernel can change its code."""
    around = AROUND if name in USERS else AROUND | OF_USERS
    assert copy.modules(name) | (copy.imported - around) <= modules_of(name)


def test_code_is_the_same_in_each_process(copy):
    """Independent of earlier compilations: Numba numbers a process's functions."""
    alone, behind = copy.made(["merge"]), copy.made(["abs", "sum_chunks", "merge"])
    assert alone[-1] == behind[-1]


# Some edits change no code: those of messages, or for other dtypes.
EDITS = 10


@pytest.mark.parametrize("module", ["attention.scores", "linear.product", "user.tile"])
def test_code_changes_only_with_its_key(copy, module):
    names = {"abs", "score_mod"} | (kernels_with(module) & QUICK.keys())
    assert any(check_edit(copy, module, seed, sorted(names)) for seed in range(EDITS))


MODULES = sorted(it.removeprefix(f"{sources.PACKAGE}.") for it in sources.MODULES)


@pytest.mark.whole(apart=True)
@pytest.mark.parametrize("module", MODULES)
def test_code_changes_only_with_its_key_in_each_module(copy, module):
    check_edit(copy, module, module, QUICK)
