"""Load a tokenizer: of a folder, a file, a hub, a vocabulary, or finished shards."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data_prep import CorpusError
from data_prep.config import JsonTokenizer, Normalization, VocabularyTokenizer
from data_prep.disk.json_files import read_regular
from data_prep.shards import Manifest, read_listed
from data_prep.tokens.agreement import check_agreement, settings_of
from data_prep.tokens.tokenizer import NAMES, Tokens, explained

_BERT = ("Bert", "DistilBert", "Electra")  # classes of which all is in vocab.txt


def load(spec: str | Path | VocabularyTokenizer | JsonTokenizer, *, agrees: bool = True) -> Tokens:
    """Load a folder, tokenizer.json, vocab.txt, hub name or vocabulary; CorpusError if unusable.

    With `agrees` a folder is refused of which transformers makes another tokenizer.
    """
    if isinstance(spec, JsonTokenizer):
        path, names = spec.path, spec.model_dump(exclude={"path"}, exclude_none=True)
        if path.is_dir():
            return _of_folder(path, names, agrees)
        return _from_json(path, names)
    if isinstance(spec, VocabularyTokenizer):
        vocabulary = read_vocabulary(spec.vocab)
        if spec.pattern is None:
            return word_piece(vocabulary, lowercase=spec.lowercase, origin=str(spec.vocab))
        try:
            if not spec.pattern:
                raise ValueError("empty")
            split = pre_tokenizers.Split(Regex(spec.pattern), "isolated")
        except Exception as error:  # tokenizers raises bare Exception
            raise CorpusError(
                f"tokenizer.pattern {spec.pattern!r}: not a regex ({error})"
            ) from None
        numbered = {token: id for id, token in enumerate(vocabulary)}
        backend = Tokenizer(models.WordLevel(numbered, unk_token=NAMES["unk"]))
        if spec.lowercase:
            backend.normalizer = normalizers.Lowercase()
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
        return _with_special_tokens(backend, vocabulary, str(spec.vocab))
    path = Path(spec)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return _of_folder(path, {}, agrees)
    if path.is_dir() and (path / "vocab.txt").is_file():
        said = settings_of(path)
        kind = str(said.get("tokenizer_class", "BertTokenizer"))
        if kind.removesuffix("Fast").removesuffix("Tokenizer") not in _BERT:
            raise CorpusError(
                f"{path}: tokenizer_class {kind} has no tokenizer.json, and only BERT's is built "
                "of vocab.txt: save the tokenizer again with save_pretrained, as a fast one"
            )
        said = {key: value for key, value in said.items() if isinstance(value, bool)}
        tokens = word_piece(
            read_vocabulary(path / "vocab.txt"),
            said.get("do_lower_case"),
            said.get("strip_accents"),
            said.get("tokenize_chinese_chars", True),
            origin=str(path / "vocab.txt"),
        )
        if agrees:
            check_agreement(path, tokens.backend)
        return tokens
    if path.is_file():
        if path.suffix == ".json":
            return _from_json(path, {})
        return word_piece(read_vocabulary(path), origin=str(path))
    if path.is_dir():
        raise CorpusError(
            f"{path}: no tokenizer.json and no vocab.txt: write them with transformers, "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    refuse_path(spec)

    # Seconds to import, and workers never need them.
    from huggingface_hub import snapshot_download
    from transformers import AutoTokenizer

    name = str(spec)
    repository, _, revision = name.partition("@")
    try:
        # Without the repository's code; at a terminal, AutoTokenizer may offer to run it.
        folder = Path(
            snapshot_download(
                repository, revision=revision or None, allow_patterns=["*.json", "*.txt", "*.model"]
            )
        )
        for settings in (folder / "config.json", folder / "tokenizer_config.json"):
            if settings.is_file() and "auto_map" in json.loads(settings.read_bytes()):
                raise ValueError(f"its {settings.name} holds 'auto_map', which could run code")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise CorpusError(
            f"tokenizer {name!r}: neither a path nor a fast tokenizer that could be loaded "
            f"from the hub ({reason})"
        ) from None
    given = {key: getattr(tokenizer, f"{key}_token") for key in NAMES}
    return Tokens(backend, {key: token for key, token in given.items() if token}, name)


def refuse_path(spec: str | Path) -> None:
    """Raise CorpusError for a tokenizer that is written as a path; a hub's name passes."""
    if Path(spec).suffix in (".txt", ".json") or str(spec).startswith((".", "/", "~")):
        raise CorpusError(f"{spec}: no such tokenizer file or folder: check `tokenizer`")


def of_shards(folder: Path, manifest: Manifest) -> Tokens:
    """Load the tokenizer of finished shards; CorpusError unless it made them.

    Only the file that the manifest lists is read.
    """
    data = read_listed(folder, manifest, "tokenizer/tokenizer.json")
    path = folder / "tokenizer" / "tokenizer.json"
    backend = _parse(path, data)
    ids = manifest.tokenizer.special_ids.model_dump()
    names = {role: backend.id_to_token(id) or "" for role, id in ids.items()}
    return Tokens(backend, names, str(path))


def read_vocabulary(path: Path) -> list[str]:
    """Read one token a line, in id order; CorpusError if one is empty, repeated or unreadable."""
    try:
        lines = read_regular(path).decode().removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise CorpusError(f"{path}: cannot be read as a vocabulary: {reason}") from None
    vocabulary = [line.removesuffix("\r") for line in lines]
    seen: dict[str, int] = {}
    for number, token in enumerate(vocabulary, start=1):
        if not token:
            raise CorpusError(f"{path}: line {number} is empty: a vocabulary has one token a line")
        if token in seen:
            raise CorpusError(f"{path}: lines {seen[token]} and {number} are both {token!r}")
        seen[token] = number
    return vocabulary


def normalizer(normalization: Normalization, *steps: Any) -> Any:
    """Return Unicode's normalisation followed by `steps`; a single step is returned as it is."""
    unicode: dict[str, list[Any]]
    unicode = {"none": [], "nfc": [normalizers.NFC()], "nfkc": [normalizers.NFKC()]}
    # A single step stays what it was before this key: the fingerprint of old corpora depends on it.
    all_steps = [*unicode[normalization], *steps]
    return all_steps[0] if len(all_steps) == 1 else normalizers.Sequence(all_steps)


def word_piece(
    vocabulary: Sequence[str],
    lowercase: bool | None = None,
    strip_accents: bool | None = None,
    chinese: bool = True,
    *,
    normalization: Normalization = "none",
    origin: str,
) -> Tokens:
    """Build BERT's WordPiece over a vocabulary.

    Args:
        vocabulary: the tokens in id order.
        lowercase: None: if no entry has an upper-case letter.
        strip_accents: None: if it lower-cases, as BERT does.
        chinese: separate Chinese characters from their neighbours.
        normalization: Unicode's, before BERT's own.
        origin: opens the message of a CorpusError.
    """
    if lowercase is None:
        words = (token for token in vocabulary if not token.startswith("["))
        # Not isupper(): it holds for letters without a lower case, which lower-case BERT has.
        lowercase = all(word == word.lower() for word in words)
    numbered = {token: id for id, token in enumerate(vocabulary)}
    backend = Tokenizer(models.WordPiece(numbered, unk_token=NAMES["unk"]))
    backend.normalizer = normalizer(
        normalization,
        normalizers.BertNormalizer(
            lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=chinese
        ),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _with_special_tokens(backend, vocabulary, origin)


def _with_special_tokens(backend: Tokenizer, vocabulary: Sequence[str], origin: str) -> Tokens:
    # Adding a missing special token would give it an id that no teacher has.
    if missing := [name for name in NAMES.values() if name not in vocabulary]:
        raise CorpusError(f"{origin}: the vocabulary has no {', '.join(missing)}: add them")
    backend.add_special_tokens(list(NAMES.values()))
    return Tokens(backend, NAMES, origin)


def _from_json(path: Path, names: dict[str, str]) -> Tokens:
    try:
        data = read_regular(path)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}") from None
    return Tokens(_parse(path, data), names, str(path))


def _parse(path: Path, data: bytes) -> Tokenizer:
    with explained(str(path), "not a tokenizer.json"):
        return Tokenizer.from_str(data.decode())


def _of_folder(folder: Path, names: dict[str, str], agrees: bool) -> Tokens:
    tokens = _from_json(folder / "tokenizer.json", _names(folder) | names)
    if agrees:
        check_agreement(folder, tokens.backend, named="tokenizer_class" in settings_of(folder))
    return tokens


def _names(folder: Path) -> dict[str, str]:
    """Return the special tokens in a folder's settings."""
    settings = settings_of(folder)
    named = {role: settings.get(f"{role}_token") for role in NAMES}
    contents = {r: t.get("content") if isinstance(t, dict) else t for r, t in named.items()}
    return {role: token for role, token in contents.items() if isinstance(token, str) and token}
