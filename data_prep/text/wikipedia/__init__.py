"""Wikipedia's articles as plain text, from wikitext or from what another extractor made."""

from data_prep.text.wikipedia.articles import PlainText, plain_text, repaired

__all__ = ["PlainText", "plain_text", "repaired"]
