"""Answers that follow a JSON schema, a regular expression or a grammar.

Public API: `Grammars`, `GrammarText`.
"""
