"""One self-contained HTML page: escaping, style, light and dark. Nothing in it touches the network.

Owns: Html, element, page. Runs in: load tool. Must not know: what stands on a page.
"""

import base64
import hashlib
from html import escape

from headrace.loadtest.report.clean_text import plain, valid_text
from headrace.loadtest.report.palette import css_variables


class Html(str):
    """Markup that is safe as it stands. Every other str is text and gets escaped."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | None) -> Html:
    """`<tag ...>children</tag>`; text and attribute values are escaped and freed of control characters.

    A trailing underscore in an attribute's name is dropped, others become hyphens (class_, aria_label); None leaves it out.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(plain(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{written}>{join(*children)}</{tag}>")


def join(*parts: str) -> Html:
    """The parts in a row, text escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(plain(part)) for part in parts))


def page(title: str, *body: str) -> str:
    """The whole document. Its policy forbids every load from elsewhere."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = join(
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        element("title", title),
        Html(f"<style>{_style()}</style>"),
    )
    toggle = element("button", "Light / dark", type="button", id="theme", class_="theme")
    content = element("body", toggle, *body, Html(f"<script>{_SCRIPT}</script>"))
    document = f'<!doctype html>\n<html lang="en">{element("head", head)}{content}</html>\n'
    return valid_text(document)


_SCRIPT = """
(() => {
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
  });
  const openTarget = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const folded = target && target.closest("details");
    if (folded) { folded.open = true; target.scrollIntoView(); }
  };
  addEventListener("hashchange", openTarget);
  openTarget();
})();
"""


def _style() -> str:
    light, dark = css_variables("light"), css_variables("dark")
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media(prefers-color-scheme:dark){{:root:not([data-theme]){{color-scheme:dark;{dark}}}}}"
        f':root[data-theme="dark"]{{color-scheme:dark;{dark}}}' + _STYLE_SHEET
    )


_STYLE_SHEET = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:1.2rem 1rem 3rem;background:var(--page);color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:1.6rem;line-height:1.25;margin:.2rem 0;padding-right:7rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.2rem 0 .5rem;padding-top:1.2rem;border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:0 0 .5rem}
p{margin:.4rem 0;max-width:75ch;overflow-wrap:anywhere}
a{color:var(--accent)}
.meta,.note{color:var(--muted);font-size:.87rem}
.theme{position:absolute;top:1.2rem;right:max(1rem,calc((100vw - 1180px)/2 + 1rem));font:inherit;font-size:.82rem;
  color:var(--muted);background:var(--surface);border:1px solid var(--grid);border-radius:6px;padding:.3rem .6rem;
  cursor:pointer}
.card{background:var(--surface);border:1px solid var(--grid);border-radius:10px;padding:1rem;margin:.9rem 0;min-width:0}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:.7rem;margin:1rem 0}
.tile{background:var(--surface);border:1px solid var(--grid);border-radius:10px;padding:.7rem .9rem}
.tile b{display:block;font-size:1.35rem;line-height:1.3;font-variant-numeric:tabular-nums}
.tile span{color:var(--muted);font-size:.84rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,500px),1fr));gap:.9rem;margin:.9rem 0}
figure.card{margin:0}
.tables{display:flex;flex-wrap:wrap;gap:.9rem;margin:.9rem 0}
.tables .card{flex:1 1 auto;max-width:100%;margin:0}
figure.wide{grid-column:1/-1}
figcaption{font-weight:600;margin-bottom:.4rem}
.scroll{overflow-x:auto}
svg.chart{display:block;width:100%;min-width:440px;height:auto}
figure.wide svg.chart{min-width:760px}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.32rem .75rem;border-bottom:1px solid var(--grid);white-space:nowrap}
thead th{color:var(--muted);font-weight:600;vertical-align:bottom;white-space:normal}
th:first-child,td:first-child{text-align:left;padding-left:0;position:sticky;left:0;background:var(--surface);font-weight:500}
tbody tr:last-child>*{border-bottom:0}
table.text td{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:9rem}
table.ends-in-text :is(th,td):last-child{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:16rem}
abbr{text-decoration:underline dotted var(--muted);text-underline-offset:3px;cursor:help}
.verdicts{list-style:none;margin:.9rem 0;padding:0;display:grid;gap:.5rem}
.verdicts li{border-left:5px solid var(--muted);background:var(--surface);border-radius:4px 8px 8px 4px;padding:.5rem .8rem;
  overflow-wrap:anywhere}
.verdicts b{font-size:.78rem;letter-spacing:.04em;text-transform:uppercase;margin-right:.6rem}
.verdicts .problem{border-color:var(--bad);border-left-width:10px;font-weight:600;outline:1px solid var(--bad)}
.verdicts .problem b,.bad{color:var(--bad)}
.verdicts .warning{border-color:var(--warn)}.verdicts .warning b{color:var(--warn)}
.verdicts .ok{border-color:var(--good)}.verdicts .ok b,.good{color:var(--good)}
.verdicts .info{border-color:var(--accent)}.verdicts .info b{color:var(--accent)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--page);border:1px solid var(--grid);border-radius:6px;
  padding:.6rem .8rem;margin:.5rem 0;font-size:.85rem}
summary{cursor:pointer;font-weight:600}
dt{font-weight:600;margin-top:.8rem}dd{margin:.1rem 0 0;max-width:80ch}
dt:target{color:var(--accent)}
@media(max-width:640px){body{padding:.9rem .6rem 2rem}.card{padding:.8rem}h1{font-size:1.3rem}
  .tiles{grid-template-columns:repeat(2,1fr)}th,td{padding:.32rem .55rem}
  td:first-child{white-space:normal;min-width:7.5rem}}
@media print{.theme{display:none}.card{break-inside:avoid}}
"""
