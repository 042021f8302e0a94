"""Make the vectors of a corpus's texts: with sentence-transformers, or from a table of pairs.

Shapes: n texts, W width of a vector.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from data_prep.disk import hash_file
from data_prep.disk.json_files import canonical_sha256
from data_prep.messages import extra, first_line, one_line
from data_prep.shards import Segments
from pretrain import RunError
from pretrain.device.precision import PRECISIONS
from pretrain.tasks.embedding.vectors import SEGMENTS

Vectors = NDArray[np.floating[Any]]
_BATCH = 32  # texts at a time
_UNIT = 1e-2  # how far a length may be from 1 in fp16
_SHOWN = 60  # characters of a text in a message


class FromModel:
    """Turn texts into vectors with a model of sentence-transformers, as its `encode` does.

    Args:
        name: a folder, a hub's name or `name@revision`.
        prompt: put before every text, or the name of one of the folder's prompts; by default the
            folder's own default.
        dim: numbers of a vector that are kept. If the folder divides vectors by their length, so
            are these.
        precision: of the weights: fp32, bf16 or fp16.
        trust_remote_code: let the library run code of the folder.
    """

    def __init__(
        self,
        name: str,
        *,
        prompt: str | None = None,
        dim: int | None = None,
        precision: str = "fp32",
        trust_remote_code: bool = False,
    ) -> None:
        if find_spec("sentence_transformers") is None:
            raise RunError(f"--model: needs sentence-transformers: {extra('vectors')}")
        from sentence_transformers import SentenceTransformer

        local = Path(name).is_dir()
        source, _, revision = (name, "", "") if local else name.partition("@")
        self.who, self.precision = f"model {name}", precision
        self.dim: int | None = None
        self.name = "" if local else name  # a published file names no folder of this machine
        # Settings and code; the weights are hashed as they were loaded.
        self.files = {
            path.relative_to(name).as_posix(): hash_file(path)[0]
            for path in sorted(Path(name).rglob("*") if local else ())
            if path.suffix in (".json", ".py", ".txt", ".model") and path.is_file()
        }
        with self._explained("be loaded"):
            self.model = SentenceTransformer(
                source,
                revision=revision or None,
                trust_remote_code=trust_remote_code,
                model_kwargs={"dtype": PRECISIONS[precision].dtype},
            ).eval()
        # A module that was not in the folder's precision.
        self.model.to(PRECISIONS[precision].dtype)
        # The library adds the names query and document with nothing behind them.
        known = {name: text for name, text in (self.model.prompts or {}).items() if text}
        if prompt is not None and re.fullmatch(r"[\w-]+", prompt) and prompt not in known:
            raise RunError(
                f"--prompt {prompt}: {self.who} has no text of this name (it has: "
                f"{', '.join(known) or 'none'}); a text of your own ends in a blank or a mark, "
                "such as 'query: '"
            )
        default = known.get(self.model.default_prompt_name or "", "")
        self.prompt: str = (default if prompt is None else known.get(prompt, prompt)) or ""
        self.normalised = type(self.model[-1]).__name__ == "Normalize"
        self.longest = self.model.max_seq_length
        self.num_cut = 0  # texts of which the end was not read
        whole = int(self(["a"]).shape[1])
        self.dim, self.width = dim, dim or whole
        if dim is not None and not 0 < dim <= whole:
            raise RunError(f"--dim {dim}: the vectors have {whole} numbers; take fewer")

    @property
    def digest(self) -> str:
        """Return a hash of all that shapes a vector, the libraries' versions included."""
        weights = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            weights.update(data.numpy().tobytes())
        modules = [[type(m).__name__, _settings(m)] for m in self.model]
        tokenizer = getattr(self.model.tokenizer, "backend_tokenizer", None)
        text = tokenizer.to_str() if tokenizer is not None else repr(self.model.tokenizer)
        parts_with: list[Any] = [m for m in self.model.modules() if hasattr(m, "config")]
        configs = [part.config.to_dict() for part in parts_with]
        parts = {
            "weights": weights.hexdigest(),
            "configs": repr(configs),
            "files": self.files,
            "modules": repr(modules),
            "tokenizer": hashlib.sha256(text.encode()).hexdigest(),
            "longest": self.longest,
            "prompt": self.prompt,
            "dim": self.dim,
            "precision": self.precision,
            "versions": [version(p) for p in ("sentence-transformers", "transformers")],
        }
        return canonical_sha256(parts)

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors [n, W]."""
        with self._explained("encode texts"):
            found = self.model.encode(
                list(texts),
                prompt=self.prompt,  # an empty one, too: None would be the folder's default
                batch_size=_BATCH,
                show_progress_bar=False,
                normalize_embeddings=self.normalised and self.dim is not None,
                truncate_dim=self.dim,
                convert_to_tensor=True,
            )
            if self.longest is not None:
                texts = [self.prompt + text for text in texts]
                ids = self.model.tokenizer(texts, truncation=False, verbose=False)["input_ids"]
                self.num_cut += sum(len(text) > self.longest for text in ids)
        vectors: Vectors = found.float().cpu().numpy()
        return vectors

    @contextmanager
    def _explained(self, task: str) -> Iterator[None]:
        """Turn any error of the libraries and of a folder's code into one line."""
        try:
            yield
        except (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reason, hint = first_line(error), ""
            if "trust_remote_code" in str(error):
                hint = "; if you trust that code, add --trust-remote-code"
            raise RunError(f"{self.who}: cannot {task} ({reason}){hint}") from error


class FromTable:
    """Look up the vectors of texts in a Parquet file with the columns `text` and `vector`.

    Texts are equal if they are so with every run of blanks as one space.

    Args:
        file: the table; `embedding` and `embeddings` are other names of the vectors' column.
        splits: the segments of each split, whose texts are looked up.
        dim: numbers of a vector that are kept.
        name: of the model that made the vectors, for the card.

    Raises:
        RunError: it is no such table, or has no vector of a text.
    """

    precision, num_cut, longest, prompt = "", 0, None, ""

    def __init__(
        self, file: Path, splits: Mapping[str, Segments], *, dim: int | None, name: str
    ) -> None:
        self.who, self.file, self.name, self.dim = f"--from {file}", file, name, dim
        self.width, self.vectors = 0, np.zeros((0, 0), dtype=np.float32)
        wanted: dict[bytes, int] = {}
        for text in texts_of(splits):
            wanted.setdefault(_key(text), len(wanted))
        self.there = np.zeros(len(wanted), dtype=np.bool_)
        try:
            table = pq.ParquetFile(file)
            columns = set(table.schema_arrow.names)
            column = next((c for c in ("vector", "embedding", "embeddings") if c in columns), None)
            if "text" not in columns or column is None:
                raise RunError(
                    f"{self.who}: its columns are {', '.join(sorted(columns))}; name them text and "
                    "vector"
                )
            kind = table.schema_arrow.field(column).type
            kind = getattr(kind, "value_type", kind)
            if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
                raise RunError(f"{self.who}: {column} is no list of numbers")
            self._read(table, column, wanted)
        except (pa.ArrowException, OSError) as error:
            raise RunError(
                f"{self.who}: cannot be read as Parquet ({first_line(error)})"
            ) from error
        self.place = wanted
        missing = [text for text in texts_of(splits) if not self.there[wanted[_key(text)]]]
        if missing:
            raise RunError(
                f"{self.who}: has no vector of {len(missing):,} of {len(self.there):,} texts, such "
                f"as {one_line(missing[0], _SHOWN)!r}; write the corpus's texts with --write-texts "
                "and add theirs"
            )
        lengths = np.linalg.norm(self.vectors.astype(np.float32), axis=1)
        self.normalised = bool((np.abs(lengths - 1) < _UNIT).all())
        if dim is not None:
            if not 0 < dim <= self.width:
                raise RunError(
                    f"--dim {dim}: {file} has vectors of {self.width}; take at most these"
                )
            self.vectors, self.width = self.vectors[:, :dim], dim
            if self.normalised:
                short = self.vectors.astype(np.float32)
                self.vectors = short / np.maximum(np.linalg.norm(short, axis=1)[:, None], 1e-12)

    @property
    def digest(self) -> str:
        """Return a hash of the file and of what is kept of a vector."""
        parts = {"file": hash_file(self.file)[0], "dim": self.dim, "name": self.name}
        return canonical_sha256(parts)

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors [n, W]."""
        return self.vectors[[self.place[_key(text)] for text in texts]]

    def _read(self, table: Any, column: str, wanted: Mapping[bytes, int]) -> None:
        """Keep the vectors of the wanted texts, and which of them are there."""
        exact: dict[int, str] = {}
        for batch in table.iter_batches(batch_size=SEGMENTS, columns=["text", column]):
            pairs = zip(batch["text"].to_pylist(), batch[column], strict=True)
            for text, cell in pairs:
                place = wanted.get(_key(text)) if isinstance(text, str) else None
                if place is None or not cell.is_valid:
                    continue
                try:
                    values = np.asarray(cell.values, dtype=np.float32)
                except (AttributeError, TypeError, ValueError):
                    raise RunError(f"{self.who}: {column} is no list of numbers") from None
                with np.errstate(over="ignore"):
                    short = values.astype(np.float16)
                if not short.any() or not np.isfinite(short).all():
                    raise RunError(
                        f"{self.who}: the vector of {one_line(text, _SHOWN)!r} is empty, all "
                        "zeros or not finite in fp16"
                    )
                if not self.width:
                    self.width = len(values)
                    self.vectors = np.zeros((len(wanted), self.width), dtype=np.float32)
                if len(values) != self.width:
                    raise RunError(
                        f"{self.who}: has vectors of {self.width} and of {len(values)} numbers"
                    )
                # Texts that differ in blanks may have other vectors: the first one is taken.
                if exact.setdefault(place, text) != text:
                    continue
                if self.there[place] and not np.array_equal(self.vectors[place], values):
                    raise RunError(
                        f"{self.who}: has two vectors of {one_line(text, _SHOWN)!r}; keep one"
                    )
                self.vectors[place], self.there[place] = values, True


def texts_of(splits: Mapping[str, Segments]) -> Iterator[str]:
    """Yield the text of every whole document."""
    for segments in splits.values():
        for begin in range(0, len(segments), SEGMENTS):
            for text in segments.texts(begin, min(begin + SEGMENTS, len(segments))):
                if text is not None:
                    yield text


def write_texts(file: Path, splits: Mapping[str, Segments]) -> int:
    """Write the different texts of a corpus to a new Parquet file; return their number."""
    if os.path.lexists(file):
        raise RunError(f"--write-texts {file}: already there; give another file")
    found = [*{_key(text): text for text in texts_of(splits)}.values()]
    temporary = file.with_name(f".tmp-{file.name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(found, pa.string())}), temporary)
    temporary.rename(file)
    return len(found)


def _key(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()


def _settings(module: Any) -> Any:
    """Return the settings of a module of sentence-transformers, where it has such."""
    get: Callable[[], Any] | None = getattr(module, "get_config_dict", None)
    return sorted(get().items()) if get is not None else None
