"""TPL-08: a template from a model file runs no code, and ends."""

import datetime
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.text import template_sandbox
from headrace.text.template_sandbox import BrokenTemplateError, SandboxedTemplate

MESSAGES = [{"role": "user", "content": "x"}]
DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(80) %}{% set ns.x = NEXT %}{% endfor %}"


def _render(source: str, **variables: object) -> str:
    template = SandboxedTemplate(source, lambda: datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC))
    return template.render({"messages": MESSAGES, **variables})


def _doubling(start: str, following: str, end: str = "") -> str:
    return DOUBLING.replace("START", start).replace("NEXT", following) + end


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ('' | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{0.__class__.__mro__}' | format('') }}{{ raise_exception.__globals__['x'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ self.__init__.__globals__.os }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}{{ os.x() }}",
    ],
)
def test_nothing_outside_is_reached(source: str) -> None:
    with pytest.raises(BrokenTemplateError):
        _render(source)
    assert MESSAGES == [{"role": "user", "content": "x"}]


BOMBS = [
    "{% for i in range(10**9) %}a{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ 10**9 * 'x' }}",
    "{{ [1] * 10**9 }}",
    "{{ (1, 2) * 10**9 }}",
    "{{ 9 ** 99999999 }}",
    "{{ ((9 ** 999) ** 999) ** 999 }}",
    _doubling("3", "ns.x * ns.x", "{{ ns.x % 7 }}"),
    "{{ 'x' | center(10**9) }}",
    "{% set n = 10**9 %}{{ 'x'.ljust(n) }}",
    "{{ 'x'.zfill(10**9) }}{{ 'x'.center(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000d}'.format(1) }}",
    "{{ '{:{}}'.format('x', 10**9) }}",
    "{{ 'x'.__format__('1000000000') }}",
    "{{ 1 .to_bytes(10**9, 'big') }}",
    "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
    "{% set s = 'a' * 1000000 %}{{ s | replace('a', s) }}",
    "{% set s = 'a' * 1000000 %}{{ s.replace('', s) }}",
    "{% set s = 'a' * 1000000 %}{{ s.translate({97: s}) }}",
    "{% set s = 'a' * 1000000 %}{{ s.join(s) }}",
    "{{ range(99999) | map('string') | join(',' * 99999) }}",
    "{{ 'a' | indent(10**9, true) }}",
    "{% set s = 'a ' * 100000 %}{{ s | wordwrap(1, wrapstring='x' * 100000) }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ range(9) | slice(10**9) | list }}",
    "{{ messages | tojson(indent=10**9) }}",
    _doubling("'aaaa'", "ns.x ~ ns.x"),
    _doubling("'aaaa'", "ns.x + ns.x"),
    _doubling("'aaaa'", "'%s%s' % (ns.x, ns.x)"),
    _doubling("'aaaa'", "'{0}{0}'.format(ns.x)"),
    _doubling("'aaaa'", "ns.x.replace('a', 'aa')"),
    _doubling("'aaaa'", "[ns.x, ns.x] | join"),
    _doubling("[1]", "ns.x + ns.x", "{{ ns.x | length }}"),
    _doubling("[1]", "[ns.x, ns.x]", "{{ ns.x | tojson }}"),
    _doubling("[1]", "(ns.x, ns.x)", "{{ ns.x }}"),
    _doubling("[1]", "(ns.x + ns.x) | batch(100) | list", "{{ ns.x | string }}"),
    _doubling("{}", "{'a': ns.x, 'b': ns.x}", "{{ ns.x }}"),
    _doubling("{}", "dict(a=ns.x, b=ns.x)", "{{ ns.x == dict(ns.x) }}"),
    _doubling("namespace()", "namespace(a=ns.x, b=ns.x)", "{{ ns.x }}"),
    _doubling("namespace()", "namespace(a=ns.x, b=ns.x)", "{{ ns.x | string }}"),
    "{% set ns = namespace(x='aaaa') %}{% for i in range(80) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% macro g(x) %}{{ x }}{{ x }}{% endmacro %}" + _doubling("'aaaa'", "g(ns.x)"),
    "{% set x %}{% for i in range(99999) %}" + "y" * 100_000 + "{% endfor %}{% endset %}",
    "{% filter upper %}{% for i in range(99999) %}" + "y" * 100_000 + "{% endfor %}{% endfilter %}",
    "{% for i in range(99999) %}" + "y" * 100_000 + "{% endfor %}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ strftime_now('%Y' * 100000) }}",
    "{{ lipsum(n=1000000) }}",
]


@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
def test_bombs_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", template_sandbox.MAX_STEPS // 20)  # tracing makes steps slow
    monkeypatch.setattr(template_sandbox, "MAX_ITEMS", template_sandbox.MAX_ITEMS // 10)
    monkeypatch.setattr(template_sandbox, "MAX_THREAD_SECONDS", template_sandbox.MAX_THREAD_SECONDS / 4)
    tracemalloc.start()
    begin = time.thread_time()
    try:
        with pytest.raises(BrokenTemplateError):
            _render(source)
        seconds, peak = time.thread_time() - begin, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 10  # far from for ever, even on a busy machine under tracing
    assert peak < 128 * 2**20


def test_a_long_conversation_may_spend_more() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}{% set ns = namespace(text='') %}{% endif %}"
        "{{ '<' + m.role + '>' + (m.content | trim) ~ '\n' }}{% endfor %}"
    )
    short = [{"role": "user", "content": "word " * 20}] * 10_000
    assert len(_render(source, messages=short)) > 1_000_000
    long = [{"role": "user", "content": "word " * 1_000_000}]
    assert len(_render(source, messages=long)) > 4_999_990


def test_threads_do_not_share_a_budget() -> None:
    template = SandboxedTemplate(
        "{% for i in range(n) %}{% for j in range(100) %}.{% endfor %}{% endfor %}",
        lambda: datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC),
    )
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: len(template.render({"n": n})), [10, 20, 30, 40] * 4))
    assert results == [1000, 2000, 3000, 4000] * 4


def test_ordinary_templates_are_unaffected() -> None:
    assert (
        _render("{{ 2 ** 10 }} {{ 7 % 4 }} {{ 'a' * 3 }} {{ 2 * 'b' }} {{ '%05.1f|%s' % (2.25, 'x') }}")
        == "1024 3 aaa bb 002.2|x"
    )
    assert (
        _render("{{ [1, 2] + [3] }} {{ (1, 'a') }} {{ {'k': [1]} }} {{ 'a' ~ 1 ~ none ~ missing }}")
        == "[1, 2, 3] (1, 'a') {'k': [1]} a1None"
    )
    assert _render("{{ messages[0:1] | length }}{{ 'abc'[1:] }}{{ 'abc'[::-1] }}") == "1bccba"
    assert _render("{{ '{}-{:>4}'.format('a', 1) }} {{ 'a'.center(5) }}| {{ ', '.join(['a', 'b']) }}") == "a-   1   a  | a, b"
    assert _render("{{ messages | map(attribute='role') | join('+') }} {{ range(4) | select('even') | list }}") == "user [0, 2]"
    assert _render("{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}") == "12"
    assert _render("{% macro m(a) %}{{ a }}{{ caller() }}{% endmacro %}{% call m(3) %}in{% endcall %}") == "3in"
    assert (
        _render("{% for a, b in [(1, 2), (3, 4)] %}{{ a }}{{ b }}{% if loop.first %}{% continue %}{% endif %};{% endfor %}")
        == "1234;"
    )
    assert _render("{% set x %}in{{ 1 }}{% endset %}{{ x }}{{ 'a' in ['a', 'b'] }}{{ x is string }}") == "in1TrueTrue"
    assert _render("{{ missing }}{{ missing is defined }}{{ 'x' if missing }}") == "False"
