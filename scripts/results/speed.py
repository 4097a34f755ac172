"""Yggdrasil beside plain compiled decoding: the tables of ``yggdrasil bench``, the README's table and its figure."""

from collections.abc import Sequence

from results.records import Record, Result, number, percent, set_place, spread_text, table

CHAT = "specbench"  # the set whose prompts a chat model gets
BAR = 40  # characters of the longest bar


def bench(results: Sequence[Result]) -> str:
    """A row for each target and set."""
    titles = "target|prompts|same tokens|repeats|AAL|plain ms|ours ms|speed-up|in total|predicted|overhead"
    return table(titles.split("|"), ([r.target, r.prompts, *_figures(r.record)] for r in results))


def categories(results: Sequence[Result]) -> str:
    """A row for each target and category, of files that name categories."""
    titles = "target|category|same tokens|repeats|AAL|plain ms|ours ms|speed-up|in total|predicted|overhead"
    rows = [
        [result.target, name, *_figures(found)]
        for result in results
        for name, found in result.record.get("categories", {}).items()
    ]
    return table(titles.split("|"), rows) if rows else ""


def beside(results: Sequence[Result]) -> str:
    """A row for each plan that was decoded beside others of its target, by set."""
    titles = "target|prompts|who guesses|same tokens|AAL|ms a token|over plain, in total|time over the first, in total"
    rows = []
    for result in results:
        others = result.record.get("beside", {}).values()
        for found in (result.record, *others) if others else ():
            over = found.get("total_time_over_first")
            matched = f"{found['matched']} of {found['prompts']}"
            speed, shown = number(found["total_speedup"]), "-" if over is None else f"**{over:.2f}**"
            figures = [matched, number(found["aal"]), number(found["tpot_ms"]), speed, shown]
            rows.append([result.target, result.prompts, found["guesses"], *figures])
    return table(titles.split("|"), rows) if rows else ""


def headline(results: Sequence[Result]) -> str:
    """The README's table: total time of plain decoding over ours, and in brackets how much of the text repeats."""
    sets = list(dict.fromkeys(result.prompts for result in sorted(results, key=set_place)))
    rows = []
    for processor, target in dict.fromkeys((result.processor, result.target) for result in results):
        own = {
            result.prompts: result.record
            for result in results
            if (result.processor, result.target) == (processor, target)
        }
        matched, prompts = (sum(record[key] for record in own.values()) for key in ("matched", "prompts"))
        rows.append([processor, target, f"{matched} of {prompts}", *(_cell(own.get(name)) for name in sets)])
    return table(["processor", "target", "same tokens", *sets], rows)


def figure(results: Sequence[Result]) -> str:
    """Bars of milliseconds a token on the chat prompts, plain and ours."""
    found = [result for result in results if result.set_name == CHAT]
    if not found:
        return ""
    longest = max(result.record["baseline_tpot_ms"] for result in found)
    width = max(len(result.target) for result in found)
    lines = []
    for result in found:
        record = result.record
        plain, ours = record["baseline_tpot_ms"], record["tpot_ms"]
        lines += [
            f"  {result.target:<{width}}  plain, compiled {plain:6.1f}  {_bar(plain, longest)}",
            f"  {'':<{width}}  Yggdrasil       {ours:6.1f}  {_bar(ours, longest)}  {record['total_speedup']:.2f} x",
        ]
    matched, prompts = (sum(result.record[key] for result in found) for key in ("matched", "prompts"))
    title = f"milliseconds a token on chat prompts of Spec-Bench; same tokens on {matched} of {prompts}"
    return "\n".join(["```text", title, "", *lines, "```"])


def _figures(record: Record) -> list[str]:
    return [
        f"{record['matched']} of {record['prompts']}",
        percent(record.get("repeats")),
        number(record["aal"]),
        number(record["baseline_tpot_ms"]),
        number(record["tpot_ms"]),
        spread_text(record["speedup"]),
        number(record.get("total_speedup")),
        number(record["predicted_speedup"]),
        f"{record['overhead_share']:.1%}",
    ]


def _cell(record: Record | None) -> str:
    if record is None:
        return "-"
    return f"**{number(record.get('total_speedup'))}** ({percent(record.get('repeats'))})"


def _bar(value: float, longest: float) -> str:
    return "█" * max(1, round(BAR * value / longest))
