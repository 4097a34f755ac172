"""Fill-in-the-middle: which tokens a model marks the parts of a text with."""

from transformers import PreTrainedTokenizerBase

# (before the beginning, before what follows, before the middle), by family.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, GPT
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)


def infill_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int, int] | None:
    """The three tokens; None where the tokenizer has none."""
    vocabulary = tokenizer.get_vocab()
    for marks in _MARKS:
        if all(mark in vocabulary for mark in marks):
            first, second, third = (vocabulary[mark] for mark in marks)
            return first, second, third
    return None
