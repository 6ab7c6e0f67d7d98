"""Answers that follow a JSON schema, a regular expression or a grammar.

Face: `Grammars`, `GrammarText`.
"""
