"""The APIs of OpenAI and Anthropic over HTTP."""
