"""Documents on disk become rows of tokens: files, readers, tokenizers, token stores, and the chunks that are samples."""
