"""Documents for training and whole held-out files that training never sees.

Kinds: `code`, `english`, `other` (German, French, Spanish) and `chat`. A file is held out as a
whole, with its docstrings and the conversations that would be made from it.
"""

from __future__ import annotations

import collections
import dataclasses
import gettext
import random

from tiny_moe_training import chat, prose
from tiny_moe_training.sources import Source, TextFile

KINDS = ("code", "english", "other", "chat")
HELDOUT_KINDS = ("code", "english", "other")
HELDOUT_BYTES = {"code": 80_000, "english": 80_000, "other": 60_000}
# Held-out text is redistributed with the model, so it comes from few sources, whose licences fit
# on a page.
HELDOUT_SOURCES = (
    "Python standard library",
    "Python documentation",
    "django",
    "wagtail",
    "jupyterlab-language-pack-de-de",
    "jupyterlab-language-pack-fr-fr",
    "jupyterlab-language-pack-es-es",
)
HELDOUT_FILE_BYTES = (1_500, 14_000)
MIN_DOCUMENT_CHARACTERS = 200


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training documents by kind, one held-out text by kind, and where all of it came from."""

    documents: dict[str, list[str]]
    heldout: dict[str, str]
    heldout_files: dict[str, list[TextFile]]
    bytes_by_source: dict[Source, int]


@dataclasses.dataclass(frozen=True)
class _Parsed:
    file: TextFile
    code: str = ""
    english: str = ""
    other: str = ""
    entries: tuple[prose.Entry, ...] = ()
    messages: dict[str, str] = dataclasses.field(default_factory=dict)

    def heldout_text(self, kind: str) -> str:
        # English is held out from pages only: a page is one text, docstrings are fragments.
        if kind == "english" and self.file.kind != "pages":
            return ""
        if self.file.source.name not in HELDOUT_SOURCES:
            return ""
        return {"code": self.code, "english": self.english, "other": self.other}[kind]


def build(files: list[TextFile], seed: int) -> Corpus:
    """Reads, cleans and splits all files; the same files and seed give the same corpus."""
    parsed = [_parse(file) for file in files]
    heldout_names, heldout, heldout_files = _hold_out(parsed)
    hidden = {m for p in parsed if p.file.name in heldout_names for m in p.messages.values()}
    training = [p for p in parsed if p.file.name not in heldout_names]
    chance = random.Random(seed)
    documents: dict[str, list[str]] = {kind: [] for kind in KINDS}
    used: collections.Counter[Source] = collections.Counter()
    for p in training:
        messages = {k: v for k, v in p.messages.items() if v not in hidden}
        other = "\n".join(messages.values())
        documents["code"].append(p.code)
        documents["english"].append(p.english)
        documents["other"].append(other)
        documents["chat"] += chat.about_entries(list(p.entries), chance)
        documents["chat"] += chat.about_code(p.code, chance) if p.code else []
        documents["chat"] += chat.about_translations(messages, p.file.language, chance)
        used[p.file.source] += len((p.code + p.english + other).encode())
    for kind in ("code", "english", "other"):
        documents[kind] = [d for d in documents[kind] if len(d) >= MIN_DOCUMENT_CHARACTERS]
    for kind in KINDS:
        chance.shuffle(documents[kind])
    return Corpus(documents, heldout, heldout_files, dict(used))


def _parse(file: TextFile) -> _Parsed:
    if file.kind == "catalogue":
        messages = _messages(file)
        return _Parsed(file, other="\n".join(messages.values()), messages=messages)
    text = file.path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")
    if file.kind == "pages":
        english, entries = prose.read_page(text)
        return _Parsed(file, english=english, entries=tuple(entries))
    english, entries = prose.read_docstrings(text)
    return _Parsed(file, code=text, english=english, entries=tuple(entries))


def _messages(file: TextFile) -> dict[str, str]:
    """Message and translation; those with placeholders, markup or fewer than 2 words are left
    out."""
    with file.path.open("rb") as stream:
        catalogue = vars(gettext.GNUTranslations(stream))["_catalog"]
    return {
        message: translation
        for message, translation in catalogue.items()
        if isinstance(message, str)
        and message  # the empty message is the catalogue's header
        and translation
        and translation != message
        and len(translation.split()) >= 2
        and not any(mark in message for mark in ("%(", "%s", "{", "<", "\n"))
    }


def _hold_out(parsed: list[_Parsed]) -> tuple[set[str], dict[str, str], dict[str, list[TextFile]]]:
    low, high = HELDOUT_FILE_BYTES
    names: set[str] = set()
    texts: dict[str, str] = {}
    files: dict[str, list[TextFile]] = {}
    for kind in HELDOUT_KINDS:
        chosen: list[_Parsed] = []
        size_bytes = 0
        for p in sorted(parsed, key=lambda p: p.file.order()):
            length = len(p.heldout_text(kind).encode())
            if low <= length <= high and size_bytes + length <= HELDOUT_BYTES[kind] + high // 2:
                chosen.append(p)
                size_bytes += length
            if size_bytes >= HELDOUT_BYTES[kind]:
                break
        texts[kind] = "\n\n".join(p.heldout_text(kind).strip() for p in chosen) + "\n"
        files[kind] = [p.file for p in chosen]
        names |= {p.file.name for p in chosen}
    return names, texts, files
