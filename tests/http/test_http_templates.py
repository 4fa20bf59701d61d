"""Chat templates with faults, through the whole HTTP surface with the encoder that the server uses."""

from functools import partial

import pytest

from headrace.gateway.http.app import create_app
from headrace.text.chat_template import ChatTemplate, encode_chat
from tests.http.fakes import FakeService, Surface, error_of
from tests.text.tiny_tokenizers import byte_level_metadata, tokenizer_of

STRICT = (
    "{# a secret remark #}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
USER, ASSISTANT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


class TemplateSurface(Surface):
    """The application with a real tokenizer and this chat template."""

    def __init__(self, source: str) -> None:
        self.service = FakeService()
        tokenizer = tokenizer_of(byte_level_metadata())
        self.app = create_app(self.service, tokenizer, partial(encode_chat, tokenizer, ChatTemplate(source)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([SYSTEM, USER], "System role not supported"),
        ([USER, USER], "Roles must alternate"),
        ([ASSISTANT], "Roles must alternate"),
        ([USER, ASSISTANT, USER], None),
    ],
)
def test_tpl_01_02_what_a_template_refuses_is_a_400_with_its_words(
    messages: list[dict[str, str]], words: str | None, stream: bool
) -> None:
    """TPL-01, TPL-02: the template's own message and nothing of its source; a conversation that it takes is answered."""
    surface = TemplateSurface(STRICT)
    response = surface.chat(messages=messages, stream=stream)
    if words is None:
        assert response.status_code == 200
        return
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("chat_template_error", "messages")
    assert words in error["message"]
    assert "secret" not in response.text
    assert "raise_exception" not in response.text
    assert surface.service.specs == []


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
        "{{ 'x' * 10**9 }}",
    ],
)
def test_tpl_08_templates_that_reach_out_or_never_end(source: str) -> None:
    """TPL-08: each is an error of its own request; the server goes on."""
    surface = TemplateSurface(source)
    for _ in range(2):
        response = surface.chat()
        assert (response.status_code, error_of(response)["code"]) == (400, "chat_template_error")
    assert surface.complete(prompt="h").status_code == 200
    assert surface.request("GET", "/health/ready").status_code == 200
