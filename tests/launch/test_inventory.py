"""`headrace models`: one line for each model, whatever the terminal's width."""

import json
from pathlib import Path

from headrace.launch.inventory import print_models
from headrace.launch.settings import ModelSettings, Settings
from headrace.models.prepared_folder import PreparedModel
from headrace.protocol.manifest import FORMAT_VERSION, Manifest

FOLDER = "/a/long/folder/of/somebody/in which/there is a blank/models/SmolLM2-135M-Instruct-int8-f6e51c0d9778"


def prepared(name, precision, num_mib):
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        identity="f6e5",
        source=name,
        architecture="llama",
        precision=precision,
        vocab_size=10,
        max_model_len=8192,
        bos_token_id=None,
        eos_token_ids=[],
        add_bos_token=False,
        versions={},
    )
    return PreparedModel(Path(FOLDER), manifest, num_mib * 2**20)


def listed(monkeypatch, capsys, models, *, as_json=False):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("headrace.launch.inventory.list_prepared", lambda folder: models)
    print_models(Settings(model=ModelSettings(cache_dir="/nowhere")), as_json)
    return capsys.readouterr().out


def test_no_name_and_no_folder_is_broken_at_80_columns(monkeypatch, capsys):
    models = [prepared("SmolLM2-135M-Instruct", "int8-group", 132), prepared("[red]", "f16", 1)]
    assert listed(monkeypatch, capsys, models).splitlines() == [
        "name                   precision   architecture  context  MiB  folder",
        f"SmolLM2-135M-Instruct  int8-group  llama         8192     132  {FOLDER}",
        f"[red]                  f16         llama         8192     1    {FOLDER}",
    ]


def test_as_json_it_is_one_array(monkeypatch, capsys):
    (facts,) = json.loads(listed(monkeypatch, capsys, [prepared("m", "f16", 3)], as_json=True))
    assert (facts["name"], facts["folder"], facts["size_bytes"]) == ("m", FOLDER, 3 * 2**20)


def test_when_nothing_is_prepared_it_says_what_to_do(monkeypatch, capsys):
    assert "`headrace prepare`" in listed(monkeypatch, capsys, [])
