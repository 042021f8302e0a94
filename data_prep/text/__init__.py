"""Turn raw text into clean text: whitespace, language, Wikipedia's markup."""
