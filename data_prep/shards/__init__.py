"""Write, read and check shards, the files between the corpus stage and training.

A shard is an Arrow IPC stream with one column, `input_ids`: rows of whole segments
`[CLS] ids [SEP]`, padded at the end. A side table names the document of each segment, and with
`keep_text` another file holds its text. `manifest.json` describes and seals a folder of them.
"""

from data_prep import CorpusError
from data_prep.shards.manifest import Manifest, load_manifest, vocabulary_sha256
from data_prep.shards.reading import ShardSet, open_shards
from data_prep.shards.segments import RowSegments, Segments
from data_prep.shards.verifying import check, check_file, read_listed, verify
from data_prep.shards.writing import write_shard, write_texts

__all__ = [
    "CorpusError",
    "Manifest",
    "RowSegments",
    "Segments",
    "ShardSet",
    "check",
    "check_file",
    "load_manifest",
    "open_shards",
    "read_listed",
    "verify",
    "vocabulary_sha256",
    "write_shard",
    "write_texts",
]
