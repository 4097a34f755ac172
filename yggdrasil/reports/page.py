"""The report as one self-contained HTML page: figures, tables and explanations."""

import html
import re
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from yggdrasil.engine.plan_lookup import plan_name
from yggdrasil.reports.charts import Charts
from yggdrasil.reports.facts import Facts
from yggdrasil.reports.schedules import verdict

_STYLE = """
:root { --ink: #1f2933; --soft: #616e7c; --line: #e4e7eb; --accent: #0b6e4f; --paper: #fff; --back: #f5f7fa;
        --marked: #e8f4ef; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #d9e2ec; --soft: #9fb3c8; --line: #334e68; --accent: #65d6ad; --paper: #14212b; --back: #0b141b;
          --marked: #14372c; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header { background: #102a2e; color: #fff; padding: 30px 0 26px; }
header p { margin: 4px 0 0; color: #b8cfc8; }
.inner { max-width: 1180px; margin: 0 auto; padding: 0 24px; }
h1 { margin: 0; font-size: 27px; font-weight: 650; letter-spacing: -0.01em; overflow-wrap: anywhere; }
code { font: 0.9em ui-monospace, monospace; background: var(--back); border-radius: 4px; padding: 1px 4px; }
nav { background: var(--paper); overflow-x: auto; white-space: nowrap;
      border-bottom: 1px solid var(--line); position: sticky; top: 0; z-index: 5; }
nav a { display: inline-block; padding: 11px 16px 11px 0; color: var(--soft); text-decoration: none; font-size: 14px; }
nav a:hover { color: var(--accent); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 14px; margin: 22px 0; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; }
.card b { display: block; font-size: 22px; font-weight: 650; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 13px; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 20px 24px;
          margin: 0 0 20px; }
h2 { margin: 0 0 6px; font-size: 19px; font-weight: 650; }
h3 { margin: 22px 0 4px; font-size: 15px; }
p.says { margin: 0 0 10px; color: var(--soft); max-width: 84ch; }
p.missing { color: var(--soft); border-left: 3px solid var(--line); padding-left: 12px; }
table { border-collapse: collapse; min-width: min(100%, 36rem); font-size: 13.5px; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
th { text-align: right; white-space: nowrap; font-weight: 600; color: var(--soft); padding: 6px 10px;
     border-bottom: 1px solid #9aa5b1; }
td.words:first-of-type { white-space: nowrap; }
td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); }
th.words, td.words { text-align: left; }
tr.chosen td { background: var(--marked); font-weight: 600; }
ul.verdict { margin: 6px 0 14px; padding-left: 20px; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); font-size: 14px; }
footer { color: var(--soft); font-size: 13px; padding: 4px 0 40px; }
.chart { min-height: 120px; overflow-x: auto; }
@media (max-width: 640px) {
  .inner { padding: 0 12px; } section { padding: 14px 12px; } h1 { font-size: 22px; }
  .cards { grid-template-columns: 1fr 1fr; gap: 8px; } td, th { padding: 4px 6px; }
  .card:last-child:nth-child(odd) { grid-column: span 2; }
}
"""


def build_page(facts: Facts) -> str:
    """Return the report on ``facts`` as the text of one HTML page, which needs no other file and no network."""
    tables, charts = facts.tables(), Charts()
    sections = [section for section in _sections(facts, tables, charts) if section.parts]
    plan = facts.plan
    title = f"Yggdrasil report: {plan_name(plan.target.source) if plan.is_provisional else plan.name}"
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    remarks = [] if facts.table is None else [f"{facts.table[0].upper()}{facts.table[1:]}."]
    if facts.missing_profile is not None:
        remarks.append(f"{facts.missing_profile[0].upper()}{facts.missing_profile[1:]}.")
    remarked = "".join(f"<p>{html.escape(remark)}</p>" for remark in remarks)
    links = "".join(f'<a href="#{section.anchor}">{section.link}</a>' for section in sections)
    body = "\n".join(section.html() for section in sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{_STYLE}</style></head>
<body><header><div class="inner"><h1>{html.escape(title)}</h1>
<p>{html.escape(plan.describe())}</p>{remarked}<p>{html.escape(versions)}</p></div></header>
<nav><div class="inner">{links}</div></nav>
<main class="inner"><div class="cards">{_cards(facts)}</div>
{body}
<footer>All figures are drawn from tables of the profile, the predictor and the plan; <code>yggdrasil report
--csv DIR</code> writes them. Predictions add up measured stage times. Measured values are scaled to the machine's speed
during profiling, by the time of plain steps in the same run.</footer></main>
{charts.scripts()}</body></html>
"""


class _Section(NamedTuple):
    """A section of the page, left out if it has no ``parts``."""

    anchor: str
    link: str
    title: str
    says: str
    parts: list[str]

    def html(self) -> str:
        says = f'<p class="says">{html.escape(self.says)}</p>' if self.says else ""
        return "\n".join([f'<section id="{self.anchor}"><h2>{self.title}</h2>{says}', *self.parts, "</section>"])


def _cards(facts: Facts) -> str:
    plan = facts.plan
    repeats, measured = plan.predicted.repeats, plan.costs[0]
    looped = "" if repeats is None else f" ({repeats:.0%} of their text repeats itself)"
    cards = [] if plan.is_provisional else [
        (f"{plan.predicted.speedup:.2f} ×", f"speed-up over plain decoding, predicted on held-out prompts{looped}"),
        (f"{plan.predicted.aal:.2f}", "tokens per iteration (AAL, bonus included)"),
        (f"{plan.predicted.tpot_ms:.3g} ms", "per token, predicted"),
    ]  # fmt: skip
    cards.append((f"{measured.plain_ms:.3g} ms", f"per plain step at context {measured.context}"))
    if plan.is_provisional:
        cards.append((f"{1e3 / measured.plain_ms:.3g}", "tokens per second by plain decoding"))
        cards.append((f"{plan.shapes.max_length:,}", "tokens of context"))
    search = plan.search
    chosen = search.entry(search.chosen) if search is not None else None
    if chosen is not None and chosen.measured_speedup:
        cards.append((f"{chosen.measured_speedup:.2f} ×", "speed-up over plain decoding, measured by the search"))
    return "".join(f'<div class="card"><b>{value}</b><span>{html.escape(text)}</span></div>' for value, text in cards)


def _sections(facts: Facts, tables: dict[str, pd.DataFrame], charts: Charts) -> list[_Section]:
    """Return all sections in order; a section without data has no parts."""
    from yggdrasil.reports import figures
    from yggdrasil.reports.tree_figure import tree

    search = facts.plan.search
    chosen = search.entry(search.chosen) if search is not None else None
    shape = chosen.shape if chosen is not None else None
    lines = "".join(f"<li>{_prose(line)}</li>" for line in verdict(search)) if search is not None else ""
    trees = [
        f"<h3>prompt {prompt}, tree {shape}, iteration {iteration}: {_accepted_text(part)}</h3>{charts.add(tree(part))}"
        for (prompt, shape, iteration), part in tables["trees"].groupby(["prompt", "shape", "iteration"])
    ]
    reasons = "".join(f"<li>{_prose(line)}</li>" for line in facts.reasons())
    is_measured = len(tables["latency"]) > 0
    return [
        _section("why", "Why this plan", "Why this plan",
                 "" if facts.plan.is_provisional else
                 "The policies that were tried and their predicted speed, simulated on held-out text.",
                 [f'<ul class="verdict">{reasons}</ul>', _table(tables["considered"], "", opened=True)]),
        _section("latency", "Step costs", "What a step costs",
                 "Medians and 10-90 % bands, measured inside real iterations. The plan's costs of verify widths are "
                 "measured by alternating quickly between all widths." if is_measured else
                 "Milliseconds of a target pass, by the number of tokens that it verifies.",
                 [charts.add(figures.latency(tables)), charts.add(figures.iterations(tables)),
                  _table(tables["costs"], "costs in the plan", opened=not is_measured)]),
        _section("prediction", "Prediction", "Predictions and measurements",
                 "Every plan that the search measured, scaled to the speed of the profile.",
                 [f'<ul class="verdict">{lines}</ul>' if lines else "", charts.add(figures.prediction(tables))]),
        _section("objective", "Objective", "The objective",
                 "Speed-up over a plain step by equation 3 with overhead, for the calibration's mean acceptance. "
                 "The diamond marks the shape with the highest accepted length (AAL).",
                 [charts.add(figures.objective(tables, shape))]),
        _section("timelines", "Timelines", "Timelines of an iteration",
                 "Stages of the naive and of the chosen plan, predicted from stage costs and measured.",
                 [charts.add(figures.timelines(tables))]),
        _section("ranking", "Plans", "Plans",
                 "All schedules, shapes and widths are ranked by predicted latency per token; the best and the named "
                 "plans are then measured alternately.",
                 [_table(tables["ranking"], "", opened=True)]),
        _section("trees", "Trees", "Example trees",
                 "Whole iterations of real requests; a tree is draft width x depth x verify width. The bonus is the "
                 "target's token after the accepted path.",
                 trees),
    ]  # fmt: skip


def _section(anchor: str, link: str, title: str, says: str, parts: Sequence[str]) -> _Section:
    return _Section(anchor, link, title, says, [part for part in parts if part])


def _table(table: pd.DataFrame, title: str, *, opened: bool = False) -> str:
    if table.empty:
        return ""
    marked = "chosen" in table
    columns = [name for name in table.columns if name != "chosen"]
    words = {name: not pd.api.types.is_numeric_dtype(table[name]) for name in columns}
    head = "".join(f"<th{_words(words[name])}>{html.escape(name.replace('_', ' '))}</th>" for name in columns)
    rows = []
    for record in table.to_dict("records"):
        cells = "".join(f"<td{_words(words[name])}>{html.escape(_shown(record[name]))}</td>" for name in columns)
        mark = ' class="chosen"' if marked and record["chosen"] else ""
        rows.append(f"<tr{mark}>{cells}</tr>")
    text = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    return text if opened else f"<details><summary>Table: {title}</summary>{text}</details>"


def _prose(text: str) -> str:
    """Return ``text`` as HTML, in which text between backticks becomes a code element."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _words(is_text: bool) -> str:
    return ' class="words"' if is_text else ""


def _shown(value: object) -> str:
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"
    return str(value)


def _accepted_text(part: pd.DataFrame) -> str:
    accepted = part[part["role"] == "accepted"].sort_values("depth")["text"]
    bonus = str(part.iloc[0]["bonus"])
    root = str(part.iloc[0]["text"])
    counts = part["role"].value_counts()
    sizes = f"{len(part) - 1} drafted, {len(part) - 1 - counts.get('drafted', 0)} verified, {len(accepted)} accepted"
    text = html.escape("".join(map(str, accepted)))
    return f"<code>{html.escape(root)}</code> → <code>{text}</code> + bonus <code>{html.escape(bonus)}</code> ({sizes})"
