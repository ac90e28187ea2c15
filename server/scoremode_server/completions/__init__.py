"""OpenAI completions that score: reading their requests fast, and writing logprobs as JSON as vLLM writes them.

`handler` calls the parts of vLLM's own completions handler, private ones too. `app` and `api` import from here.
"""
