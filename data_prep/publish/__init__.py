"""Publish finished shards: as a Parquet folder with a dataset card, or as a copy elsewhere."""

from data_prep.publish.upload import check_url, upload

__all__ = ["check_url", "upload"]
