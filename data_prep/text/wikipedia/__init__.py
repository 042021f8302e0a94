"""Turn Wikipedia's articles into plain text, from wikitext or from other extractors' output."""

from data_prep.text.wikipedia.articles import plain_text, repaired

__all__ = ["plain_text", "repaired"]
