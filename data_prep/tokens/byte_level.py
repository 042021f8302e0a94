"""Train a byte-level BPE vocabulary that is the same at every run, as RoBERTa has one."""

from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import RobertaProcessing
from tokenizers.trainers import BpeTrainer

from data_prep import CorpusError
from data_prep.config import TrainByteLevelBPE
from data_prep.tokens import Tokens, normalizer
from data_prep.tokens.long_texts import split_text
from data_prep.tokens.wordpiece import LONG_WORD

# RoBERTa's, in the order of their ids 0 to 4. Positions of a RoBERTa begin after the id of <pad>.
NAMES = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}


def train_byte_level(texts: Callable[[], Iterator[str]], settings: TrainByteLevelBPE) -> Tokens:
    """Train on the texts that `texts()` yields; special tokens have ids 0 to 4, bytes 5 to 260.

    Raises:
        CorpusError: there is no text.
    """
    backend = Tokenizer(models.BPE())
    # The order matters: composed characters first, then without their accents, then in lower case.
    steps: list[Any] = []
    if settings.strip_accents:
        steps += [normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]
    if settings.lowercase:
        steps.append(normalizers.Lowercase())
    if steps or settings.normalization != "none":
        backend.normalizer = normalizer(settings.normalization, *steps)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # <mask> takes the space before it along, because a word's first token holds that space.
    special = [AddedToken(name, lstrip=role == "mask") for role, name in NAMES.items()]
    trainer = BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    pieces = (piece for text in texts() for piece in split_text(text))
    # The trainer's memory grows with the length of words.
    backend.train_from_iterator((LONG_WORD.sub(r"\1 ", piece) for piece in pieces), trainer)
    if backend.get_vocab_size() == len(NAMES) + len(pre_tokenizers.ByteLevel.alphabet()):
        raise CorpusError("tokenizer.train: no text to train on: check the sources and filters")
    ids = {name: id for id, name in enumerate(NAMES.values())}
    sep, cls = ((NAMES[role], ids[NAMES[role]]) for role in ("sep", "cls"))
    backend.post_processor = RobertaProcessing(sep, cls, trim_offsets=True, add_prefix_space=False)
    return Tokens(backend, NAMES, "the trained vocabulary")
