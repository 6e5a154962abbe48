"""Text to tokens and back: tokenizing, templates, streaming decode, stop strings."""
