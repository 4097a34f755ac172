"""A tokenizer opened by its kept class is the one that transformers finds, and opening it imports no configuration."""

import json
from pathlib import Path

import pytest
from jinja2 import TemplateError
from jinja2.defaults import DEFAULT_FILTERS
from transformers import AutoTokenizer

import yggdrasil
from yggdrasil.artifacts.cache import cache_root
from yggdrasil.artifacts.fork import ends_within
from yggdrasil.checkpoints import kept_tokenizer
from yggdrasil.checkpoints.facts import load_tokenizer
from yggdrasil.checkpoints.tokenizer import _compiled
from yggdrasil.errors import YggdrasilError

BUNDLED = Path(yggdrasil.__file__).parent / "assets" / "tiny" / "target"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if tools %}tools{% endif %}"
TEXTS = ("Hello, wörld 123", "  a\n\tb  . 数 🙂", "<|endoftext|> </s> x")
CHAT = [{"role": "user", "content": "Hello, wörld 123"}]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own; the kernels are the usual ones."""
    kernels = cache_root() / "kernels"
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(kernels)
    monkeypatch.setattr(kept_tokenizer, "ends_within", lambda work, *_: [work()])  # where it can be counted
    return tmp_path / "cache"


def folder_of(place, model_type, kind):
    """The bundled tokenizer, of another model by name and with a template."""
    place.mkdir()
    (place / "tokenizer.json").write_bytes((BUNDLED / "tokenizer.json").read_bytes())
    (place / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = json.loads((BUNDLED / "tokenizer_config.json").read_text()) | {"tokenizer_class": kind}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return place


def test_a_tokenizer_opened_ahead_is_used_once_and_not_for_a_replaced_folder(tmp_path, cache):
    folder = folder_of(tmp_path / "model", "llama", "TokenizersBackend")
    kept_tokenizer.open_ahead(folder)  # nothing is stored yet
    known = load_tokenizer(folder).backend_tokenizer.to_str()
    kept_tokenizer.open_ahead(folder)
    ahead = kept_tokenizer.open_tokenizer(folder)
    assert ahead is not kept_tokenizer.open_tokenizer(folder)
    assert ahead.backend_tokenizer.to_str() == known

    kept_tokenizer.open_ahead(folder)
    folder.rename(tmp_path / "old")
    folder_of(tmp_path / "model", "llama", "TokenizersBackend")
    template = folder / "chat_template.jinja"
    template.write_text("another")
    assert kept_tokenizer.open_tokenizer(folder).chat_template == "another"


@pytest.mark.parametrize(
    ("model_type", "kind"), [("llama", "TokenizersBackend"), ("qwen2", "Qwen2Tokenizer"), ("gpt2", "GPT2TokenizerFast")]
)
def test_the_second_is_the_first(tmp_path, cache, monkeypatch, model_type, kind):
    folder = folder_of(tmp_path / "model", model_type, kind)
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    load_tokenizer(folder)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)  # not needed again
    ours = load_tokenizer(folder)

    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert (ours.special_tokens_map, ours.eos_token_id) == (theirs.special_tokens_map, theirs.eos_token_id)
    for text in TEXTS:
        tokens = theirs.encode(text)
        assert ours.encode(text) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens)
    assert ours.whole.init_kwargs == theirs.init_kwargs
    assert ours(TEXTS[0], return_tensors="pt").input_ids.tolist() == [theirs.encode(TEXTS[0])]


SETTINGS: list[dict] = [
    {"add_generation_prompt": True},
    {"tools": [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]},
    {"continue_final_message": True}, {"enable_thinking": False},
]  # fmt: skip
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if enable_thinking is false %}!{% endif %}",
    "tools": "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ bos_token }}{% for m in messages %}"
    "{% generation %}{{ loop.index }}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{% endif %}{% if loop.last %}{% break %}{% endif %}"
    "{% endfor %}{% set n = namespace(x=1) %}{{ n.x }}{{ m is defined }}{{ documents is none }}",
    "raising": "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}{% endif %}",
}
CHATS = [CHAT, [*CHAT, {"role": "assistant", "content": "yes ", "thinking": "hm", "tool_calls": None}]]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_are_rendered_as_by_transformers(tmp_path, cache, template):
    folder = folder_of(tmp_path / "model", "llama", "TokenizersBackend")
    (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = load_tokenizer(folder)

    for chat in CHATS:
        for settings in SETTINGS:
            assert rendered(ours, chat, settings) == rendered(theirs, chat, settings)


@pytest.mark.parametrize("product", ["'a' * 4000000000", "4000000000 * [1]", "9 ** 999999999", "'ab' * 9999999"])
def test_a_template_makes_no_huge_values(product):
    template = _compiled("{{ 3 * 2 }}{{ '-' * 3 }}{% if tools %}{{ " + product + " }}{% endif %}")

    assert template.render() == "6---"
    with pytest.raises(TemplateError, match=r"^the result of \*\*? is too large$"):
        template.render(tools=[{}])


@pytest.mark.parametrize("use", ["{{ 'x' | center(9) }}", "{% set a = 'x' | center(9) %}"])
def test_compiling_a_template_computes_no_constant(monkeypatch, use):
    """Jinja swallows the errors of what it computes then, so a memory limit alone shows nothing."""
    computed = []
    monkeypatch.setitem(DEFAULT_FILTERS, "center", lambda *given: computed.append(given) or "x")
    template = _compiled("{% if messages %}" + use + "{% endif %}")

    assert not computed
    template.render(messages=[{}])
    assert computed == [("x", 9)]


BOMBS = {
    "a power": "{{ 9 ** 999999999 }}",
    "a product": "{{ 'x' * 9999999999 }}",
    "a filter": "{{ 'x' | center(99999999999) }}",
    "a format": "{{ '%99999999999d' % 1 }}",
    "a setting": "{% autoescape 'x' | center(99999999999) %}{% endautoescape %}",
    "a text that doubles": "{% set n = namespace(x='x') %}{% for _ in range(40) %}{% set n.x=n.x ~ n.x %}{% endfor %}",
    "a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
RAISING = ("a power", "a product", "a setting")  # refused where they are rendered
CASES = [
    *[("a GGUF file", bomb, True) for bomb in BOMBS],
    ("transformers' files", "a text that doubles", True),
    *[(way, "a power", True) for way in ("transformers' files", "transformers' class")],
    *[(way, "all", False) for way in ("transformers' files", "transformers' class", "a GGUF file")],
]


@pytest.mark.parametrize(("way", "bomb", "is_rendered"), CASES)
def test_a_template_takes_little_memory_in_every_way(tmp_path, monkeypatch, way, bomb, is_rendered):
    """The tokenizer is refused in a sentence, or its chats are rendered or raise; 1 GB or 30 s would end the fork."""
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    for name, limit in {"_CPU_SECONDS": 1, "_MEGABYTES": 256, "_TEMPLATE_MEGABYTES": 256}.items():
        monkeypatch.setattr(kept_tokenizer, name, limit)
    source = folder_of(tmp_path / "model", "llama", "TokenizersBackend")
    bombs = "".join(BOMBS.values()) if bomb == "all" else BOMBS[bomb]
    template = TEMPLATE + (bombs if is_rendered else "{% if nowhere %}" + bombs + "{% endif %}")
    (source / "chat_template.jinja").write_text(template)
    if way == "transformers' class":
        monkeypatch.setattr(kept_tokenizer, "_is_alike", lambda *_: False)

    def use():
        said = "opened"
        for _ in range(2):  # from the files, then from the cache
            try:
                if way == "a GGUF file":
                    rules = json.loads((source / "tokenizer.json").read_text())
                    facts = {"special_tokens": {}, "eos_token_id": 0, "bos_token_id": 0, "chat_template": template}
                    kept_tokenizer.write_tokenizer(source, rules, facts)
                tokenizer = kept_tokenizer.open_tokenizer(source)
                for settings in (*SETTINGS, {"tokenize": True}):
                    rendered(tokenizer, CHATS[1], settings)
            except YggdrasilError as error:
                said = str(error)
        (tmp_path / "said").write_text(said)

    assert ends_within(use, 30, 1024)
    said = (tmp_path / "said").read_text()
    assert "chat template take" in said if is_rendered and bomb not in RAISING else said == "opened"


def rendered(tokenizer, chat, settings):
    try:
        return tokenizer.apply_chat_template(chat, **({"tokenize": False} | settings))
    except Exception as error:  # noqa: BLE001  (a template raises what it likes)
        return type(error)


def test_another_setting_or_a_damaged_note_asks_transformers_again(tmp_path, cache, monkeypatch):
    calls = []
    find = AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *args, **named: calls.append(1) or find(*args, **named)
    )
    folder = folder_of(tmp_path / "model", "qwen2", "Qwen2Tokenizer")
    load_tokenizer(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("Qwen2Tokenizer", "TokenizersBackend"))
    load_tokenizer(folder)
    assert len(calls) == 2
    for content in ("", "[]", '{"module": "os", "name": "path"}', '{"module": "transformers.nowhere", "name": "A"}'):
        for note in (cache / "tokenizers").glob("????????????????????.json"):
            note.write_text(content)
        load_tokenizer(folder)
    assert len(calls) == 6
    for rules in (cache / "tokenizers").glob("*.tokenizer.json"):
        rules.write_bytes(rules.read_bytes().replace(b"a", b"b"))
    assert load_tokenizer(folder).encode("a") == find(folder).encode("a")


SEQUENCES = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
DAMAGED = {
    "a map that is none": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}),
    "a template without its entry": (
        "post_processor",
        {
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, SEQUENCES[0]],
            "pair": SEQUENCES, "special_tokens": {},
        },
    ),
    "a text that grows without end": (
        "normalizer",
        {
            "type": "Sequence",
            "normalizers": 40 * [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_files_that_break_or_never_end_are_refused_in_a_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setenv("YGGDRASIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_tokenizer, "_CPU_SECONDS", 4)
    monkeypatch.setattr(kept_tokenizer, "_MEGABYTES", 256)
    folder = folder_of(tmp_path / "model", "llama", "TokenizersBackend")
    part, damaged = DAMAGED[name]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {part: damaged}))

    with pytest.raises(YggdrasilError, match="fetch them again"):
        load_tokenizer(folder)


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path, cache):
    (cache / "tokenizers").write_text("a file in the place of the folder")
    folder = folder_of(tmp_path / "model", "llama", "TokenizersBackend")

    assert load_tokenizer(folder).get_vocab() == load_tokenizer(folder).get_vocab()
