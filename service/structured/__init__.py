"""Structured output: generation constrained by a JSON schema, a regular expression or a grammar.

Public API: `Grammars`, `GrammarText`.
"""
