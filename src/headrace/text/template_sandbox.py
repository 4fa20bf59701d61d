"""Runs a Jinja template that came with a model: it reaches nothing outside, and it ends.

Owns: jinja2. Runs in: gateway, any thread. Must not know: tokens, HTTP.

The template is code from a stranger. Jinja's sandbox keeps it from Python's internals; the limits here keep it from using up
time and memory: every loop turn, call, filter and operator is a step of a budget, whatever makes a text or a list pays for its
size before or after it is made, and the thread's own time is looked at between steps.
"""

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 256 * 1024
MAX_STEPS = 200_000
MAX_ITEMS = 100_000
MAX_THREAD_SECONDS = 2.0
MAX_MESSAGE_CHARS = 300
_MAX_INTEGER_BITS = 4096
_MAX_FORMAT_CHARS = 200  # of strftime_now
_STEPS_BETWEEN_TIME_CHECKS = 16

_LONG_FORMATS = re.compile(r"\d{5,}|%[-+ #0]*\*|%[^a-zA-Z%]*\.\*|\{[^{}]*:[^{}]*\{")
_PADDING_METHODS = frozenset({"ljust", "rjust", "center", "zfill"})
_UNSAFE_METHODS = frozenset({"translate", "maketrans", "encode", "to_bytes"})
# Filters that write their value out as text, however deeply it is nested.
_WRITING_FILTERS = frozenset(
    {"capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "pprint", "replace", "safe"}
    | {"string", "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap"}
    | {"xmlattr"}
)
_JOINED, _NESTED, _MEASURED = "joined text", "nested literal", "measured value"  # names that no template can write


class BrokenTemplateError(Exception):
    """A template cannot be compiled or rendered. `message` is short and holds nothing of the template's source."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message[:MAX_MESSAGE_CHARS].rstrip(".")


class _Budget:
    """What one rendering may still spend. Sizes are in characters of text or items of lists."""

    def __init__(self, input_size: int = 0, num_input_items: int = 0) -> None:
        self.max_size = 4 * 2**20 + 16 * input_size  # of one value
        self._max_items = MAX_ITEMS + 4 * num_input_items  # of one value, with those of the values in it
        self._size_left = 16 * 2**20 + 64 * input_size + 4096 * num_input_items  # of all values together
        self._steps_left = MAX_STEPS
        self._last_time = time.thread_time() + MAX_THREAD_SECONDS

    @classmethod
    def for_input(cls, value: Any) -> "_Budget":
        """For a rendering of these variables: a long conversation may spend more."""
        return cls(*_weigh(value, max_items=2**30))

    def step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise SecurityError("it takes too many steps")
        if self._steps_left % _STEPS_BETWEEN_TIME_CHECKS == 0 and time.thread_time() > self._last_time:
            raise SecurityError("it takes too long")

    def spend(self, size: int) -> None:
        self._size_left -= size
        if size > self.max_size or self._size_left < 0:
            raise SecurityError("it makes too much text")

    def weigh(self, value: Any) -> int:
        """Size of a value written out."""
        return len(value) if isinstance(value, str) else _weigh(value, self._max_items)[0]

    def spend_items(self, num_items: int) -> None:
        """Pay for a list of so many items."""
        if num_items > self._max_items:
            raise SecurityError("it makes too large a list")
        self.spend(num_items)

    def take(self, value: Any) -> None:
        """Pay for a value that came about. What lists hold is limited too, so that none grows by holding itself twice."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, list | tuple | dict):
            self.spend_items(len(value))
            if any(isinstance(item, list | tuple | dict) for item in (value.values() if isinstance(value, dict) else value)):
                self.weigh(value)


def _weigh(value: Any, max_items: int) -> tuple[int, int]:
    """Characters and items of a value written out. What stands in several places counts in each."""
    num_chars, num_items, stack = 0, 0, [value]
    while stack:
        item = stack.pop()
        num_items += 1
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        elif isinstance(item, Namespace):
            raise SecurityError("it writes out a namespace")
        if num_items + len(stack) > max_items:
            raise SecurityError("it makes too large a list")
    return num_chars + num_items, num_items


class _Running(threading.local):
    """The budget of the rendering that this thread is in."""

    budget: _Budget = _Budget()


_running = _Running()


class SandboxedTemplate:
    """One compiled template. Safe to render from several threads at once."""

    def __init__(self, source: str, now: Callable[[], datetime.datetime]) -> None:
        """Raises BrokenTemplateError when the source is no template. `now` is for templates that ask for the date."""
        if len(source) > MAX_SOURCE_CHARS:
            raise BrokenTemplateError(f"it has {len(source)} characters; the most is {MAX_SOURCE_CHARS}")
        environment = _ChatEnvironment(now)
        _running.budget = _Budget()  # constant expressions are evaluated while compiling
        try:
            tree = _Limits().visit(environment.parse(source))
            code = environment.compile(cast("nodes.Template", tree))
            self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        except TemplateSyntaxError as error:
            raise BrokenTemplateError(f"line {error.lineno}: {error.message}") from error
        except (TemplateError, RecursionError, MemoryError, ValueError, TypeError, ArithmeticError, SyntaxError) as error:
            raise BrokenTemplateError(str(error) or type(error).__name__) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises BrokenTemplateError with the template's own message, or with what it did that cannot be."""
        chunks = []
        try:
            _running.budget = budget = _Budget.for_input(dict(variables))
            written = 0
            for chunk in self._template.generate(variables):
                budget.step()
                written += len(chunk)
                if written > budget.max_size:
                    raise SecurityError("it makes too much text")
                chunks.append(chunk)
        except RecursionError as error:
            raise BrokenTemplateError("it is nested too deeply") from error
        except TemplateError as error:
            raise BrokenTemplateError(error.message or "it failed without saying why") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError) as error:
            raise BrokenTemplateError(str(error) or "it failed without saying why") from error
        return "".join(chunks)


class _GenerationTag(Extension):
    """{% generation %}: marks the assistant's own words for training. Here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012  # the name and kind that jinja2 looks for

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Limits(NodeTransformer):
    """Puts a step into every loop and macro body, and sends what grows values through filters that pay for it."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """The node to stand in this one's place, its children done."""
        self.generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            num_fixed_chars = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
            step, cost = nodes.EnvironmentAttribute("loop_step"), nodes.Const(num_fixed_chars)
            call = nodes.Call(step, [cost], [], None, None, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            return _filtered(node.nodes[0], _JOINED, node.nodes[1:])
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filtered(node, _MEASURED, [])
        elif _is_literal(node) and not all(isinstance(child, nodes.Const) for child in node.iter_child_nodes()):
            return _filtered(cast("nodes.Expr", node), _NESTED, [])
        return node


def _is_literal(node: nodes.Node) -> bool:
    return isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load")


def _filtered(node: nodes.Expr, name: str, arguments: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(node, name, arguments, [], None, None, lineno=node.lineno)


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """What chat templates are written for (blocks trimmed, loop controls, a few functions), with every operation paid for."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime.datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"], finalize=_written
        )
        self._now = now
        self.filters["tojson"] = _to_json
        self.filters.update({_JOINED: _join_texts, _NESTED: _itself, _MEASURED: _itself})
        self.filters.update({name: _paid_filter(name, function) for name, function in self.filters.items()})
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=self._strftime_now)

    def loop_step(self, num_fixed_chars: int) -> None:
        """Stands at the beginning of every loop and macro body. Calling it is the step; the text of the body is paid here."""
        _running.budget.spend(num_fixed_chars)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _running.budget
        budget.step()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            _pay_for_method(budget, owner, function.__name__, args)
        result = super().call(context, function, *args, **kwargs)
        budget.take(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _running.budget
        budget.step()
        if operator == "%" and isinstance(left, str):
            _check_format(budget, left, right)
        elif operator == "**":
            _check_bits(abs(right) * _bits(left) if isinstance(right, int) else 0)
        elif operator == "*":
            _check_bits(_bits(left) + _bits(right))
            if isinstance(left, int) and hasattr(right, "__len__"):
                left, right = right, left
            if isinstance(right, int) and hasattr(left, "__len__"):
                _pay(budget, left, len(left) * max(right, 0))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _pay(budget, left, len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        if not isinstance(result, str):
            budget.take(result)
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNSAFE_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def paid(*args: Any, **kwargs: Any) -> str:
            _check_format(_running.budget, value.__self__, [args, kwargs])
            return wrapped(*args, **kwargs)

        return paid

    def _strftime_now(self, form: str) -> str:
        if len(form) > _MAX_FORMAT_CHARS or re.search(r"\d{3}", form):
            raise TemplateError("strftime_now was given too long a format")
        return self._now().strftime(form)


def _paid_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passes_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        budget = _running.budget
        budget.step()
        value, *others = args[1:] if passes_context else args
        if name == "join" and not hasattr(value, "__len__"):
            value = list(value)
            args = (args[0], value, *others) if passes_context else (value, *others)
        if name in _WRITING_FILTERS:
            budget.spend(budget.weigh(value))
            _pay_for_filter(budget, name, value, [*others, *kwargs.values()])
        elif name in ("batch", "slice"):
            budget.spend(max((abs(other) for other in others if isinstance(other, int)), default=0))
        result = function(*args, **kwargs)
        if name == _MEASURED:
            _pay(budget, result, len(result) if hasattr(result, "__len__") else 0)  # a part holds no more than the whole
        else:
            budget.take(result)
        return result

    return paid


def _pay_for_filter(budget: _Budget, name: str, value: Any, others: list[Any]) -> None:
    """For filters whose result is much larger than their value."""
    if name == "replace":
        _pay_for_replacing(budget, str(value), others)
    elif name == "join":
        separator = max((len(other) for other in others if isinstance(other, str)), default=0)
        budget.spend(separator * len(value) if hasattr(value, "__len__") else separator * MAX_STEPS)
    elif name == "format":
        _check_format(budget, str(value), others)
    elif name in ("center", "indent", "wordwrap", "tojson", "urlize", "truncate"):
        width = max((abs(o) if isinstance(o, int) else len(o) for o in others if isinstance(o, int | str)), default=0)
        num_places = 1 if name in ("center", "truncate") else budget.weigh(value)
        budget.spend(width * min(num_places, str(value).count("\n") + 1 if name == "indent" else num_places))


def _pay_for_method(budget: _Budget, owner: str, name: str, args: tuple[Any, ...]) -> None:
    """For string methods whose result is much larger than the string."""
    if name in _PADDING_METHODS or name == "expandtabs":
        width = args[0] if args and isinstance(args[0], int) else 8
        budget.spend(width * (len(owner) if name == "expandtabs" else 1))
    elif name == "replace":
        _pay_for_replacing(budget, owner, list(args))
    elif name == "join" and args:
        items = args[0]
        budget.spend(len(owner) * (len(items) if hasattr(items, "__len__") else MAX_STEPS) + budget.weigh(items))


def _pay_for_replacing(budget: _Budget, text: str, arguments: list[Any]) -> None:
    texts = [argument for argument in arguments if isinstance(argument, str)]
    if len(texts) >= 2:
        old, new = texts[:2]
        budget.spend(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _check_format(budget: _Budget, form: str, values: Any) -> None:
    if _LONG_FORMATS.search(form):
        raise SecurityError("it formats with a width that is not allowed")
    budget.spend(len(form) + budget.weigh(values) * max(form.count("%") + form.count("{"), 1))


def _pay(budget: _Budget, kind: Any, size: int) -> None:
    if isinstance(kind, str):
        budget.spend(size)
    else:
        budget.spend_items(size)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_INTEGER_BITS:
        raise SecurityError("it makes too large a number")


def _written(value: Any) -> Any:
    """Stands between every {{ expression }} and the text."""
    if isinstance(value, str | list | tuple | dict | set | frozenset | Namespace):
        _running.budget.spend(_running.budget.weigh(value))
    return value


def _join_texts(*values: Any) -> str:
    """The operator ~."""
    budget = _running.budget
    budget.spend(sum(budget.weigh(value) for value in values))
    return "".join([str(value) for value in values])


def _itself(value: Any) -> Any:
    return value


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter it does not escape for HTML: models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message)[:MAX_MESSAGE_CHARS])
