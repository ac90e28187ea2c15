"""References on disk: a model's hidden states over the tokens of a text, its LM head, and what is known of both.

Nothing here imports vLLM. Engine workers write and read through it (`vllm_patches`), and so do API servers (`scoring`).
"""
