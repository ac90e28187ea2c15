"""OpenAI completions that score: their requests are read fast, and logprobs written as the JSON that vLLM writes.

`handler` and `generate` extend vLLM's own handlers, with calls of private methods.
"""
