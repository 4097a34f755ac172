"""A compact tokenizer encodes and decodes as the ``tokenizers`` library does with the same rules."""

import json
from functools import partial

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

import yggdrasil.native  # noqa: F401  (loads the native library)
from yggdrasil.checkpoints.compact_tokenizer import CompactTokenizer, open_compact, write_compact
from yggdrasil.checkpoints.kept_tokenizer import open_tokenizer, write_tokenizer
from yggdrasil.library.build import Native

SPACE = "\u2581"
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
# Equal ranks never are, but one token may come from several pairs, and a pair may be possible in two places.
MERGES = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"), ("a", "a"), ("aa", "aa"), ("c", "ab"), ("é", "a")]
LETTERS = "abcé"
ALPHABET = st.sampled_from(
    [*"aaabbbccé", " ", "  ", "\n", "数", "🙂", "e\u0301", SPACE, "<x>", "<y>", "<yy>", "<0x61>"]
)


def rules(*, is_bytes=False, falls_back=False, unknown=None, fuses=False, begins=False):
    """A tokenizer of few merges, with added tokens of which one is the beginning of another's text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if is_bytes else [*LETTERS, SPACE]
    merges = [pair for pair in MERGES if not is_bytes or "é" not in pair]
    names = [*(BYTE_TOKENS if falls_back else ()), *letters, "<x>", *([unknown] if unknown else ())]
    names += [name for name in dict.fromkeys(left + right for left, right in merges) if name not in names]
    model = BPE(
        {name: number for number, name in enumerate(names)}, merges, unk_token=unknown, byte_fallback=falls_back,
        fuse_unk=fuses,
    )  # fmt: skip
    made = Tokenizer(model)
    if is_bytes:
        made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made.normalizer = normalizers.Replace(" ", SPACE)
        made.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_previous")
        made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken("<x>", special=True), AddedToken("<y>", special=True)])
    made.add_tokens([AddedToken("<yy>", normalized=False)])
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", 1)])
    return made


KINDS = {
    "bytes": {"is_bytes": True},
    "bytes with a beginning": {"is_bytes": True, "begins": True},
    "pieces": {"falls_back": True, "unknown": "<unk>", "fuses": True},
    "pieces without bytes": {"unknown": "<unk>"},
    "unknown ones are one": {"unknown": "<unk>", "fuses": True},
    "unknown ones are left out": {},
}


def compact(made, folder):
    assert write_compact(folder, json.loads(made.to_str()), "digest")
    found = open_compact(folder, "digest", partial(Tokenizer.from_str, made.to_str()))
    assert isinstance(found, CompactTokenizer)
    return found


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_it_encodes_and_decodes_the_same(tmp_path, kind):
    whole = rules(**kind)
    ours = compact(whole, tmp_path)

    @examples(300)
    @given(st.lists(ALPHABET, max_size=30).map("".join), st.booleans(), st.booleans())
    def check(text, adds, skips):
        (tokens,) = whole.encode_batch([text], add_special_tokens=adds)
        (found,) = ours.encode_batch([text], add_special_tokens=adds)
        assert found.ids == tokens.ids
        assert ours.decode(found.ids, skip_special_tokens=skips) == whole.decode(found.ids, skip_special_tokens=skips)

    check()
    size = whole.get_vocab_size()
    assert ours.get_vocab_size() == size
    assert [ours.id_to_token(i) for i in range(size + 2)] == [whole.id_to_token(i) for i in range(size + 2)]
    assert ours.get_vocab() == whole.get_vocab()  # of the whole tokenizer
    assert ours.decode([size + 5]) == whole.decode([size + 5]) == ""


def prepends_to_the_first(made):
    made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)


@pytest.mark.parametrize(
    "change",
    [
        prepends_to_the_first,
        lambda made: made.add_tokens([AddedToken("<z>", lstrip=True, normalized=False)]),
        lambda made: made.add_tokens([AddedToken("<z>", normalized=True)]),
        lambda made: made.enable_truncation(5),
        lambda made: setattr(made.model, "ignore_merges", True),
    ],
    ids=["Metaspace", "strips", "normalised", "truncates", "whole words"],
)
def test_rules_that_it_would_not_follow_are_refused(tmp_path, change):
    made = rules(unknown="<unk>")
    change(made)
    assert not write_compact(tmp_path, json.loads(made.to_str()), "digest")
    assert open_compact(tmp_path, "digest", lambda: made) is None


def test_a_file_of_other_rules_or_a_damaged_one_is_not_opened(tmp_path, monkeypatch):
    made = rules()
    compact(made, tmp_path)
    assert open_compact(tmp_path, "another", lambda: made) is None
    with monkeypatch.context() as patch:
        patch.setattr(Native, "library", None)
        assert open_compact(tmp_path, "digest", lambda: made) is None
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert open_compact(tmp_path, "digest", lambda: made) is None


def test_a_written_tokenizer_is_opened_in_its_compact_form(tmp_path):
    made = rules(is_bytes=True)
    rules_of_it = json.loads(made.to_str())
    write_tokenizer(
        tmp_path, rules_of_it, {"chat_template": None, "special_tokens": {}, "eos_token_id": 1, "bos_token_id": 1}
    )
    found = open_tokenizer(tmp_path)
    assert isinstance(found.backend_tokenizer, CompactTokenizer)
    assert found.encode("abc <x>") == made.encode("abc <x>").ids
    assert found.backend_tokenizer.to_str() == made.to_str()
