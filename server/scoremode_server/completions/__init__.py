"""Answers requests to vLLM's own routes that score a prompt, such as OpenAI completions with `echo`. The answers are
vLLM's JSON, but take less time.

`handler` extends vLLM's own handlers, and calls their private methods.
"""
