"""What a person waits for: the first token of a chat's second turn, and of a model that this machine never ran."""

from collections.abc import Sequence

from results.records import Result, number, table


def turns(results: Sequence[Result]) -> str:
    """Time to the first token of a second turn behind a long history, beside a short prompt's."""
    rows = []
    for result in results:
        for case in result.record["cases"]:
            short, second = result.record["short_prompt_ms"], case["second_turn_ms"]
            rows.append(
                [
                    result.target,
                    str(case["history_tokens"]),
                    f"{case['reused_tokens']} of {case['prompt_tokens']}",
                    number(case["first_turn_ms"], 0),
                    number(second, 0),
                    f"{number(short, 0)} ({result.record['short_prompt_tokens']} tokens)",
                    f"**{second / short:.2f}**",
                ]
            )
    titles = "target|history|tokens reused|without reuse, ms|second turn, ms|short prompt, ms|second turn over it"
    return table(titles.split("|"), rows)


def first_contact(results: Sequence[Result]) -> str:
    """Seconds from a model folder to the first token and to the answer's end: cold caches, then warm ones."""
    rows = [
        [
            result.target,
            case["name"],
            number(case["first_token_s"], 1),
            number(case["whole_s"], 1),
            number(case["peak_mb"], 0),
        ]
        for result in results
        for case in result.record["cases"]
    ]
    return table(["target", "caches", "first token, s", "whole command, s", "memory at the peak, MB"], rows)
