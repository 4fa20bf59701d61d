"""A record that cannot be begun is refused before the model is prepared, which may take minutes."""

import asyncio

import pytest

from headrace.launch import serve as serving
from headrace.launch.settings import OperationSettings, Settings
from headrace.protocol.errors import ConfigurationError


class PreparedError(Exception):
    """It came as far as preparing the model."""


@pytest.fixture
def start(monkeypatch):
    async def prepare(settings):
        raise PreparedError

    monkeypatch.setattr(serving, "prepare_in_child", prepare)
    monkeypatch.setattr(serving, "configure_logging", lambda *_: None)
    monkeypatch.setattr(serving, "remove_orphans", list)
    return lambda record: asyncio.run(serving.serve(Settings(operation=OperationSettings(record=str(record)))))


def test_a_file_with_something_in_it_is_refused_at_once(start, tmp_path):
    record = tmp_path / "record.jsonl"
    record.write_text("{}\n")
    with pytest.raises(ConfigurationError, match="never overwritten"):
        start(record)
    assert record.read_text() == "{}\n"


@pytest.mark.parametrize(
    ("name", "reason"), [("", "no regular file"), ("absent/record", "there is no folder"), ("x" * 300, "too long")]
)
def test_a_place_where_no_file_can_be_is_refused_at_once(start, tmp_path, name, reason):
    with pytest.raises(ConfigurationError, match=reason):
        start(tmp_path / name)


def test_a_new_file_and_an_empty_one_are_taken_and_not_touched_yet(start, tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    for record in (tmp_path / "new", empty):
        with pytest.raises(PreparedError):
            start(record)
    assert not (tmp_path / "new").exists()
    assert empty.stat().st_size == 0
