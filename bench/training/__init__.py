"""Training of the embedded model: its text, its tokenizer's merges, and the run that makes its weights."""
