"""The interface's description as one HTML page, made from the OpenAPI document.

Owns: the page. Runs in: gateway. Must not know: structs, handlers. No script, no font, no image: nothing is fetched.
"""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --bg: #fbfcfd; --fg: #1c2530; --muted: #5a6877; --line: #dfe5ea; --card: #fff;
  --accent: #0b6a84; --code: #f0f4f6; --post: #1c6b3c; --get: #0b5c9c; }
@media (prefers-color-scheme: dark) { :root { --bg: #12181e; --fg: #dfe6ec; --muted: #97a6b4; --line: #2a353f; --card: #182028;
  --accent: #5cc3df; --code: #1f2932; --post: #6fcf97; --get: #7fbdf0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 5rem; }
h1 { font-size: 1.9rem; margin: 0; letter-spacing: -.01em; }
h1 small { font-size: 1rem; color: var(--muted); font-weight: 400; }
h2 { margin: 2.6rem 0 .2rem; font-size: 1.25rem; } p { margin: .5rem 0; max-width: 46rem; } .muted { color: var(--muted); }
a { color: var(--accent); }
code, pre, .path { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .9em; }
code { background: var(--code); padding: .08em .35em; border-radius: 4px; }
pre { background: var(--code); padding: .8rem 1rem; border-radius: 8px; overflow-x: auto; line-height: 1.45; }
pre code { background: none; padding: 0; }
nav ul { list-style: none; padding: 0; margin: 1rem 0 0; display: flex; flex-wrap: wrap; gap: .4rem; }
nav a { display: block; padding: .2rem .6rem; border: 1px solid var(--line); border-radius: 99px; text-decoration: none;
  background: var(--card); }
article { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.25rem; margin: 1rem 0; }
article h3 { margin: 0; font-size: 1rem; font-weight: 600; display: flex; gap: .7rem; align-items: baseline; flex-wrap: wrap; }
.method { font-weight: 700; font-size: .8rem; text-transform: uppercase; letter-spacing: .05em; color: var(--get); }
.method.post { color: var(--post); }
details { margin-top: .6rem; } summary { cursor: pointer; color: var(--accent); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; font-size: .93rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; border-top: 1px solid var(--line); }
th { color: var(--muted); font-weight: 500; border-top: 0; } td:first-child { white-space: nowrap; }
.required { color: var(--accent); font-size: .8rem; }
"""


def render_docs_page(document: dict[str, Any], model_id: str) -> str:
    """The whole page as HTML."""
    return "".join(_page(document, model_id))


def _page(document: dict[str, Any], model_id: str) -> Iterator[str]:
    info = document["info"]
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style></head><body><main>"
    yield f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>"
    yield f'<p>Serving <code>{escape(model_id)}</code>. The same as a document: <a href="/openapi.json">/openapi.json</a>.</p>'
    yield f'<p class="muted">{escape(info["description"])}</p>'
    operations = [(path, method, item) for path, methods in document["paths"].items() for method, item in methods.items()]
    yield '<nav aria-label="Paths"><ul>'
    for path, _, item in operations:
        yield f'<li><a class="path" href="#{escape(item["operationId"])}">{escape(path)}</a></li>'
    yield "</ul></nav>"
    schemas = document["components"]["schemas"]
    shown = {_body_type(item) for _, _, item in operations}
    for tag in document["tags"]:
        yield f'<h2>{escape(tag["name"])}</h2><p class="muted">{escape(tag["description"])}</p>'
        for path, method, item in operations:
            if tag["name"] in item["tags"]:
                yield from _operation(path, method, item, schemas)
    yield "<h2>Types</h2>"
    for name, schema in schemas.items():
        if name in shown:
            continue
        yield f'<article id="type-{escape(name)}"><h3 class="path">{escape(name)}</h3>'
        yield f"<p>{escape(schema.get('description', ''))}</p>"
        yield from _fields(schema)
        yield "</article>"
    yield "</main></body></html>"


def _operation(path: str, method: str, item: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f'<article id="{escape(item["operationId"])}"><h3><span class="method {escape(method)}">{escape(method)}</span>'
    yield f'<span class="path">{escape(path)}</span><span>{escape(item["summary"])}</span></h3>'
    yield f"<p>{escape(item['description'])}</p>"
    body = item.get("requestBody")
    if body:
        content = body["content"]["application/json"]
        example = json.dumps(content["example"], indent=2)
        verb = "" if method == "post" else f"-X {method.upper()} "
        command = f"curl {verb}http://localhost:8000{path} -H 'Content-Type: application/json' -d '{example}'"
        yield f"<pre><code>{escape(command)}</code></pre>"
        name = _body_type(item)
        yield f"<details><summary>Fields of {escape(name)}</summary>"
        yield from _fields(schemas[name])
        yield "</details>"
    yield from _parameters(item.get("parameters", []))
    yield "<details><summary>Answers</summary><div class=scroll><table><tr><th>Status</th><th>Meaning</th><th>Body</th></tr>"
    for status, answer in item["responses"].items():
        bodies = ", ".join(_body_link(media_type, content) for media_type, content in answer["content"].items())
        yield f"<tr><td>{escape(status)}</td><td>{escape(answer['description'])}</td><td>{bodies}</td></tr>"
    yield "</table></div></details></article>"


def _parameters(parameters: list[dict[str, Any]]) -> Iterator[str]:
    shown = [parameter for parameter in parameters if parameter["in"] != "path"]
    if not shown:
        return
    yield "<details><summary>Headers and query</summary><div class=scroll><table>"
    yield "<tr><th>Name</th><th>In</th><th>Meaning</th></tr>"
    for parameter in shown:
        yield f"<tr><td><code>{escape(parameter['name'])}</code></td><td>{escape(parameter['in'])}</td>"
        yield f"<td>{escape(parameter['description'])}</td></tr>"
    yield "</table></div></details>"


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    yield "<div class=scroll><table><tr><th>Field</th><th>Type</th><th>Meaning</th></tr>"
    required = schema.get("required", [])
    # What must be there first, what has no effect last.
    fields = sorted(schema.get("properties", {}).items(), key=lambda item: (item[0] not in required, _type(item[1]) == "any"))
    for name, field in fields:
        mark = ' <span class="required">required</span>' if name in required else ""
        description = escape(field.get("description", ""))
        limits = _limits(field)
        yield f"<tr><td><code>{escape(name)}</code>{mark}</td><td>{_type(field)}</td><td>{description}{limits}</td></tr>"
    yield "</table></div>"


def _body_type(item: dict[str, Any]) -> str:
    """The type of an operation's body, "" for none."""
    body = item.get("requestBody")
    return _type_name(body["content"]["application/json"]["schema"]) if body else ""


def _limits(field: dict[str, Any]) -> str:
    if "minimum" not in field:
        return ""
    if "maximum" not in field:
        return f' <span class="muted">From {field["minimum"]}.</span>'
    return f' <span class="muted">{field["minimum"]} to {field["maximum"]}.</span>'


def _type(field: dict[str, Any]) -> str:
    """A field's type in words; null is left out, since every field that may be left out may be null."""
    if "$ref" in field:
        return _link(_type_name(field))
    if "anyOf" in field:
        kinds = [_type(kind) for kind in field["anyOf"] if kind.get("type") != "null"]
        return " or ".join(kinds) or "null"
    if "enum" in field or "const" in field:
        return escape(" or ".join(map(str, field.get("enum", [field.get("const")]))))
    kind = field.get("type", "any")
    if kind == "array" and "items" in field:
        return f"list of ({_type(field['items'])})" if "anyOf" in field["items"] else f"list of {_type(field['items'])}"
    return escape(str(kind))


def _body_link(media_type: str, content: dict[str, Any]) -> str:
    schema = content.get("schema", {})
    return _link(_type_name(schema)) if "$ref" in schema else f"<code>{escape(media_type)}</code>"


def _link(name: str) -> str:
    return f'<a href="#type-{escape(name)}">{escape(name)}</a>'


def _type_name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rsplit("/", 1)[-1]
