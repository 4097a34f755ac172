"""Chooses the draft vocabulary of a head that drafts all of the target's tokens (see ``Vocabulary``)."""

from collections.abc import Sequence
from dataclasses import replace

from yggdrasil.calibration.job import Job
from yggdrasil.calibration.own_text import Document, prompt_key
from yggdrasil.calibration.pair import with_head
from yggdrasil.calibration.statistics.model_free import own_text
from yggdrasil.calibration.work_folder import read_or_drop
from yggdrasil.drafters.heads.draft_vocabulary import DRAFT_VOCABULARY, FILE_NAME, Vocabulary
from yggdrasil.drafters.heads.loading import LoadedHead

_HELD_OUT_EVERY = 10  # one document in so many measures the coverage
# Share of answers' tokens. A minute of text suffices: SmolLM2's 18,000 tokens give 92 %, 355,000 tokens 96 %.
_LEAST_COVERED = 0.9


class Frequent:
    """The ``most`` most frequent tokens of the target's own text ``documents``, and their coverage of held-out text."""

    def __init__(self, documents: Sequence[Document], vocab_size: int, most: int) -> None:
        held_out = documents[::_HELD_OUT_EVERY]
        rest = [document for i, document in enumerate(documents) if i % _HELD_OUT_EVERY]
        self.vocabulary = Vocabulary.of(documents, vocab_size, most)
        self.coverage = Vocabulary.of(rest, vocab_size, most).coverage(held_out)

    @property
    def is_enough(self) -> bool:
        """Whether the vocabulary covers at least 90 % of the held-out answers' tokens."""
        return self.coverage >= _LEAST_COVERED


def restrict_vocabulary(job: Job) -> Job:
    """Return ``job`` with its draft head restricted to the target's most frequent tokens, if that is possible.

    ``job`` itself is returned without a head, with a head that has a vocabulary of its own, with a target of at most
    ``DRAFT_VOCABULARY`` tokens, or if the target's generated text is too short to tell which tokens are frequent. The
    vocabulary is stored in the work folder, so that a resumed calibration measures the same steps.

    Raises:
        YggdrasilError: the vocabulary's file cannot be read or written.
    """
    head = job.assembly.second
    vocab_size = job.assembly.target.loaded.vocab_size
    if not isinstance(head, LoadedHead) or not head.drafts_all_tokens or vocab_size <= DRAFT_VOCABULARY:
        return job
    file = job.work / FILE_NAME
    vocabulary = read_or_drop(file, Vocabulary.load)
    if vocabulary is None:
        vocabulary = _chosen(job, vocab_size)
        vocabulary.save(file)
    if len(vocabulary.tokens) == vocab_size:
        return job
    pair = replace(job.pair, vocabulary=vocabulary)
    return job._replace(pair=pair, assembly=with_head(job.assembly, pair))


def _chosen(job: Job, vocab_size: int) -> Vocabulary:
    """Choose the vocabulary from the target's text, without answers to prompts that the head is evaluated on.

    If the frequent tokens cover too little of the text, the vocabulary has all tokens.
    """
    prompt_keys = {prompt_key(text) for text in job.texts}
    documents = [document for document in own_text(job) if document.prompt_key not in prompt_keys]
    found = Frequent(documents, vocab_size, DRAFT_VOCABULARY)
    known = f"{found.coverage:.0%} of what the target writes"
    if found.is_enough:
        said = f"drafting among the {len(found.vocabulary.tokens):,} most frequent tokens, {known}"
    else:
        written = sum(len(document.answer) for document in documents)
        said = (
            f"drafting among all {vocab_size:,} tokens: {written:,} of the target's own text say too little of which "
            "are frequent"
        )
    job.reporter.phase(said)(1.0)
    return found.vocabulary if found.is_enough else Vocabulary.whole(vocab_size)
