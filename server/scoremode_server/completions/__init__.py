"""OpenAI completions that score. Their requests are read fast, and their logprobs are written as the JSON that vLLM
writes.

`handler` extends vLLM's own handlers, and calls private methods of them.
"""
