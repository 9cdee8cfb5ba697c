"""Finds training text in what is installed, and refuses text whose licence does not allow it.

Three kinds of files are read: Python sources (the standard library and a fixed list of
distributions), reStructuredText pages of the Python documentation, and gettext catalogues with
translations. Each distribution's licence is read from its own metadata and must be permissive.
`corpus` turns the files into documents; `card` lists the sources.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

MEGABYTE = 1_000_000

# Distribution and the most bytes taken from it, so that no single style of code dominates.
DISTRIBUTIONS: dict[str, int] = {
    "django": 2 * MEGABYTE,
    "wagtail": MEGABYTE,
    "sphinx": MEGABYTE,
    "torch": 2 * MEGABYTE,
    "sympy": MEGABYTE,
    "scipy": MEGABYTE,
    "numpy": MEGABYTE,
    "networkx": MEGABYTE,
    "mypy": MEGABYTE,
    "pip": MEGABYTE,
    "aiohttp": MEGABYTE,
    "anyio": MEGABYTE,
    "attrs": MEGABYTE,
    "click": MEGABYTE,
    "fastapi": MEGABYTE,
    "hatchling": MEGABYTE,
    "httpx": MEGABYTE,
    "jinja2": MEGABYTE,
    "kopf": MEGABYTE,
    "packaging": MEGABYTE,
    "pydantic": MEGABYTE,
    "pytest": MEGABYTE,
    "requests": MEGABYTE,
    "rich": MEGABYTE,
    "starlette": MEGABYTE,
    "urllib3": MEGABYTE,
    "uvicorn": MEGABYTE,
    "jupyterlab-language-pack-de-de": MEGABYTE,
    "jupyterlab-language-pack-fr-fr": MEGABYTE,
    "jupyterlab-language-pack-es-es": MEGABYTE,
}
STANDARD_LIBRARY_BYTES = 6 * MEGABYTE
PYTHON_LICENCE = "PSF-2.0"
LANGUAGES = ("de", "fr", "es")

PERMISSIVE = re.compile(
    r"(?i)^(mit|mit license|bsd.*|.*:: bsd license|apache.*|.*:: apache software license|0bsd|isc.*"
    r"|.*:: mit license|.*:: isc license.*|psf.*|.*python software foundation license|zlib|cc0-1\.0"
    r"|bsl-1\.0|unlicense|llvm-exception|unicode-.*|copyright \(c\) 2023 project jupyter.*)$"
)
# Tables, generated grammars and test data teach no style; they only cost training time.
UNWANTED_FOLDERS = frozenset(
    "test tests testing idlelib encodings lib2to3 pydoc_data turtledemo site-packages "
    "dist-packages migrations _vendor vendor locale typeshed search benchmarks __pycache__ "
    "__phello__ _inductor _vendored".split()
)
MAX_FILE_BYTES = 120_000
MIN_FILE_BYTES = 400


class UnusableSourceError(ValueError):
    """A text source is missing or its licence is not on the permissive list."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One distribution or document collection: what the card says about it."""

    name: str
    version: str
    licence: str
    licence_text: str = dataclasses.field(default="", compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file to read: `kind` is `python`, `pages` or `catalogue`; `name` is stable everywhere."""

    kind: str
    name: str
    path: Path
    source: Source
    language: str = ""

    def order(self) -> str:
        """A hash of the name: a fixed shuffle that does not depend on the machine's folders."""
        return hashlib.sha256(self.name.encode()).hexdigest()


def find_files(package_folders: Iterable[Path], pages_folder: Path) -> list[TextFile]:
    """All usable files, sorted by name. Missing distributions are left out; the card tells which
    were used, and the text differs then.

    Raises UnusableSourceError if the documentation is missing or a licence is not permissive.
    """
    files = list(_limited(_standard_library(), STANDARD_LIBRARY_BYTES))
    files += _pages(pages_folder)
    for distribution in importlib.metadata.distributions(path=[str(p) for p in package_folders]):
        name = distribution.metadata["Name"].lower().replace("_", "-")
        if name in DISTRIBUTIONS:
            found = list(_distribution_files(distribution, name))
            files += _limited([f for f in found if f.kind == "python"], DISTRIBUTIONS[name])
            files += [f for f in found if f.kind == "catalogue"]
    return sorted({file.name: file for file in files}.values(), key=lambda file: file.name)


def licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """The licence expression, else the first licence classifier, else the licence field's first
    line."""
    fields = {key.lower(): value for key, value in metadata.items() if key.lower() != "classifier"}
    if fields.get("license-expression"):
        return str(fields["license-expression"])
    for classifier in metadata.get_all("Classifier") or []:
        if classifier.startswith("License ::"):
            return str(classifier)
    return str(fields.get("license", "")).strip().split("\n")[0]


def is_permissive(licence: str) -> bool:
    """True if every part of the expression is a licence that lets us train and quote."""
    parts = [p.strip(" ()") for p in re.split(r"\b(?:AND|OR|WITH)\b", licence)]
    return all(PERMISSIVE.match(part) for part in parts)


def _python_source(name: str) -> Source:
    path = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    text = path.read_text() if path.exists() else ""
    return Source(name, sysconfig.get_python_version(), PYTHON_LICENCE, text)


def _is_licence_text(path: Path) -> bool:
    return ".dist-info" in str(path) and path.name.upper().startswith(("LICENSE", "LICENCE"))


def _standard_library() -> Iterator[TextFile]:
    root = Path(sysconfig.get_path("stdlib"))
    source = _python_source("Python standard library")
    for path in root.rglob("*.py"):
        if _wanted(path.relative_to(root)):
            yield TextFile("python", f"stdlib/{path.relative_to(root)}", path, source)


def _pages(folder: Path) -> list[TextFile]:
    source = _python_source("Python documentation")
    paths = [p for p in folder.rglob("*.rst.txt") if p.parent.name != "whatsnew"]  # change lists
    if not paths:
        raise UnusableSourceError(
            f"--pages: no *.rst.txt below {folder}; install the Debian package python3-doc or "
            "name the _sources folder of another build of the Python documentation"
        )
    return [TextFile("pages", f"pages/{p.relative_to(folder)}", p, source) for p in paths]


def _distribution_files(
    distribution: importlib.metadata.Distribution, name: str
) -> Iterator[TextFile]:
    licence = licence_of(distribution.metadata)
    if not is_permissive(licence):
        raise UnusableSourceError(
            f"{name}: licence {licence!r} is not on the permissive list; take the distribution "
            "out of DISTRIBUTIONS in sources.py"
        )
    if name.startswith("jupyterlab"):
        licence = "BSD-3-Clause"  # its metadata quotes the licence text instead of naming it
    licence = licence.removeprefix("License :: OSI Approved :: ")
    texts = [f.read_text() for f in distribution.files or [] if _is_licence_text(Path(f))]
    source = Source(name, distribution.version, licence, "\n\n".join(texts))
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file)))
        if file.suffix == ".py" and _wanted(Path(file)):
            yield TextFile("python", f"{name}/{file}", path, source)
        elif file.suffix == ".mo" and (language := _language(file.parts)):
            yield TextFile("catalogue", f"{name}/{file}", path, source, language)


def _wanted(path: Path) -> bool:
    return UNWANTED_FOLDERS.isdisjoint(path.parts) and ".." not in path.parts


def _language(parts: tuple[str, ...]) -> str:
    if "LC_MESSAGES" not in parts:
        return ""
    language = parts[parts.index("LC_MESSAGES") - 1].split("_")
    return language[0] if language[0] in LANGUAGES and language[-1] not in ("AR", "MX") else ""


def _limited(files: Iterable[TextFile], max_bytes: int) -> Iterator[TextFile]:
    total_bytes = 0
    for file in sorted(files, key=TextFile.order):
        size_bytes = file.path.stat().st_size if file.path.exists() else 0
        if MIN_FILE_BYTES <= size_bytes <= MAX_FILE_BYTES and total_bytes < max_bytes:
            total_bytes += size_bytes
            yield file
