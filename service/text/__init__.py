"""Tokenization, chat templates, incremental detokenization and stop strings, for clients and servers.

It needs the packages tokenizers and jinja2, which are imported when they are first used.
"""

DEFAULT_TEMPLATE = "default"
"""Name of the chat template for conversations without tools, or of a model's only chat template."""
