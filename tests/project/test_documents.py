"""The Python blocks of the documents run unchanged, and the names in documents exist."""

import json
import re
import textwrap
from pathlib import Path

import pytest
from support.processes import python

REPOSITORY = Path(__file__).parents[2]
# Documents whose blocks form one program, and parts of its output.
PROGRAMS = {
    "docs/kit.md": (
        "tutorial::mish(Tensor x) -> Tensor",
        "log_sum_exp: input must have a dimension, got none",
    ),
    "docs/kit_reference.md": (
        "reduced_error: kind must be 'absolute' or 'square', got 'cubic'",
        "input has 2 dimensions and must be given one index for each, got 1",
        "difference: input.row(0)[5] is outside of input, which has shape [2, 5]",
        "take_rows: indices must be in [0, 5), got 5",
        "mylib::wrong: its kernel cannot be compiled for float32: Unknown attribute 'middle'",
    ),
    "docs/kernels_way.md": (
        "way::leaky_(Tensor(a!) x) -> Tensor(a!)",
        "['way::leaky', 'way::leaky.out', 'way::leaky_']",
        "loop (int64*, int64*, int64, int64, int64*)",
        "\ndefine float @_ZN8__main__5leaky",
        "1 function, ",
        "tensor([-0.2000,  3.0000])\nNumba is imported: False",
    ),
}
PAGES = sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("docs/**/*.md"))
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *PAGES)
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^( *)```sh\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FRONT_PAGES = ("README.md", "docs/index.md")
# Rows and captions of tables whose figures the front pages quote: each figure as in the table, and
# as quoted.
QUOTED = {
    "docs/performance.md": {
        "Llama decoding, bfloat16 | 2": {"3.84": "3.84"},
        "Llama prefill, bfloat16 | 2": {"1.49": "1.49"},
        "Llama training step, bfloat16 | 2": {"1.38": "1.38"},
        "a training step of the demo | 2": {"31319": "31 ms", "44930": "45 ms"},
        "mish forward, bfloat16, 2048 x 4096 | 2": {"1.94": "1.94"},
        "squared_error backward, bfloat16, 2048 x 4096 | 1": {"0.76": "0.76"},
        "abs, no gradient needed | 1": {"1.20": "1.20", "1.04": "1.04"},
        "int4 in groups of 32, bfloat16, 64 x 2816 x 1024 | 1": {"32.6%": "33 %"},
        "int4 in groups of 128, bfloat16, 1024 x 2816 x 1024 | 1": {"2.4%": "2 to 33 %"},
        "attention backward float32 | 2": {"963": "1.0 to"},
        "attention forward bfloat16 | 2": {"1349": "1.3 seconds"},
        "AMD EPYC (znver5)": {"foo_ops 0.1.0": "foo_ops 0.1.0"},
    },
    "docs/performance_zen4.md": {
        "Llama decoding, bfloat16 | 2": {
            "3.67": "3.67",
            "195": "195, 362 and 555",
            "362": "195, 362 and 555",
            "555": "195, 362 and 555",
            "191": "191, 230 and 408",
            "230": "191, 230 and 408",
            "408": "191, 230 and 408",
        },
        "Llama decoding, float32 | 2": {
            "309": "309 and 511",
            "511": "309 and 511",
            "289": "289 and 424",
            "424": "289 and 424",
        },
        "Llama prefill, bfloat16 | 2": {"1.21": "1.21"},
        "Llama training step, bfloat16 | 2": {"1.32": "1.32"},
        "AMD EPYC (znver4)": {"foo_ops 0.2.0": "foo_ops 0.2.0"},
    },
    "docs/performance_avx2.md": {"AMD EPYC (znver3)": {"foo_ops 0.2.0": "(0.2.0)"}},
    "docs/performance_amx.md": {"Intel(R) Xeon(R)": {"foo_ops 0.2.0": "(0.2.0)"}},
}

# Runs each block of a page as a separate module, and reports which failed.
PAGE = """
import json, sys, traceback, types, warnings

has_failed = False
for number, block in enumerate(json.load(sys.stdin)):
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # opcheck of torch 2.14 asks what may be no leaf for its gradient.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        try:
            exec(compile(block, f"<block {number}>", "exec"), main.__dict__)
        except BaseException:
            has_failed = True
            print(f"block {number}:", file=sys.stderr)
            traceback.print_exc()
sys.exit(has_failed)
"""


def text_of(document):
    return (REPOSITORY / document).read_text()


def blocks(document, kind=BLOCK):
    return [textwrap.dedent(block) for _, block in kind.findall(text_of(document))]


@pytest.mark.parametrize("document", [it for it in DOCUMENTS if it not in PROGRAMS and blocks(it)])
def test_blocks_run(document):
    process = python(PAGE, input=json.dumps(blocks(document)))
    assert process.returncode == 0, process.stderr


def test_a_block_that_fails_is_named():
    program = ["x = 1", "print(x)", "import warnings; warnings.warn('careful')", "print('on')"]
    process = python(PAGE, input=json.dumps(program))
    assert (process.returncode, process.stdout) == (1, "on\n")
    named = re.findall(r"^block (\d)|^(\w+: .*)", process.stderr, re.M)
    assert named == [
        *(("1", ""), ("", "NameError: name 'x' is not defined")),
        *(("2", ""), ("", "UserWarning: careful")),
    ]


@pytest.mark.parametrize("document", PROGRAMS)
def test_programs_run(document, tmp_path):
    file = tmp_path / "program.py"
    file.write_text("\n".join(blocks(document)))
    program = f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')"
    process = python(PAGE, input=json.dumps([program]))
    assert process.returncode == 0, process.stderr
    for line in PROGRAMS[document]:
        assert line in process.stdout


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_is_found(document):
    text = text_of(document)
    assert len(blocks(document)) == text.count("```python")
    assert len(blocks(document, SHELL)) == text.count("```sh")


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text_of(document)):
        assert ((REPOSITORY / document).parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_exist(document):
    """Folders and files named in a document exist."""
    for name in re.findall(r"`((?:foo_ops|tests|benchmarks)/[\w./*]*)`", text_of(document)):
        if not name.startswith("benchmarks/results/"):
            assert list(REPOSITORY.glob(name)), name


def commands(document):
    """Return a document's shell lines, and the commands in its sentences."""
    in_sentences = re.findall(r"`((?:make|[.\w/]*python) [^`\n]+)`", text_of(document))
    lines = "\n".join(blocks(document, SHELL)).splitlines()
    return [*in_sentences, *(line.partition(" #")[0] for line in lines)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document):
    targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)
    for command in commands(document):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert target in targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_name_files_and_modules_that_exist(document):
    for command in commands(document):
        for name in re.findall(
            r"(?<![\w./'])(?:foo_ops|tests|benchmarks|examples)/[\w./]+", command
        ):
            assert (REPOSITORY / name).exists(), command
        for name in re.findall(r"-m ((?:foo_ops|benchmarks)[\w.]*)", command):
            module = REPOSITORY / name.replace(".", "/")
            program = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
            assert program.exists(), command


def anchors(text):
    """Return the anchors of a document's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def missing_anchors(document, text):
    """Return a text's links to headings that do not exist; the text belongs to the document."""
    links = re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", text)
    pages = [(REPOSITORY / document).parent / name if name else None for name, _ in links]
    known = [anchors(text if page is None else page.read_text()) for page in pages]
    return [anchor for (_, anchor), names in zip(links, known) if anchor not in names]


@pytest.mark.parametrize("document", [*DOCUMENTS, "CHANGELOG.md"])
def test_links_to_headings_lead_somewhere(document):
    assert missing_anchors(document, text_of(document)) == []


def test_a_link_to_a_missing_heading_would_be_noticed():
    text = "# On `x.y`\n[a](#on-xy) [b](#on) [c](CONTRIBUTING.md#add-an-operator) [d](README.md#no)"
    assert missing_anchors("README.md", text) == ["on", "no"]


def test_front_page_is_short():
    assert text_of("README.md").count("\n") <= 150


@pytest.mark.parametrize("document", FRONT_PAGES)
def test_quoted_figures_stand_in_the_tables(document):
    text = text_of(document)
    for page, rows in QUOTED.items():
        lines = [line.removeprefix("| ") for line in text_of(page).splitlines()]
        for name, figures in rows.items():
            (row,) = [line for line in lines if line.startswith(name)]
            for figure, quoted in figures.items():
                whole = rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)"
                assert re.search(whole, row), (page, name, figure)
                assert quoted in text, quoted


def test_front_pages_have_one_table():
    tables = [text_of(it).split("<!-- figures: ")[1].replace("docs/", "") for it in FRONT_PAGES]
    assert tables[0] == tables[1]
