"""Finds the snapshot folder of a model of the Hugging Face hub in the local cache, or downloads it."""

import os
import re
from pathlib import Path

from yggdrasil.errors import YggdrasilError, first_line

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # never a pickle
_PROBE_SECONDS = 5.0


def hub_folder(name: str) -> Path:
    """Return the snapshot folder of the Hugging Face hub id ``name``, downloaded unless it is in the local cache.

    Pickles are never downloaded.

    Raises:
        YggdrasilError: ``name`` is no hub id, the hub does not have it, or it is not cached and the hub cannot be
            reached.
    """
    if not _HUB_ID.fullmatch(name):
        raise YggdrasilError(f"there is no folder or .gguf file {name}, and it is no hub id (owner/name)")
    if (folder := cached_hub_folder(name)) is not None:
        return folder
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    absent = f"{name} is no folder or file here, and not in the local cache of the hub"
    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "") in ("1", "true", "True"):
        raise YggdrasilError(f"{absent}, and HF_HUB_OFFLINE forbids to download it; give the path of a model")
    if not _is_reachable(constants.ENDPOINT):
        raise YggdrasilError(f"{absent}, and the hub cannot be reached; give the path of a model")
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (HfHubHTTPError, ValueError) as error:  # the hub answered; retrying does not help
        raise YggdrasilError(f"{name} could not be fetched from the hub: {first_line(error)}") from error
    except Exception as error:  # a lost connection: the hub's client raises classes other than OSError
        raise YggdrasilError(
            f"{name} could not be fetched from the hub ({first_line(error)}); run again to resume the download"
        ) from error


def cached_hub_folder(name: str) -> Path | None:
    """Return the snapshot folder of the hub id ``name`` in the local cache, or None if absent or incomplete."""
    if not _HUB_ID.fullmatch(name):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=_FILES))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return folder if (folder / "config.json").exists() and any(folder.glob("*.safetensors")) else None


def _is_reachable(endpoint: str) -> bool:
    """Return whether the URL ``endpoint`` answers within 5 s; the hub's client would retry for a minute."""
    import urllib.error  # imported late: it takes long
    import urllib.request

    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return True  # an HTTP error is an answer too
    except (OSError, ValueError):
        return False
    return True
