"""OpenAI completions that score: their requests are read fast, and logprobs written as the JSON that vLLM writes.

`handler` extends vLLM's own handlers, with calls of private methods.
"""
