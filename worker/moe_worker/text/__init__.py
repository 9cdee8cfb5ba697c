"""Between text and tokens: templates, encoding, decoding, and where a text ends."""
