"""A hub id is looked for in the local cache first; an unreachable hub is reported at once."""

import socket

import huggingface_hub
import pytest
from huggingface_hub import constants

from yggdrasil.checkpoints import hub
from yggdrasil.checkpoints.source import Source
from yggdrasil.errors import YggdrasilError


def cached(root, files):
    """A hub cache that holds one snapshot of owner/name."""
    folder = root / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for name in files:
        (snapshot / name).write_text("{}")
    return snapshot


def test_what_is_in_the_cache_is_found_without_the_network(tmp_path, monkeypatch):
    snapshot = cached(tmp_path, ["config.json", "model.safetensors"])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "_is_reachable", lambda _: pytest.fail("the network was asked"))

    assert Source.find("owner/name").folder == snapshot


@pytest.mark.parametrize("files", [[], ["config.json"]])
def test_offline_a_missing_id_is_one_sentence(tmp_path, monkeypatch, files):
    """A snapshot that lacks the weights counts as missing."""
    cached(tmp_path, files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(YggdrasilError, match=r"^owner/name is no folder or file here, .*HF_HUB_OFFLINE"):
        Source.find("owner/name")


def test_an_unreachable_hub_is_said_without_retries(tmp_path, monkeypatch):
    """Its own client, which would try again for a minute, is called for the cache alone."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    calls, fetch = [], huggingface_hub.snapshot_download

    def noted(name, **options):
        calls.append(options.get("local_files_only", False))
        return fetch(name, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", noted)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(YggdrasilError, match="and the hub cannot be reached; give the path of a model"):
            Source.find("owner/name")
    assert calls == [True]


class LostConnection(Exception):
    """As those of the hub's client: no OSError."""


@pytest.mark.parametrize("error", [LostConnection("peer closed"), OSError(28, "No space left on device")])
def test_a_download_that_breaks_off_is_one_sentence(tmp_path, monkeypatch, error):
    def fetch(name, local_files_only=False, **_):
        raise FileNotFoundError(name) if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "_is_reachable", lambda _: True)

    with pytest.raises(YggdrasilError, match=r"^owner/name could not be fetched .+; run again to resume"):
        Source.find("owner/name")
