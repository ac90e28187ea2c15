"""Computes the rows of scoring requests in an engine worker: their specification, their computation in the steps of
vLLM's two model runners, and the LM head. A row has the scores of one token.
"""
