"""What a GGUF file says is written without transformers as transformers makes it: tokenizer and configuration."""

import json
import sys

import gguf
import pytest
from gguf_files import finish, tiny_model, write_gguf
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoConfig, AutoTokenizer

from yggdrasil.artifacts.gguf import read_gguf_header
from yggdrasil.checkpoints.gguf import facts
from yggdrasil.checkpoints.gguf.tokenizer import build_tokenizer
from yggdrasil.checkpoints.kept_tokenizer import open_tokenizer
from yggdrasil.runtime.native_steps.description import describe

BYTES = [
    *map(chr, range(33, 127)),
    "Ġ",
    "Ċ",
    "he",
    "ll",
    "hell",
    "Ġw",
    "Ã",
    "¶",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
]
MERGES = ["h e", "l l", "he ll", "Ġ w"]
PIECES = [
    "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helowrd123", "▁w", "ll", "he", "hell",
    "hello", "lo", "  ", "▁▁▁", "<bos>", "<eos>", "<think>", "ö",
]  # fmt: skip
TEXTS = (
    "hello world 123",
    "  he  llo\n\twörld 数 ",
    "<|im_start|>hell<|im_end|> <think> x<s> <bos>",
    " \u00f6 o\u0308",
)
BYTE_FILES = [
    ("llama", "smollm", {}), ("llama", "llama-bpe", {"add_bos_token": True}), ("qwen2", "qwen2", {}),
    ("qwen3", "qwen2", {}), ("granite", "default", {"add_eos_token": True}), ("smollm3", "smaug-bpe", {}),
    ("phi3", "dbrx", {}), ("phi3", "gpt-4o", {}), ("gpt-oss", "gpt-4o", {}), ("lfm2", "lfm2", {"add_bos_token": True}),
    ("lfm2moe", "lfm2", {}), ("qwen35", "qwen35", {}), ("qwen35moe", "qwen35", {}), ("qwen3moe", "qwen2", {}),
    ("granitehybrid", "dbrx", {}), ("falcon-h1", "falcon-h1", {}), ("qwen3next", "qwen2", {}),
    ("nemotron_h", "tekken", {}), ("nemotron_h_moe", "pixtral", {}),
]  # fmt: skip
PIECE_FILES = [
    ("llama", {}), ("llama", {"add_bos_token": False}), ("gemma2", {}), ("gemma3", {"add_bos_token": True}),
    ("phi3", {}), ("ernie4_5", {"add_eos_token": True}),
]  # fmt: skip
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "granite", "olmo2", "ernie4_5", "phi3")


def written(path, architecture, model, tokens, ids, flags, pre=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    special = {"<unk>": 2, "<think>": 4}
    writer.add_token_types([special.get(each, 3 if each[0] == "<" and each[-1] == ">" else 1) for each in tokens])
    if pre is None:
        writer.add_token_scores([float(-(index % 7)) for index in range(len(tokens))])  # several of one score
    else:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(MERGES)
    for name, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", tokens.index(token))
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    writer.add_chat_template("{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n{% endfor %}\n")
    finish(writer)
    return read_gguf_header(path)


def both(tmp_path, monkeypatch, header):
    """The folder as it is written, and as transformers' classes write it."""
    folders = tmp_path / "ours", tmp_path / "theirs"
    for folder in folders:
        folder.mkdir()
        facts.write_config_and_tokenizer(header, folder)
        monkeypatch.setattr(facts, "is_complete", lambda *_: False)
        monkeypatch.setattr(facts, "build_tokenizer", lambda _: None)
    return folders


def same_tokenizer(folders):
    ours = open_tokenizer(folders[0])
    again, theirs = (AutoTokenizer.from_pretrained(folder, local_files_only=True) for folder in folders)
    assert type(again) is type(theirs)
    assert ours.backend_tokenizer.to_str() == again.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    for name in ("special_tokens_map", "eos_token_id", "bos_token_id", "chat_template"):
        assert getattr(ours, name) == getattr(again, name) == getattr(theirs, name), name
    for text in TEXTS:
        tokens = theirs.encode(text)
        assert ours.encode(text) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens)


@pytest.fixture
def no_config(monkeypatch):
    """Files without tensors: a configuration that says no more than its kind."""
    monkeypatch.setattr(facts, "read_config", lambda header: {"model_type": KINDS[header.architecture], **NO_TOKENS})
    monkeypatch.setattr(facts, "_write_config", lambda header, config, folder: written_json(folder, config))


KINDS = {name: name for name in FAMILIES} | {
    "gemma3": "gemma3_text", "phi3": "phi3", "gpt-oss": "gpt_oss", "lfm2": "lfm2", "lfm2moe": "lfm2_moe",
    "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3moe": "qwen3_moe",
    "granitehybrid": "granitemoehybrid", "falcon-h1": "falcon_h1", "qwen3next": "qwen3_next",
    "nemotron_h": "nemotron_h", "nemotron_h_moe": "nemotron_h",
}  # fmt: skip
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def written_json(folder, config):
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("architecture", "pre", "flags"), BYTE_FILES)
@pytest.mark.usefixtures("no_config")
def test_byte_level_vocabularies(tmp_path, monkeypatch, architecture, pre, flags):
    ids = {"bos": "<|im_start|>", "eos": "<|im_end|>", "padding": "<|im_end|>"}
    header = written(tmp_path / "file.gguf", architecture, "gpt2", BYTES, ids, flags, pre)
    assert build_tokenizer(header) is not None
    same_tokenizer(both(tmp_path, monkeypatch, header))


@pytest.mark.parametrize(("architecture", "flags"), PIECE_FILES)
@pytest.mark.usefixtures("no_config")
def test_vocabularies_of_pieces(tmp_path, monkeypatch, architecture, flags):
    ids = {"bos": "<s>", "eos": "</s>", "unknown": "<unk>"}
    header = written(tmp_path / "file.gguf", architecture, "llama", PIECES, ids, flags)
    assert build_tokenizer(header) is not None
    same_tokenizer(both(tmp_path, monkeypatch, header))


@pytest.mark.usefixtures("no_config")
def test_added_tokens_that_are_in_the_vocabulary_keep_their_ids(tmp_path, monkeypatch):
    ids = {"bos": "<|im_start|>", "eos": "<|endoftext|>", "padding": "<|im_end|>"}
    header = written(tmp_path / "file.gguf", "qwen2", "gpt2", [*BYTES, "<|endoftext|>", "he<"], ids, {}, "qwen2")
    built = build_tokenizer(header)
    assert built is not None
    assert [each["id"] for each in built.rules["added_tokens"]] == [*range(len(BYTES) - 3, len(BYTES) + 1)]
    same_tokenizer(both(tmp_path, monkeypatch, header))


@pytest.mark.parametrize("merges", [["h e", "l l", "he ll", "h e"], ["l l", "h e", "he ll", "l l", "l l"]])
def test_equal_merges_rank_as_in_the_library(tmp_path, monkeypatch, merges):
    monkeypatch.setattr(sys.modules[__name__], "MERGES", merges)
    header = written(tmp_path / "file.gguf", "llama", "gpt2", BYTES, {}, {}, "smollm")
    built = build_tokenizer(header)
    assert built is not None
    model = BPE(built.rules["model"]["vocab"], [tuple(merge.split()) for merge in merges])
    expected = json.loads(Tokenizer(model).to_str())["model"]["merges"]
    assert list(map(list, built.rules["model"]["merges"])) == expected


@pytest.mark.parametrize("merge", ["h z\u00e4", "z\u00e4 h", "h h", "h", "h e l"])
def test_merges_whose_parts_are_no_tokens_are_left_to_transformers(tmp_path, monkeypatch, merge):
    monkeypatch.setattr(sys.modules[__name__], "MERGES", [*MERGES, merge])
    assert build_tokenizer(written(tmp_path / "file.gguf", "llama", "gpt2", BYTES, {}, {}, "smollm")) is None


@pytest.mark.parametrize("model", ["t5", "gpt2"])  # of another kind; without merges
def test_what_is_not_known_is_left_to_transformers(tmp_path, model):
    assert build_tokenizer(written(tmp_path / "file.gguf", "llama", model, PIECES, {}, {})) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_configurations(tmp_path, monkeypatch, family):
    header = read_gguf_header(write_gguf(tmp_path / "file.gguf", tiny_model(family), family))
    ours, theirs = both(tmp_path, monkeypatch, header)
    said = [json.loads((folder / "config.json").read_text()) for folder in (ours, theirs)]
    whole = [AutoConfig.from_pretrained(folder).to_dict() for folder in (ours, theirs)]
    for config in whole:
        del config["_name_or_path"], config["architectures"]
    assert "transformers_version" not in said[0]  # none of its classes wrote it
    assert whole[0] == whole[1]
    assert describe(said[0]) == describe(_without_defaults_of_ropes(said[1]))


def _without_defaults_of_ropes(config):
    """The configuration of Phi 3 without values of positions that only other types of ropes read."""
    ropes = config.get("rope_parameters")
    if config["model_type"] == "phi3":
        config = {**config, "rope_parameters": {name: ropes[name] for name in ("rope_type", "rope_theta")}}
        del config["original_max_position_embeddings"]
    return config
