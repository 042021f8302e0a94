"""Write files atomically, lock shared folders, read and write JSON, and mask credentials."""

from data_prep.disk.atomic import hash_file, linked, sync, write_file
from data_prep.disk.locks import Busy, Lock, lock, refuse_if_held

__all__ = ["Busy", "Lock", "hash_file", "linked", "lock", "refuse_if_held", "sync", "write_file"]
