"""Prompt logprobs from hidden states and logits: torch and Triton on tensors, and their working memory. Nothing here
imports vLLM."""
