"""Several prompt files: one after the other, each told apart by its name."""

from pathlib import Path

import pytest
from prompt_sets import read_prompt_sets, sets_by_name

from yggdrasil.errors import YggdrasilError


def test_several_sets_follow_each_other(tmp_path):
    first = tmp_path / "first.jsonl"
    second = tmp_path / "second.jsonl"
    first.write_text('{"id": "a", "prompt": "1"}\n{"id": "b", "prompt": "2"}\n')
    second.write_text('{"id": "c", "prompt": "3"}\n{"id": "a", "prompt": "4"}\n')

    assert [prompt.prompt for prompt in read_prompt_sets([first, second], 1)] == ["1", "3"]
    with pytest.raises(YggdrasilError, match="two prompts have the id a; "):
        read_prompt_sets([first, second])


def test_sets_that_nobody_could_tell_apart_are_refused(tmp_path):
    """Their results would lie in one place, the later one's over the earlier one's."""
    files = [Path("here/c4.jsonl"), Path("here/wikipedia.jsonl")]
    assert sets_by_name(files) == {"c4": files[0], "wikipedia": files[1]}
    with pytest.raises(YggdrasilError, match=r"here/c4\.jsonl and there/c4\.jsonl are both called c4; rename one"):
        sets_by_name([*files, Path("there/c4.jsonl")])
