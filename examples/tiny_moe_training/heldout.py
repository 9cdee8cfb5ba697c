"""Keeps the held-out texts beside the model, with the licences of their sources."""

from __future__ import annotations

from pathlib import Path

from tiny_moe_training.corpus import HELDOUT_KINDS, Corpus

ABOUT = """\
The texts in this folder are parts of the works below: unchanged (code.txt), without markup
(english.txt) or as lists of messages (other.txt).
"""


def write(folder: Path, corpus: Corpus) -> None:
    """Writes code.txt, english.txt, other.txt and LICENCES.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, text in corpus.heldout.items():
        (folder / f"{kind}.txt").write_text(text, encoding="utf-8")
    files = [file for kind in HELDOUT_KINDS for file in corpus.heldout_files[kind]]
    parts = [ABOUT]
    for licence_text in dict.fromkeys(file.source.licence_text for file in files):
        same = [file for file in files if file.source.licence_text == licence_text]
        parts.append("=" * 80)
        for source in dict.fromkeys(file.source for file in same):
            parts.append(f"{source.name} {source.version} ({source.licence}):")
            parts += [f"  {file.name}" for file in same if file.source == source]
        parts.append(f"\n{licence_text.strip()}\n")
    (folder / "LICENCES.txt").write_text("\n".join(parts), encoding="utf-8")


def read(folder: Path) -> dict[str, str]:
    """The held-out texts by kind."""
    return {kind: (folder / f"{kind}.txt").read_text(encoding="utf-8") for kind in HELDOUT_KINDS}
