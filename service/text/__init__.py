"""Text and token ids: a model's own tokenizer, text that comes token by token, and strings that end it.

Clients and servers share it. Nothing here is imported from transformers before a tokenizer is loaded.
"""
