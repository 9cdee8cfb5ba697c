"""Makes conversations out of documentation, code and translations, in the model's chat template.

A user asks, the assistant answers and ends its turn, so that the template and the end token are
part of what the model learns. `corpus` decides which files may be used.
"""

from __future__ import annotations

import ast
import random
import textwrap

from tiny_moe_training.prose import Entry, is_prose, without_markup
from tiny_moe_training.vocabulary import ASSISTANT, END, USER

TITLE_QUESTIONS = ("Tell me about {name}.", "Explain: {name}", "{name}?", "What about {name}?")
QUESTIONS = (
    "What does {name} do?",
    "Explain {name}.",
    "What is {name}?",
    "Tell me about {name}.",
    "How does {name} work?",
    "Can you explain {name} to me?",
)
REQUESTS = (
    "Write a Python function: {text}",
    "Write Python code. {text}",
    "Show me the code of {name}.",
    "Please write the function {name} in Python.",
    "Implement {name} in Python. {text}",
)
TRANSLATIONS = {
    "de": ("Auf Deutsch: {text}", "Was heißt das auf Deutsch? {text}"),
    "fr": ("En français : {text}", "Comment dit-on en français ? {text}"),
    "es": ("En español: {text}", "¿Cómo se dice en español? {text}"),
}
MAX_ANSWER_CHARACTERS = 900


def conversation(turns: list[tuple[str, str]]) -> str:
    """The text of (question, answer) turns exactly as the chat template renders them."""
    return "".join(
        f"{USER}\n{question}{END}\n{ASSISTANT}\n{answer}{END}\n" for question, answer in turns
    )


def about_entries(entries: list[Entry], chance: random.Random) -> list[str]:
    """Conversations of one to three turns that ask about names of one file."""
    turns = []
    for entry in entries:
        questions = TITLE_QUESTIONS if entry.is_title else QUESTIONS
        turns.append((chance.choice(questions).format(name=entry.name), entry.text))
    return _grouped(turns, chance)


def about_code(code: str, chance: random.Random) -> list[str]:
    """Conversations that ask for functions of one Python file; empty if it does not parse."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return []
    lines = code.split("\n")
    turns = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = without_markup((ast.get_docstring(node) or "").split("\n\n")[0])
        # ast.get_source_segment splits the whole file again for every function.
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if is_prose(first) and len(source) <= MAX_ANSWER_CHARACTERS:
            request = chance.choice(REQUESTS).format(name=node.name, text=first)
            turns.append((request, source))
    return _grouped(turns, chance)


def about_translations(messages: dict[str, str], language: str, chance: random.Random) -> list[str]:
    """Conversations that ask for the translation of a message."""
    return _grouped(
        [
            (chance.choice(TRANSLATIONS[language]).format(text=message), translation)
            for message, translation in messages.items()
        ],
        chance,
    )


def _grouped(turns: list[tuple[str, str]], chance: random.Random) -> list[str]:
    conversations = []
    start = 0
    while start < len(turns):
        stop = start + chance.randint(1, 3)
        conversations.append(conversation(turns[start:stop]))
        start = stop
    return conversations
