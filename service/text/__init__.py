"""Text and token ids: a model's own tokenizer, text that comes token by token, and strings that end it.

Clients and servers share it. It needs the packages tokenizers and jinja2, which are imported when they are first used.
"""
