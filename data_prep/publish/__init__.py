"""Publish finished shards: as a Parquet folder with a dataset card, or as a copy elsewhere."""

from data_prep.publish.parquet import to_parquet
from data_prep.publish.upload import upload

__all__ = ["to_parquet", "upload"]
