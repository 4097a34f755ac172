"""One server of the bundled pair, shared by all tests of the room."""

import openai
import pytest
from browsers import open_browser
from bundled_server import open_pair, serving, wait_until


@pytest.fixture(scope="session")
def alone():
    """A decoder of the same pair, asked without a server."""
    return open_pair()


@pytest.fixture(scope="session")
def server():
    with serving(open_pair) as running:
        wait_until(lambda: running.worker.decoder is not None)
        yield running


@pytest.fixture
def sdk(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def browser():
    with open_browser("1200,800") as opened:
        yield opened
