"""The files of references: hidden states over the tokens of a text, and the LM head. This package does not import
vLLM."""
