"""From raw text to clean text: whitespace, language, Wikipedia's markup."""
