"""Finished shards for others: a parquet folder with a dataset card, and copies elsewhere."""

from data_prep.publish.parquet import to_parquet
from data_prep.publish.upload import upload

__all__ = ["to_parquet", "upload"]
