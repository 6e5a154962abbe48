"""What holds for every file: size, no traces of the machine it was written on, live links."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 75
# A path of one machine: never of use to anybody else.
MACHINE_PATH = re.compile(r"(?<![\w.}-])/(?:work|root|home/[a-z]\w*|Users/\w+)/")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From the signature to the end, without the docstring."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def read_text(path: Path) -> str | None:
    """The text of a file, None if it is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def test_no_file_outgrows_a_reader(python_files, root):
    """A module that needs more wants a second module."""
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files}
    assert sizes
    long = {
        str(path.relative_to(root)): size for path, size in sizes.items() if size > MAX_FILE_LINES
    }
    assert long == {}


def test_no_function_outgrows_a_screen(python_files, root):
    """Its steps want names."""
    long = {
        f"{path.relative_to(root)}:{function.lineno} {function.name}": num_code_lines(function)
        for path in python_files
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
        if num_code_lines(function) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_no_file_names_a_path_of_one_machine(files, root):
    """Code, documents and configuration work anywhere."""
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip()[:100]}"
        for path in files
        for number, line in enumerate((read_text(path) or "").splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_links_between_documents_lead_somewhere(files, root):
    """A renamed file takes its links with it."""
    targets = [
        (path, (match[1] or match[2]).partition("#")[0])
        for path in files
        if path.suffix == ".md"
        for match in LINK.finditer(path.read_text(encoding="utf-8"))
    ]
    dead = [
        f"{path.relative_to(root)}: {target}"
        for path, target in targets
        if target and not re.match(r"[a-z]+:", target) and not (path.parent / target).exists()
    ]
    assert dead == []
