"""One table of definitions behind results, --help and the documentation."""

import pathlib
import typing

import msgspec

from headrace.loadtest.definitions import BY_KEY, DEFINITIONS, PROSE_KEYS, definitions_markdown, definitions_text
from headrace.loadtest.report.tables import DISTRIBUTION_KEYS
from headrace.loadtest.results import Distribution, RunResult

DOCUMENT = pathlib.Path(__file__).parents[3] / "docs" / "measuring.md"
BEGIN, END = "<!-- definitions: begin -->\n", "<!-- definitions: end -->"


def distribution_fields():
    hints = typing.get_type_hints(RunResult)
    return [name for name, hint in hints.items() if Distribution in (hint, *typing.get_args(hint))]


def test_every_distribution_of_a_result_is_defined_and_shown():
    assert set(distribution_fields()) == set(DISTRIBUTION_KEYS)
    assert set(DISTRIBUTION_KEYS) <= set(BY_KEY)


def test_every_key_is_a_field_or_prose():
    fields = {field.name for field in msgspec.structs.fields(RunResult)}
    assert set(BY_KEY) - fields == PROSE_KEYS
    assert len(BY_KEY) == len(DEFINITIONS)


def test_the_document_holds_the_table_word_for_word():
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert section.strip() == definitions_markdown().strip(), "write definitions_markdown() between the markers"


def test_help_names_each_figure():
    text = definitions_text()
    assert all(f"{item.name}" in text and item.definition in text for item in DEFINITIONS)
