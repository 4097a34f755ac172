"""The check of a running server: a section that fails ends it with one sentence and exit code 1."""

import check_server
import pytest
import server_memory
import typer


@pytest.mark.parametrize(("most", "afterwards"), [(1003, 950), (1003, 1001)])
def test_memory_within_the_bound_is_told_with_it(most, afterwards):
    told = server_memory.told(288, [467.0, most, 900], afterwards, 512)
    assert told == f"288 requests; 467 MB before, at most {most}, {afterwards} afterwards; the bound is 1004"


@pytest.mark.parametrize(("most", "afterwards"), [(1005, 950), (900, 1005)])
def test_memory_beyond_the_bound_is_a_failure(most, afterwards):
    with pytest.raises(AssertionError, match="beyond the bound of 1004, the first figure and --keep-mb 512"):
        server_memory.told(288, [467.0, most, 900], afterwards, 512)


def test_a_failing_section_gives_exit_code_1_and_a_sentence(monkeypatch, capsys):
    def fails(client, requests, keep_mb):
        raise AssertionError(f"{requests} requests took more than {keep_mb}")

    monkeypatch.setattr(check_server, "check_memory", fails)
    with pytest.raises(typer.Exit) as ended:
        check_server.main(section=["memory"], mixed=7, keep_mb=3)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "memory: 7 requests took more than 3\n"
