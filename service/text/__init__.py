"""Tokenization, chat templates, incremental detokenization and stop strings, for clients and servers.

It needs the packages tokenizers and jinja2, which are imported when they are first used.
"""
