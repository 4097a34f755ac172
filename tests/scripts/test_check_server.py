"""The check of a running server: a section that fails ends it with one sentence and exit code 1."""

import check_server
import pytest
import server_memory
import typer


@pytest.mark.parametrize(("most", "afterwards"), [(1003, 950), (1037, 1003)])
def test_memory_within_the_bounds_is_told_with_them(most, afterwards):
    sentence = server_memory.bounds_sentence(288, [467.0, most, 900], afterwards, 512)
    figures = f"288 requests; 467 MB before, at most {most}, {afterwards} afterwards"
    assert sentence == f"{figures}; the bounds are 1037 and 1004"


@pytest.mark.parametrize(("most", "afterwards"), [(1038, 950), (1004, 1004)])
def test_memory_beyond_a_bound_is_a_failure(most, afterwards):
    with pytest.raises(AssertionError, match=r"beyond 10(37 while|04, the first figure and --keep-mb 512)"):
        server_memory.bounds_sentence(288, [467.0, most, 900], afterwards, 512)


def test_a_failing_section_gives_exit_code_1_and_a_sentence(monkeypatch, capsys):
    def fails(client, requests, keep_mb):
        raise AssertionError(f"{requests} requests took more than {keep_mb}")

    monkeypatch.setattr(check_server, "check_memory", fails)
    with pytest.raises(typer.Exit) as ended:
        check_server.main(section=["memory"], mixed=7, keep_mb=3)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "memory: 7 requests took more than 3\n"
