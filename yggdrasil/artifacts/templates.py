"""Find out from a model's files, without opening the tokenizer, whether the model has a chat template."""

from contextlib import suppress
from pathlib import Path

from yggdrasil.artifacts.gguf import is_gguf, read_gguf_layout
from yggdrasil.artifacts.plain import parse_json

_FACT, _SETTING = "tokenizer.chat_template", "chat_template"
_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def lacks_chat_template(path: Path) -> bool:
    """Return whether the model in the folder or GGUF file ``path`` certainly has no chat template; False if unsure.

    Raises:
        ArtifactError: a GGUF file is damaged.
    """
    if is_gguf(path):
        return not any(name.startswith(_FACT) for name in read_gguf_layout(path).facts)
    if any((path / name).exists() for name in _FILES):
        return False
    with suppress(OSError, ValueError, AttributeError):
        return not parse_json((path / "tokenizer_config.json").read_bytes()).get(_SETTING)
    return False
