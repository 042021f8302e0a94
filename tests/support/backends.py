"""Train small tokenizers of the kinds that models have."""

from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import PostProcessor, RobertaProcessing, TemplateProcessing

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True)]


def word_piece(
    texts: Sequence[str], size: int, special: Sequence[str], processor: PostProcessor | None = None
) -> Tokenizer:
    """Return a BERT's; without a processor a template with its special tokens."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, show_progress=False, special_tokens=list(special)
    )
    backend.train_from_iterator(texts, trainer)
    backend.decoder = decoders.WordPiece()
    ends = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    template = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    backend.post_processor = processor or template
    return backend


def byte_level(texts: Sequence[str], size: int) -> Tokenizer:
    """Return a RoBERTa's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0))
    return backend


def unigram(texts: Sequence[str], size: int) -> Tokenizer:
    """Return an XLM-R's."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, show_progress=False, special_tokens=SPECIAL, unk_token="<unk>"
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return backend
