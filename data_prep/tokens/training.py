"""Train the kind of tokenizer that `tokenizer: {train: ...}` names."""

from collections.abc import Callable, Iterator

from data_prep.config import TrainByteLevelBPE, TrainWordPiece
from data_prep.tokens import Tokens, byte_level, wordpiece


def train_tokenizer(
    texts: Callable[[], Iterator[str]], settings: TrainWordPiece | TrainByteLevelBPE
) -> Tokens:
    """Train on the texts that `texts()` yields, the same at every run.

    Raises:
        CorpusError: there is no text.
    """
    if isinstance(settings, TrainByteLevelBPE):
        return byte_level.train_byte_level(texts, settings)
    return wordpiece.train_wordpiece(texts, settings)
