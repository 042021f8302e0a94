"""Turn Wikipedia's articles into plain text, from wikitext or from other extractors' output."""

from data_prep.text.wikipedia.articles import PlainText, plain_text, repaired

__all__ = ["PlainText", "plain_text", "repaired"]
