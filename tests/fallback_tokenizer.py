"""A tokenizer as SentencePiece's: words carry the space before them, characters that it lacks are bytes."""

from functools import cache

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

WORDS = ("▁", "▁the", "the", "▁tree", "s", "\n", "!", "▁Norse", "é")


@cache
def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Its decoder cuts off a space that nothing comes before, as those of Llama 2 and Mistral do."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tokens_of(*names: str) -> list[int]:
    """Tokens by their names; a longer character's by its bytes."""
    tokenizer, found = fallback_tokenizer(), []
    vocabulary = tokenizer.get_vocab()
    for name in names:
        pieces = [name] if name in vocabulary else [f"<0x{byte:02X}>" for byte in name.encode()]
        found += [vocabulary[piece] for piece in pieces]
    return found
