"""Remove passwords and signatures of URLs from texts."""

from __future__ import annotations

import re

# A path type makes one slash of two; a library may cut the host off, not knowing that it is a URL.
# hf://datasets/me/data@main is a revision, and host:80 no password.
# A scheme begins where its characters do: tried at each letter, a long word takes quadratic time.
_URL = r"(?<![\w+.-])[\w+.-]+:/{1,2}"
_USER = re.compile(rf"({_URL})(?:[^/\s]*@|[^/\s:@'\"]+:(?!\d)[^/\s'\")]+)")
_SIGNATURE = re.compile(
    rf"(https?:/{{1,2}}[^\s?#'\"]*)[?#][^\s)'\"]*|({_URL}[^\s?#'\"]*)\?[^\s)'\"]*=[^\s)'\"]*"
)


def masked(text: str) -> str:
    """Return a text without the users, passwords and queries of the URLs in it."""
    return _SIGNATURE.sub(r"\1\2", _USER.sub(r"\1", text))
