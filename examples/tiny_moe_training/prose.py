"""Turns documentation into plain prose: paragraphs of sentences without markup, code and paths.

Raw documentation makes a small model babble file lists and tables, so paragraphs that do not read
like sentences are dropped. `corpus` uses the pages and docstrings; `chat` uses the entries
(what is said about one function) as answers.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap

# Directives whose body is text about something; all others are dropped with their body.
SPOKEN = frozenset(
    "note warning tip seealso versionchanged versionadded deprecated function method class "
    "classmethod staticmethod attribute data exception module impl-detail describe option "
    "coroutinefunction decorator glossary rubric opcode".split()
)
NAMED = frozenset("function method class classmethod staticmethod exception module".split())

DIRECTIVE = re.compile(r"^(\s*)\.\.\s*(?:([\w-]+)::\s*(.*))?")
ROLE = re.compile(r":[\w:+-]+:`[!~]?([^`<]*?)(?:\s*<[^`>]*>)?`")
LINK = re.compile(r"`([^`<]*?)\s*<[^`>]*>`__?")
MARKS = re.compile(r"``|\*\*|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)|`_{0,2}")
TITLE_LINE = re.compile(r"^([=\-~^*#\"'+.:_])\1{3,}\s*$")
PLAIN = re.compile(r"[A-Za-z ,.'’]")


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the documentation says first about one name or title."""

    name: str
    text: str
    is_title: bool = False


def is_prose(paragraph: str) -> bool:
    """True for sentences: enough words, nearly only letters, a beginning and an end."""
    if len(paragraph) < 40 or len(paragraph.split()) < 7 or "/" in paragraph.strip("/")[:-1]:
        return False
    if not (paragraph[0].isupper() and paragraph.rstrip()[-1] in ".!?:"):
        return False
    return len(PLAIN.findall(paragraph)) >= 0.93 * len(paragraph)


def without_markup(text: str) -> str:
    """One line of plain words from a reStructuredText paragraph."""
    line = " ".join(text.split())
    line = LINK.sub(r"\1", ROLE.sub(r"\1", line))
    line = MARKS.sub("", line).replace("::", ":").replace("\\", "")
    return line.replace(" -- ", " - ").strip()


def read_page(page: str) -> tuple[str, list[Entry]]:
    """Prose and entries of a reStructuredText page."""
    paragraphs: list[str] = []
    entries: list[Entry] = []
    topic = ""
    for paragraph, name in _paragraphs(page):
        topic = name or topic
        text = without_markup(paragraph)
        if is_prose(text):
            paragraphs.append(text)
            if topic:
                entries.append(Entry(topic, text, is_title=" " in topic))
                topic = ""
    return "\n\n".join(paragraphs), entries


def read_docstrings(code: str) -> tuple[str, list[Entry]]:
    """Prose and entries from the docstrings of a Python file; empty if it does not parse."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return "", []
    paragraphs: list[str] = []
    entries: list[Entry] = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        prose, _ = read_page(ast.get_docstring(node) or "")
        if prose:
            paragraphs.append(prose)
            if not isinstance(node, ast.Module) and not node.name.startswith("_"):
                entries.append(Entry(node.name, prose.split("\n\n")[0]))
    return "\n\n".join(paragraphs), entries


def _paragraphs(page: str) -> list[tuple[str, str]]:
    """(paragraph, name it opens) pairs; code, tables and silent directives are left out."""
    found: list[tuple[str, str]] = []
    lines = textwrap.dedent(page).expandtabs().split("\n")
    skip_deeper_than = -1
    block: list[str] = []
    name = ""

    def close() -> None:
        nonlocal name
        if block and not block[0].lstrip().startswith((">>>", "$", "|", "+-")):
            found.append(("\n".join(block), name))
            name = ""
        block.clear()

    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            ends_in_code = bool(block) and block[-1].rstrip().endswith("::")
            depth = len(block[0]) - len(block[0].lstrip()) if block else 0
            close()
            if ends_in_code:
                skip_deeper_than = depth
            continue
        if skip_deeper_than >= 0:
            if indent > skip_deeper_than:
                continue
            skip_deeper_than = -1
        directive = DIRECTIVE.match(line)
        if directive:
            close()
            kind, argument = directive[2] or "", directive[3] or ""
            if kind not in SPOKEN:
                skip_deeper_than = indent
            elif kind in NAMED:
                name = re.split(r"[(\s]", argument)[0]
        elif TITLE_LINE.match(line):
            title = block[-1].strip() if block else ""
            block.clear()
            if title and i:
                name = without_markup(title).split(" --- ")[-1]
        elif line.lstrip().startswith(":"):
            continue
        else:
            block.append(re.sub(r"^(\s*)(?:[-*#]\.?|\d+\.) ", r"\1", line))
    close()
    return found
