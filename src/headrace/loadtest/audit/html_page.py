"""The report as one HTML file that needs nothing else: light and dark, readable on a phone.

Owns: render_report. Runs in: CLI. Must not know: HTTP, how anything was judged.
"""

from html import escape
from itertools import groupby

from headrace.loadtest.audit.findings import AuditReport, CheckResult, Outcome
from headrace.loadtest.audit.terminal import mark, score_words

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6875; --paper: #fbfbf9; --line: #dcdfe2; --card: #fff;
  --good: #1a7f4b; --bad: #b3261e; --half: #8a5a00; --skip: #66717c; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e3e8ec; --soft: #9aa7b3; --paper: #14181c; --line: #2e363d; --card: #1b2126;
  --good: #5fd08f; --bad: #ff8a80; --half: #e3b341; --skip: #8b98a4; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0; } .soft, code { color: var(--soft); } code { font: .85em ui-monospace, monospace; }
.score { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; margin: 1rem 0; }
.score b { font-size: 2.4rem; line-height: 1; }
.bar { height: .5rem; border-radius: .25rem; background: var(--line); overflow: hidden; display: flex; }
.bar i { display: block; } .bar .pass { background: var(--good); } .bar .half { background: var(--half); }
.bar .FAIL { background: var(--bad); }
ul { list-style: none; margin: 0; padding: 0; border: 1px solid var(--line); border-radius: .5rem; background: var(--card); }
li { display: grid; grid-template-columns: 3.2rem minmax(0, 2fr) minmax(0, 3fr); gap: .2rem 1rem; padding: .55rem .8rem; }
li + li { border-top: 1px solid var(--line); }
.mark { font-weight: 700; } .mark.pass { color: var(--good); } .mark.FAIL { color: var(--bad); }
.mark.half, .mark.note { color: var(--half); } .mark.skip { color: var(--skip); font-weight: 400; }
.evidence { overflow-wrap: anywhere; } .hint { color: var(--soft); font-style: italic; }
@media (max-width: 44rem) { li { grid-template-columns: 3.2rem minmax(0, 1fr); } .evidence { grid-column: 2; } }
"""


def render_report(report: AuditReport) -> str:
    """A whole document. Everything that came from the server is escaped."""
    title = f"Audit of {report.url}"
    facts = [f"model {report.model}", *(f"{name} {value}" for name, value in report.server.items())]
    facts += [f"{report.num_requests} requests in {report.seconds:g} s", report.started_at]
    groups = "".join(_group(name, list(lines)) for name, lines in groupby(report.checks, key=lambda line: line.group))
    score, words = score_words(report)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<p class="soft">{escape(" · ".join(facts))}</p>'
        f'<div class="score"><b>{score or "–"}</b><span>{words}</span></div>{_bar(report)}'
        f'<p class="soft">A line counts with its weight; a clear refusal of an optional field counts half; '
        f"skipped lines and notes do not count.</p>{groups}</body></html>\n"
    )


def _bar(report: AuditReport) -> str:
    weights = {"pass": 0, "half": 0, "FAIL": 0}
    for line in report.checks:
        word = mark(line)[0]
        if word in weights and line.outcome is not Outcome.SKIP:
            weights[word] += line.weight
    total = sum(weights.values()) or 1
    parts = "".join(f'<i class="{word}" style="width:{100 * weight / total:.2f}%"></i>' for word, weight in weights.items())
    return f'<div class="bar" role="img" aria-label="share of weight passed, half and failed">{parts}</div>'


def _group(name: str, lines: list[CheckResult]) -> str:
    return f"<h2>{escape(name)}</h2><ul>{''.join(map(_line, lines))}</ul>"


def _line(line: CheckResult) -> str:
    word = mark(line)[0]
    hint = f'<p class="hint">→ {escape(line.hint)}</p>' if line.hint else ""
    return (
        f'<li><span class="mark {word}">{word}</span><div>{escape(line.title)}<br><code>{escape(line.id)}</code> '
        f'<span class="soft">weight {line.weight}</span></div>'
        f'<div class="evidence">{escape(line.evidence)}{hint}</div></li>'
    )
